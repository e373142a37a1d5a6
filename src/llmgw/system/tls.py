"""TLS contexts, handshakes with a deadline, and what is read of certificates. Making them: openssl.py."""
from __future__ import annotations

import base64
import binascii
import hashlib
import re
import socket
import ssl
import time
from typing import List

from llmgw.domain.errors import ConfigError, ParseError

HANDSHAKE_SECONDS = 5.0
_PARTIAL_CHAIN = 0x80000      # ssl.VERIFY_X509_PARTIAL_CHAIN, which has a name from 3.10 on
_HANDSHAKE_RECORD = b"\x16"   # the first byte of everything that speaks TLS
_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----\s+([A-Za-z0-9+/=\s]+?)-----END CERTIFICATE-----")


class NotTls(Exception):
    """The peer does not speak TLS."""


def server_context(certificate: str, key: str = "") -> ssl.SSLContext:
    """Return a context that shows the certificate (with its chain) in a file; the key may be in the same file."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load(context, certificate, key)
    return context


def load(context: ssl.SSLContext, certificate: str, key: str = "") -> None:
    """Show these files from the next handshake on; ConfigError when they do not belong together."""
    try:
        context.load_cert_chain(certificate, key or None)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"the key {key} does not belong to the certificate {certificate}") from None
        raise ConfigError(f"cannot use the certificate {certificate}{f' with the key {key}' if key else ''}: "
                          f"{(error.reason or 'not PEM').lower().replace('_', ' ')}",
                          hint="both are PEM files; the key has no password") from None
    except OSError as error:
        named = [path for path in (certificate, key) if path and not _readable(path)]
        raise ConfigError(f"cannot read {' and '.join(named) or certificate}: {error.strerror or error}") from None


def _readable(path: str) -> bool:
    try:
        with open(path, "rb"):
            return True
    except OSError:
        return False


def client_context(ca_pem: str = "") -> ssl.SSLContext:
    """Return a context that trusts only ``ca_pem`` (or, when it is empty, what this machine trusts), names checked."""
    try:
        context = ssl.create_default_context(cadata=ca_pem or None)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"the certificate of the CA cannot be used: {error}") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_flags |= _PARTIAL_CHAIN     # an operator's trust may begin at an intermediate
    return context


def nobody_context() -> ssl.SSLContext:
    """Return a context that trusts nobody at all."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def unverified_context() -> ssl.SSLContext:
    """Return a context that believes everything: only to fetch a CA that is compared with its pin."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def certificates(pem: str) -> List[str]:
    """Return each certificate of a PEM text, as PEM."""
    return [ssl.DER_cert_to_PEM_cert(_der(body)) for body in _CERTIFICATE.findall(pem)]


def pin(pem: str) -> str:
    """Return the sha256, as hex, of the DER of the one certificate in ``pem``."""
    found = _CERTIFICATE.findall(pem)
    if len(found) != 1:
        raise ParseError(f"expected one certificate in PEM, found {len(found)}")
    return hashlib.sha256(_der(found[0])).hexdigest()


def _der(body: str) -> bytes:
    try:
        return base64.b64decode("".join(body.split()), validate=True)
    except (binascii.Error, ValueError):
        raise ParseError("a certificate in PEM that cannot be read") from None


def accept(sock: socket.socket, context: ssl.SSLContext, seconds: float = HANDSHAKE_SECONDS) -> ssl.SSLSocket:
    """Return the connection after its handshake; NotTls for a plain peer, OSError for one that fails or stalls."""
    deadline = time.monotonic() + seconds
    sock.settimeout(seconds)
    first = first_byte(sock)
    if first and not is_handshake(first):
        raise NotTls()
    wrapped = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
    try:
        wrapped.settimeout(max(0.001, deadline - time.monotonic()))
        wrapped.do_handshake()
        return wrapped
    except BaseException:
        wrapped.close()
        raise


def first_byte(sock: socket.socket) -> bytes:
    """Return the first byte that has come, and leave it there; empty when the peer has gone."""
    return sock.recv(1, socket.MSG_PEEK)


def end_writing(sock: socket.socket) -> None:
    """Say that nothing more follows."""
    sock.shutdown(socket.SHUT_WR)


def is_handshake(first: bytes) -> bool:
    """Return whether a connection that begins with this byte speaks TLS."""
    return first[:1] == _HANDSHAKE_RECORD
