"""The one word that lets a machine in: the pin of the server's CA, an id and a secret, with a check at its end.

``llmgw1.<base64url sha256 of the CA's DER>.<id>.<secret><crc32>``
"""
from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass
from typing import Tuple

from llmgw.domain.errors import ParseError
from llmgw.domain.secret import Secret

GATE_DOMAIN = "gate.llmgw.internal"    # of the names in the certificates of gates
VERSION = "llmgw1"
PIN_LETTERS = 43              # 32 bytes as base64url, without the = at its end
ID_LETTERS = 8
SECRET_LETTERS = 43
CHECK_LETTERS = 8             # crc32 as hex digits
LETTERS = len(VERSION) + 1 + PIN_LETTERS + 1 + ID_LETTERS + 1 + SECRET_LETTERS + CHECK_LETTERS
_WHOLE = re.compile(r"llmgw1\.([A-Za-z0-9_-]{43})\.([A-Za-z0-9]{8})\.([A-Za-z0-9_-]{43})([0-9a-f]{8})")
_AGAIN = "copy the whole string once more from where llmgw.pyz ctl token create printed it"


@dataclass(frozen=True)
class JoinRequest:
    """What a machine says of itself. ``name`` is a wish; ``names`` are those by which clients call a router."""

    name: str
    machine: str = ""
    names: Tuple[str, ...] = ()


@dataclass(frozen=True)
class JoinAnswer:
    """The credential of a node or router, and a certificate for what it listens with; PEM, times by the wall clock."""

    role: str
    name: str
    token: Secret
    fleet_ca: str
    certificate: str
    key: Secret
    renew_at: float
    ends_at: float
    tls_name: str = ""        # the one in a gate's certificate


@dataclass(frozen=True)
class Renewed:
    """A certificate in place of the one before."""

    certificate: str
    key: Secret
    renew_at: float
    ends_at: float
    fleet_ca: str = ""


@dataclass(frozen=True)
class JoinString:
    """``ca_sha256`` is the pin, as hex; ``id`` and ``secret`` are what the server knows the string by."""

    ca_sha256: str
    id: str
    secret: Secret

    @property
    def token(self) -> Secret:
        """What is shown to the server, once it is known to be the right one."""
        return Secret(f"llmgw_join_{self.id}_{self.secret.reveal()}")


def write(join: JoinString) -> str:
    """Return the string that ``read`` takes back."""
    pin = base64.urlsafe_b64encode(bytes.fromhex(join.ca_sha256)).decode("ascii").rstrip("=")
    text = f"{VERSION}.{pin}.{join.id}.{join.secret.reveal()}"
    return text + _check(text)


def read(text: str) -> JoinString:
    """Return what a join string holds; ParseError says what befell it on the way. Its text is in no message."""
    text = text.strip().strip("'\"").strip()
    if not text:
        raise ParseError("the join string is empty", hint=_AGAIN)
    if re.search(r"\s", text):
        raise ParseError("the join string has a space or a line break in it", hint="it is one word: " + _AGAIN)
    version = text.partition(".")[0]
    if version != VERSION:
        if re.fullmatch(r"llmgw[0-9]{1,6}", version):
            raise ParseError(f"the join string is of another version of llmgw ({version}, this one reads {VERSION})",
                             hint="use the same llmgw.pyz as the control plane")
        raise ParseError(f"not a join string: it does not begin with {VERSION}.", hint=_AGAIN)
    if len(text) < LETTERS:
        raise ParseError(f"the join string is cut off: it has {len(text)} of {LETTERS} letters", hint=_AGAIN)
    if len(text) > LETTERS:
        raise ParseError(f"the join string is too long: it has {len(text)} letters instead of {LETTERS}", hint=_AGAIN)
    match = _WHOLE.fullmatch(text)
    if match is None or _check(text[:-CHECK_LETTERS]) != match.group(4):
        raise ParseError("the join string was changed on the way: its check does not fit", hint=_AGAIN)
    pin, identity, secret, _ = match.groups()
    return JoinString(base64.urlsafe_b64decode(pin + "=").hex(), identity, Secret(secret))


def line(url: str, role: str, join: str, pyz_sha256: str, key_pin: str) -> str:
    """Return the one line that brings a machine into the cluster: three steps, nothing piped into a shell.

    ``key_pin`` is the base64 sha256 of the public key that the server shows; empty: the machine's own trust decides.
    The secret is in the environment of the last step, in no program's arguments.
    """
    pinned = f"-k --pinnedpubkey 'sha256//{key_pin}' " if key_pin else ""
    more = " --listen 0.0.0.0:7801" if role == "router" else ""
    command = "agent" if role == "node" else role
    return (f"curl -fsS {pinned}-o llmgw.pyz {url}/llmgw.pyz && echo '{pyz_sha256}  llmgw.pyz' | sha256sum -c - && "
            f"LLMGW_JOIN='{join}' sh ./llmgw.pyz {command} --server {url}{more}")


def read_pin(text: str) -> str:
    """Return the sha256 of a CA, as hex, from ``sha256:`` and hex digits or base64url."""
    kind, _, value = text.strip().partition(":")
    if kind == "sha256" and re.fullmatch(r"[0-9a-fA-F]{64}", value):
        return value.lower()
    if kind == "sha256" and re.fullmatch(r"[A-Za-z0-9_-]{43}", value):
        return base64.urlsafe_b64decode(value + "=").hex()
    raise ParseError(f"not the pin of a CA: {text!r:.100}", hint="write sha256: and its 64 hex digits")


def _check(text: str) -> str:
    return f"{binascii.crc32(text.encode('ascii', 'replace')):08x}"
