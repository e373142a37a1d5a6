"""Whom a router trusts, who it is to the control plane, and the certificate it shows to clients."""
from __future__ import annotations

import argparse
import os
import threading
from typing import Any, List, Optional

from llmgw.api import joining
from llmgw.api.client import ControlClient
from llmgw.api.joining import Credential
from llmgw.domain.errors import ConfigError, UsageError
from llmgw.domain.join import JoinRequest
from llmgw.domain.secret import Secret
from llmgw.parse.address import is_loopback
from llmgw.system import addresses, clock, files, loop, tls

RENEWAL_SECONDS = 300.0


class Door:
    """What the router listens with: ``context`` None is plain HTTP, on loopback only."""

    def __init__(self, folder: str, credential: Optional[Credential], context: Any, names: List[str]) -> None:
        self._folder, self.credential, self.context, self._names = folder, credential, context, names
        self.ca_file = ""
        if credential is not None:
            self.ca_file = os.path.join(folder, "ca.pem")
            files.write_atomic(self.ca_file, credential.fleet_ca.encode("ascii"), 0o644)

    def look_after(self, client: ControlClient, stop: threading.Event) -> None:
        """Renew the certificate when it is time, in a thread of its own."""
        if self.credential is not None:
            renewal = joining.Renewal(client, _credential_file(self._folder), self.credential, lambda: self._names,
                                      clock.Clock().wall, self._take)
            loop.start("certificate", renewal.turn, every=RENEWAL_SECONDS, stop=stop)

    def _take(self, credential: Credential) -> None:
        self.credential = credential
        if self.context is not None:
            path = joining.certificate_file(self._folder, credential)
            tls.load(self.context, path)
            joining.remove_other_certificates(self._folder, path)


def door(args: argparse.Namespace, folder: str, host: str) -> Door:
    """Join where that is asked for, and return what to listen with; ConfigError off loopback without a certificate."""
    names = [*args.tls_name, *([host] if host not in ("0.0.0.0", "::") else []), *addresses.own_names()]
    asked = JoinRequest(args.name or os.uname().nodename or "router", names=tuple(dict.fromkeys(names)))
    held = joining.credential(_credential_file(folder), "router", args.server, joining.given(args.join_file), asked)
    if args.tls_certificate:
        return Door(folder, held, tls.server_context(args.tls_certificate, args.tls_key), names)
    if is_loopback(host):
        return Door(folder, held, None, names)
    if held is None:
        raise ConfigError(f"the router does not listen on {host}: off loopback it needs TLS, and it has no certificate",
                          hint="let it join (llmgw.pyz ctl token create --role router), or give --tls-certificate "
                               "and --tls-key")
    path = joining.certificate_file(folder, held)
    joining.remove_other_certificates(folder, path)
    return Door(folder, held, tls.server_context(path), names)


def client(args: argparse.Namespace, held: Optional[Credential]) -> Optional[ControlClient]:
    """Return what talks to the control plane; None when none is named."""
    servers = args.server or (held.servers if held is not None else ())
    if not servers:
        return None
    if held is not None:
        return ControlClient(servers, held.token, ca_pem=held.server_ca, timeout=10.0)
    return ControlClient(servers, _token(args.token_file), ca_pem=_ca(args.ca_file), timeout=10.0)


def _credential_file(folder: str) -> str:
    return os.path.join(folder, "credential.json")


def _ca(path: str) -> str:
    if not path:
        return ""
    data = files.read_bytes(path, 1 << 20)
    if data is None:
        raise ConfigError(f"{path}: no such file", hint="it holds the control plane's CA, as PEM")
    return data.decode("ascii", "replace")


def _token(path: str) -> Secret:
    if not path:
        raise UsageError("a control plane is named, but no token",
                         hint="give --token-file FILE, or a join string in LLMGW_JOIN")
    data = files.read_bytes(path, 4096)
    if data is None:
        raise ConfigError(f"there is no token file {path}", hint="the server writes it as tokens/router")
    return Secret(data.decode("ascii", "replace").strip())
