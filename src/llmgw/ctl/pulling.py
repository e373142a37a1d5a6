"""Bring the wheels of an engine's list of packages into the mirror, from a machine that reaches a package index.

Nodes install from there, with or without an index of their own; the hashes of the list hold.
"""
from __future__ import annotations

import json
import os
import threading
from typing import Any, List, Mapping, Tuple
from urllib.parse import urljoin, urlsplit

from llmgw.api import paths, wire
from llmgw.api.client import ControlClient
from llmgw.ctl import importing, output
from llmgw.ctl.importing import Source
from llmgw.domain.engine import PackageList
from llmgw.domain.errors import NotFound, ParseError, UsageError
from llmgw.domain.view import EngineView, LockView
from llmgw.parse import lock, wheel
from llmgw.parse.wheel import Listed
from llmgw.system import data_dir, download, files
from llmgw.system.internet import Internet

JSON = "application/vnd.pypi.simple.v1+json"
INDEX_BYTES = 32 << 20
TIMEOUT_SECONDS = 120.0


def index_of(given: str, environ: Mapping[str, str]) -> str:
    """Return the package index to ask; refuse to guess one."""
    index = given or environ.get("UV_DEFAULT_INDEX", "") or environ.get("PIP_INDEX_URL", "")
    if not index:
        raise UsageError("which package index?",
                         hint="name it with --index https://HOST/simple, or in UV_DEFAULT_INDEX")
    return index.rstrip("/")


def pull(client: ControlClient, engine: EngineView, platform: str, index: str) -> Tuple[int, int]:
    """Bring all that the mirror lacks; return (packages, bytes). Then nodes may install from there alone."""
    view = _list(client, engine, platform)
    path = paths.fill(paths.ENGINE_LOCK, engine=engine.name, version=engine.version, platform=view.platform)
    text = client.request("GET", path, timeout=TIMEOUT_SECONDS).body.decode("utf-8", "replace")
    pins = lock.read(text, f"the list of the packages of {engine.name} {engine.version}")
    machine, glibc = _machine(view.platform)
    internet, held = Internet(index), {asset.name: asset.sha256 for asset in engine.assets}
    total = 0
    for number, pin in enumerate(pins, 1):
        for file in wheel.choose(pin, _files(internet, index, pin.name), machine, glibc):
            if held.get(file.name) != file.sha256:
                output.say(f"{number} of {len(pins)}: {file.name}")
                total += _bring(client, engine, internet, file)
    client.call("PUT", path, send=wire.PACKAGE_LIST, value=PackageList("admin", view.as_of, text),
                receive=wire.LOCK_VIEW, timeout=TIMEOUT_SECONDS)
    return len(pins), total


def _list(client: ControlClient, engine: EngineView, platform: str) -> LockView:
    path = paths.fill(paths.ENGINE_LOCKS, engine=engine.name, version=engine.version)
    found: List[LockView] = [view for view in client.items(path, wire.LOCK_VIEW)
                             if view.sha256 and view.platform.startswith(platform)]
    if not found:
        raise NotFound(f"there is no list of the packages of {engine.name} {engine.version} for {platform} yet",
                       hint="the first node that reaches a package index makes it")
    return found[0]


def _machine(platform: str) -> Tuple[str, Tuple[int, int]]:
    machine, _, libc = platform.partition("-manylinux_")
    major, _, minor = libc.partition("_")
    if not (major.isdigit() and minor.isdigit()):
        raise ParseError(f"not a platform: {platform!r:.60}")
    return machine, (int(major), int(minor))


def _files(internet: Internet, index: str, name: str) -> Tuple[Listed, ...]:
    answer = internet.get(f"{index}/{name}/", headers={"Accept": JSON}, max_body=INDEX_BYTES)
    try:
        data: Any = json.loads(answer.body)
    except (ValueError, RecursionError):
        raise ParseError(f"the package index answers no JSON for {name}", hint="take an index that does") from None
    return tuple(Listed(file.name, urljoin(f"{index}/{name}/", file.url), file.sha256, file.size_bytes)
                 for file in wheel.listed(data, name))


def _bring(client: ControlClient, engine: EngineView, internet: Internet, file: Listed) -> int:
    """Fetch a wheel into a scratch file, send it to the mirror, and return its size."""
    folder = files.make_dir(os.path.join(data_dir.role_dir("ctl"), "pull"))
    target = os.path.join(folder, file.name)
    try:
        source = Internet(f"{urlsplit(file.url).scheme}://{urlsplit(file.url).netloc}")
        size = file.size_bytes or _size(source, file.url)
        download.fetch(lambda offset: source.open(file.url, offset), target, sha256=file.sha256, size=size,
                       partial=target + ".part", progress=lambda done: None, stopping=threading.Event().is_set,
                       reserve_bytes=0)
        importing.upload(client, Source(target, file.name), file.sha256, size)
        client.json("PUT", paths.fill(paths.MIRROR_ENGINE, engine=engine.name, version=engine.version,
                                      asset=file.name), {"sha256": file.sha256, "size_bytes": size},
                    timeout=TIMEOUT_SECONDS)
        return size
    finally:
        files.remove(target)


def _size(source: Internet, url: str) -> int:
    """Return how large a file is of which the index does not say it."""
    with source.open(url) as opened:
        length = opened.headers.get("content-length", "")
    if not length.isdigit():
        raise ParseError(f"the package index does not say how large {url.rpartition('/')[2]:.100} is")
    return int(length)
