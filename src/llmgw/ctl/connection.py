"""Which control plane ctl talks to, and with which token."""
from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass
from typing import List, Optional

from llmgw.api import joining
from llmgw.api.client import ControlClient
from llmgw.domain.errors import ConfigError, Unreachable
from llmgw.domain.join import read_pin
from llmgw.domain.secret import Secret
from llmgw.system import data_dir, files

_open: List[ControlClient] = []


@dataclass(frozen=True)
class Endpoint:
    """What a server on this machine wrote down for us. ``alive`` is false for a stale file."""

    url: str
    token_file: str
    alive: bool
    ca_file: str = ""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` the options that name a server."""
    group = parser.add_argument_group("which server")
    group.add_argument("--server", metavar="URL", default="",
                       help="the control plane, several with commas "
                            "(or LLMGW_SERVER; without: the one on this machine)")
    group.add_argument("--token-file", metavar="FILE", default="",
                       help="file with an admin or viewer token (or LLMGW_TOKEN_FILE, LLMGW_TOKEN)")
    group.add_argument("--ca-file", metavar="FILE|sha256:PIN", default="",
                       help="CA that signed the server's certificate, or its pin as `token create` prints it "
                            "(or LLMGW_CA)")


def connect(options: argparse.Namespace) -> ControlClient:
    """Return a client for the named control plane, or for the one of this machine."""
    urls = [url for url in (options.server or os.environ.get("LLMGW_SERVER", "")).split(",") if url]
    local = _local_endpoint(urls)
    if not urls:
        if local is None:
            raise ConfigError("no server is named, and none runs on this machine",
                              hint="give --server URL and --token-file FILE, or start one: llmgw.pyz up")
        if not local.alive:
            raise Unreachable(f"{local.url}: the server of this machine is not running",
                              hint="start it: llmgw.pyz up, or llmgw.pyz server --config server.yaml")
        urls = [local.url]
    client = ControlClient(urls, _token(options.token_file, local), ca_pem=_ca(options.ca_file, urls, local))
    _open.append(client)
    return client


def _ca(given: str, urls: List[str], local: Optional[Endpoint]) -> str:
    """Return what to trust, as PEM; empty: what this machine trusts. A pin is compared before anything is sent."""
    named = given or os.environ.get("LLMGW_CA", "") or (local.ca_file if local else "")
    if not named or not any(url.startswith("https://") for url in urls):
        return ""
    if named.startswith("sha256:"):
        return joining.pinned_ca(next(url for url in urls if url.startswith("https://")), read_pin(named))
    data = files.read_bytes(named, 1 << 20)
    if data is None:
        raise ConfigError(f"{named}: there is no such file", hint="it holds the server's CA, as PEM")
    return data.decode("ascii", "replace")


def close_all() -> None:
    """Close what ``connect`` opened, at the end of the command."""
    while _open:
        _open.pop().close()


def _token(given: str, local: Optional[Endpoint]) -> Secret:
    named = given or os.environ.get("LLMGW_TOKEN_FILE", "")
    if not named and os.environ.get("LLMGW_TOKEN", ""):
        return Secret(os.environ["LLMGW_TOKEN"].strip())
    path = named or (local.token_file if local else "")
    if not path:
        raise ConfigError("no token is named",
                          hint="give --token-file FILE, or set LLMGW_TOKEN_FILE or LLMGW_TOKEN")
    return read_token(path)


def read_token(path: str) -> Secret:
    """Return the one line of a token file; refuse what is no file or empty."""
    data = files.read_bytes(path, 1 << 16)
    text = (data or b"").decode("utf-8", "replace").strip()
    if not text or len(text.split()) != 1:
        raise ConfigError(f"{path}: {'there is no such file' if data is None else 'holds no token'}",
                          hint="a token file holds one line, llmgw_...")
    return Secret(text)


def _local_endpoint(urls: List[str]) -> Optional[Endpoint]:
    """Return the endpoint of a server here: a running one first; only one of ``urls`` when given."""
    folders = [data_dir.role_dir("server"), os.path.join(data_dir.role_dir("up"), "server")]
    found = [point for point in map(read_endpoint, folders) if point is not None]
    if urls:
        found = [point for point in found if point.url in [url.rstrip("/") for url in urls]]
    return max(found, key=lambda point: point.alive, default=None)


def read_endpoint(server_dir: str) -> Optional[Endpoint]:
    """Return what the server of that data folder wrote; None when there is nothing readable."""
    data = files.read_bytes(data_dir.endpoint_file(server_dir), 1 << 16)
    try:
        known = json.loads(data or b"")
        return Endpoint(str(known["url"]), str(known["admin_token_file"]), _alive(int(known["pid"])),
                        str(known.get("ca_file", "")))
    except (ValueError, KeyError, TypeError):
        return None


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True           # another user's
    return True
