"""The cluster's certificates: two CAs below ``tls/``, the server's own certificate, and those of gates and routers.

The CA that is pinned in join strings signs the server's certificate and nothing else, so that nobody who has a
certificate of a gate or a router can pass for the control plane. Whatever is missing here is made when it is needed.
"""
from __future__ import annotations

import logging
import os
import secrets
import threading
from dataclasses import dataclass
from typing import Any, Callable, Optional, Sequence, Tuple

from llmgw.domain.errors import ConfigError, LlmgwError, NotFound, RequirementMissing
from llmgw.domain.join import GATE_DOMAIN
from llmgw.parse.address import is_loopback
from llmgw.system import addresses, failpoint, files, openssl, tls
from llmgw.system.clock import Clock

log = logging.getLogger(__name__)

CA_DAYS = 3650
SERVER_DAYS = 825
FLEET_DAYS = 90
RENEW_SHARE = 2 / 3
CHECK_SECONDS = 600.0
DAY = 86400.0
_SCRATCH = ".making-"


@dataclass(frozen=True)
class GivenTls:
    """The operator's own certificate. ``ca`` empty: trust begins at the last certificate in ``certificate``."""

    certificate: str
    key: str
    ca: str = ""


@dataclass(frozen=True)
class Issued:
    """A certificate with its key, as PEM; the key is not kept here."""

    certificate: str
    key: str
    renew_at: float
    ends_at: float


class Authority:
    """Owner of ``tls/``. Without ``open`` there is no TLS, and nothing on disk."""

    def __init__(self, data_dir: str, clock: Clock, given: Optional[GivenTls] = None,
                 names: Callable[[], Sequence[str]] = lambda: ()) -> None:
        self._folder = os.path.join(data_dir, "tls")
        self._clock, self._given, self._names = clock, given, names
        self._lock = threading.Lock()
        self._shown: Tuple[object, ...] = ()         # what the context was made of
        self._said = ""
        self.context: Any = None                     # of the server; None: it speaks plain HTTP on loopback

    def open(self) -> None:
        """Make what is missing, and the context that the server listens with."""
        files.make_dir(self._folder)
        os.chmod(self._folder, 0o700)
        for name in os.listdir(self._folder):
            if name.startswith(_SCRATCH):            # a kill left it
                files.remove(os.path.join(self._folder, name))
        certificate, key = self._server_files()
        self.context = tls.server_context(certificate, key)
        self._shown = (_signature(certificate), _signature(key))

    def refresh(self) -> float:
        """Renew the server's certificate when it is time, and show new files; return when to look again."""
        if self.context is not None:
            try:
                certificate, key = self._server_files()
                shown = (_signature(certificate), _signature(key))
                if shown != self._shown:
                    tls.load(self.context, certificate, key)
                    self._shown = shown
                    log.info("a new certificate is shown from now on file=%s", certificate)
                self._said = ""
            except LlmgwError as error:              # the one that is shown may still be good
                if error.message != self._said:
                    log.error("the certificate was not renewed reason=%s: %s", error.reason, error.message)
                self._said = error.message
        return CHECK_SECONDS

    # What others must know.

    @property
    def host_names(self) -> Tuple[str, ...]:
        """Return the names that clients may call this server by."""
        return tuple(dict.fromkeys([*self._names(), *addresses.own_names()]))

    def ca(self) -> str:
        """Return the certificate at which trust in this server begins, as PEM."""
        if self.context is None:
            raise NotFound("this server listens on loopback without TLS, and has no CA",
                           hint="set listen: 0.0.0.0:7800 in server.yaml and start it again")
        if self._given is None:
            return _text(self._path("server", "ca.pem"))
        found = tls.certificates(_text(self._given.ca or self._given.certificate))
        if not found:
            raise ConfigError(f"{self._given.ca or self._given.certificate}: holds no certificate")
        return found[-1]

    def key_pin(self) -> str:
        """Return the pin of the key that this server shows, as curl takes it; empty when nothing can tell it."""
        try:
            return openssl.key_pin(self._server_files()[0])
        except RequirementMissing:
            return ""

    @property
    def public_host(self) -> str:
        """Return what other machines best call this server by."""
        others = [name for name in self.host_names if name != "localhost" and not is_loopback(name)]
        addressed = [name for name in others if name in addresses.own_addresses()]
        return next(iter([*self._names(), *addressed, *others]), "localhost")

    def ca_file(self) -> str:
        """Return the path of a file with ``ca()``, for ctl on this machine; empty without TLS."""
        if self.context is None:
            return ""
        path = os.path.join(self._folder, "server-ca.pem")
        files.write_atomic(path, self.ca().encode("ascii"), 0o644)
        return path

    def fleet_ca(self) -> str:
        """Return the CA of gates and routers, as PEM; empty when nobody has needed one yet."""
        path = self._path("fleet", "ca.pem")
        return _text(path) if os.path.exists(path) else ""

    def issue(self, names: Sequence[str]) -> Issued:
        """Return a new certificate of the fleet's CA for ``names``, with a new key."""
        with self._lock:
            files.make_dir(self._folder)
            ca = self._ca("fleet")
            now = self._clock.wall()
            scratch = self._scratch()
            try:
                key, out = os.path.join(scratch, "key.pem"), os.path.join(scratch, "cert.pem")
                openssl.make_key(key)
                openssl.make_certificate(scratch, ca, key, out, names, now, FLEET_DAYS)
                return Issued(_text(out), _text(key), now + FLEET_DAYS * DAY * RENEW_SHARE, now + FLEET_DAYS * DAY)
            finally:
                files.remove(scratch)

    # What is on disk.

    def _server_files(self) -> Tuple[str, str]:
        """Return the files of the server's certificate and key; made or renewed when they are ours and it is time."""
        if self._given is not None:
            return self._given.certificate, self._given.key
        with self._lock:
            ca = self._ca("server")
            certificate, key = os.path.join(self._folder, "server.pem"), os.path.join(self._folder, "server.key")
            names = [name for name in self.host_names if "%" not in name]
            if not self._is_good(certificate, names):
                self._make_server(ca, certificate, key, names)
            return certificate, key

    def _is_good(self, certificate: str, names: Sequence[str]) -> bool:
        known = files.read_bytes(certificate + ".names", 1 << 16)
        if known is None or not os.path.exists(certificate):
            return False
        if not set(names) <= set(known.decode("utf-8", "replace").split()):
            return False
        return self._clock.wall() < openssl.ends_at(certificate) - SERVER_DAYS * DAY * (1 - RENEW_SHARE)

    def _make_server(self, ca: Tuple[str, str], certificate: str, key: str, names: Sequence[str]) -> None:
        """Write the server's certificate. Its key stays the same: tools that pin the key go on."""
        scratch = self._scratch()
        try:
            if not os.path.exists(key):
                made = os.path.join(scratch, "key.pem")
                openssl.make_key(made)
                files.write_atomic(key, _text(made).encode("ascii"))
            out = os.path.join(scratch, "cert.pem")
            openssl.make_certificate(scratch, ca, key, out, names, self._clock.wall(), SERVER_DAYS)
            files.write_atomic(certificate, _text(out).encode("ascii"))
            failpoint.reach("tls-certificate-before-names")
            files.write_atomic(certificate + ".names", "\n".join(names).encode("utf-8"))
            log.info("certificate made for names=%s", ",".join(names))
        finally:
            files.remove(scratch)

    def _ca(self, name: str) -> Tuple[str, str]:
        """Return the files (certificate, key) of a CA; both appear at once."""
        folder = self._path(name)
        if not os.path.isdir(folder):
            scratch = self._scratch()
            openssl.make_ca(scratch, f"llmgw {name} CA {secrets.token_hex(4)}", self._clock.wall(), CA_DAYS)
            for left in os.listdir(scratch):
                path = os.path.join(scratch, left)
                if left not in ("ca.pem", "ca.key"):
                    files.remove(path)
                else:
                    os.chmod(path, 0o600)
                    files.fsync_file(path)
            failpoint.reach("tls-ca-before-rename")
            with files.storing("make", folder):
                os.rename(scratch, folder)
                files.fsync_dir(self._folder)
        return self._path(name, "ca.pem"), self._path(name, "ca.key")

    def _path(self, *words: str) -> str:
        return os.path.join(self._folder, *words)

    def _scratch(self) -> str:
        return files.make_dir(os.path.join(self._folder, _SCRATCH + secrets.token_hex(6)))


def gate_name() -> str:
    """Return a new name for one node's gate: nobody else ever has a certificate for it."""
    return f"{secrets.token_hex(12)}.{GATE_DOMAIN}"


def _text(path: str) -> str:
    data = files.read_bytes(path, 1 << 20)
    if data is None:
        raise ConfigError(f"{path}: no such file")
    return data.decode("ascii", "replace")


def _signature(path: str) -> Tuple[int, int, int]:
    with files.storing("read", path):
        stat = os.stat(path)
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
