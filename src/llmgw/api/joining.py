"""How a machine comes to trust a control plane, and to a credential of its own: agent, router and ctl alike.

Nothing is sent before the server's CA was compared with the pin; the connection that brought it is not used again.
"""
from __future__ import annotations

import hmac
import logging
import os
import threading
from dataclasses import dataclass, replace
from typing import Callable, Sequence, Tuple

from llmgw.api import paths, wire
from llmgw.api.client import ControlClient
from llmgw.domain import join
from llmgw.domain.codec import Record, number, secret, text, texts
from llmgw.domain.errors import ApiError, ConfigError, Forbidden, LlmgwError, ParseError, TryAgain, Unreachable
from llmgw.domain.join import JoinAnswer, JoinRequest, JoinString
from llmgw.domain.secret import Secret
from llmgw.system import files, tls
from llmgw.system.http_client import HttpClient

log = logging.getLogger(__name__)

ENVIRONMENT = "LLMGW_JOIN"
RETRY_SECONDS = 2.0
CA_BYTES = 1 << 20


@dataclass(frozen=True)
class Credential:
    """What a joined machine keeps (0600): who it is, whom it trusts, and what it shows when it listens."""

    role: str
    name: str
    token: Secret
    server_ca: str
    fleet_ca: str
    certificate: str
    key: Secret
    renew_at: float           # by the wall clock
    ends_at: float
    join_id: str              # of the string it joined with: another one means joining anew
    servers: Tuple[str, ...] = ()
    tls_name: str = ""


CREDENTIAL = Record(Credential, role=text, name=text, token=secret, server_ca=text, fleet_ca=text, certificate=text,
                    key=secret, renew_at=number, ends_at=number, join_id=text, servers=texts, tls_name=text)


def pinned_ca(url: str, ca_sha256: str, timeout: float = 10.0) -> str:
    """Return the CA of the server at ``url`` as PEM; Forbidden when it is not the one with this pin."""
    if not url.startswith("https://"):
        raise ConfigError(f"{url}: joining goes over TLS only", hint="write its address as https://HOST:PORT")
    asking = HttpClient(url, context=tls.unverified_context(), timeout=timeout)
    try:
        answer = asking.request("GET", paths.CA, max_body=CA_BYTES)
    finally:
        asking.close()
    try:
        pem = answer.body.decode("ascii") if answer.status == 200 else ""
        found = tls.pin(pem)
    except (ParseError, UnicodeDecodeError):
        raise Forbidden(f"{url}: it shows no CA (HTTP {answer.status}): it is not the control plane that is meant") \
            from None
    if not hmac.compare_digest(found, ca_sha256):
        raise Forbidden(f"{url}: its CA is not the one that was named: somebody else answers at this address, or its "
                        "certificates were made anew; nothing was sent",
                        hint="check the address, and make a new string with llmgw.pyz ctl token create")
    return pem


def kept(path: str) -> "Credential | None":
    """Return the credential that was kept in a file, None when there is none."""
    data = files.read_bytes(path, CA_BYTES)
    if data is None:
        return None
    found: Credential = wire.loads(CREDENTIAL, data, path)
    return found


def given(join_file: str) -> "JoinString | None":
    """Return the join string in a file, or in the environment, from where it is taken away; None: there is none."""
    named = os.environ.pop(ENVIRONMENT, "")
    if join_file:
        data = files.read_bytes(join_file, 4096)
        if data is None:
            raise ConfigError(f"{join_file}: no such file", hint="it holds the join string")
        named = data.decode("utf-8", "replace")
    return join.read(named) if named.strip() else None


def credential(path: str, role: str, servers: Sequence[str], string: "JoinString | None", request: JoinRequest,
               stop: Callable[[], bool] = lambda: False) -> "Credential | None":
    """Return the kept credential, or join with ``string`` and keep it; None when there is neither.

    A control plane that does not answer yet is waited for; whatever it refuses is an error.
    """
    known = kept(path)
    if known is not None and known.role != role:
        raise ConfigError(f"{path}: is the credential of a {known.role}, not of a {role}",
                          hint="give each its own data folder with --data-dir")
    if string is None or (known is not None and known.join_id == string.id):
        return known
    if not servers:
        raise ConfigError("a join string is given, but no control plane", hint="give its address with --server URL")
    pause, said = threading.Event(), ""
    while True:
        try:
            made = _join(servers, role, string, request)
            files.make_dir(os.path.dirname(path))
            files.write_atomic(path, wire.dumps(CREDENTIAL, made))
            log.info("joined as %s=%s url=%s", role, made.name, servers[0])
            return made
        except (Unreachable, TryAgain) as error:
            if stop():
                raise
            if error.message != said:
                log.warning("cannot join yet: %s", error.message)
            said = error.message
        pause.wait(RETRY_SECONDS)


def _join(servers: Sequence[str], role: str, string: JoinString, request: JoinRequest) -> Credential:
    problem: LlmgwError = Unreachable("no control plane is named")
    for url in servers:
        try:
            ca = pinned_ca(url, string.ca_sha256)
            asking = ControlClient([url], string.token, ca_pem=ca)
            try:
                answer: JoinAnswer = asking.call("POST", paths.JOIN, send=wire.JOIN_REQUEST, value=request,
                                                 receive=wire.JOIN_ANSWER, timeout=30.0)
            finally:
                asking.close()
        except ApiError as error:
            if error.status != 503:
                raise
            problem = TryAgain(error.message)
            continue
        except Unreachable as error:
            problem = error
            continue
        if answer.role != role:
            raise ConfigError(f"the join string is for a {answer.role}, not for a {role}",
                              hint=f"make another: llmgw.pyz ctl token create --role {role}")
        return Credential(answer.role, answer.name, answer.token, ca, answer.fleet_ca, answer.certificate, answer.key,
                          answer.renew_at, answer.ends_at, string.id, tuple(servers), answer.tls_name)
    raise problem


class Renewal:
    """Keeps the certificate of a joined machine fresh; ``take`` is told of each new credential."""

    def __init__(self, client: ControlClient, path: str, held: Credential, names: Callable[[], Sequence[str]],
                 now: Callable[[], float], take: Callable[[Credential], None]) -> None:
        self._client, self._path, self._held = client, path, held
        self._names, self._now, self._take = names, now, take

    def turn(self) -> None:
        """Ask for a new certificate when two thirds of the life of this one are over."""
        if self._now() < self._held.renew_at:
            return
        data = self._client.json("POST", paths.CERTIFICATE, {"names": list(self._names())}, timeout=30.0)
        new = wire.RENEWED.decode(data, "certificate")
        held = replace(self._held, certificate=new.certificate, key=new.key, renew_at=new.renew_at,
                       ends_at=new.ends_at, fleet_ca=new.fleet_ca or self._held.fleet_ca)
        files.write_atomic(self._path, wire.dumps(CREDENTIAL, held))
        self._held = held
        self._take(held)
        log.info("the certificate was renewed name=%s", held.name)


def certificate_file(folder: str, held: Credential) -> str:
    """Write certificate and key into one file (0600) of ``folder``; return its path, another for each certificate."""
    data = (held.certificate.rstrip() + "\n" + held.key.reveal().rstrip() + "\n").encode("ascii")
    path = os.path.join(folder, f"certificate-{int(held.ends_at)}-{tls.pin(held.certificate)[:12]}.pem")
    if files.read_bytes(path, CA_BYTES) != data:
        files.make_dir(folder)
        files.write_atomic(path, data)
    return path


def remove_other_certificates(folder: str, path: str) -> None:
    """Remove what ``certificate_file`` wrote before."""
    for name in os.listdir(folder):
        if name.startswith("certificate-") and name.endswith(".pem") and os.path.join(folder, name) != path:
            files.remove(os.path.join(folder, name))
