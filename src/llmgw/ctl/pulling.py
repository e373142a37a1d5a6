"""Bring all that an engine is made of into the mirror, from a machine with internet: wheels, uv and Python.

Nodes install from there, with or without an index of their own; the hashes of the list hold.
"""
from __future__ import annotations

import json
import os
import threading
from dataclasses import dataclass
from typing import Any, Dict, Mapping, Sequence, Tuple
from urllib.parse import urljoin, urlsplit

from llmgw.api import paths, wire
from llmgw.api.client import ControlClient
from llmgw.ctl import importing, output
from llmgw.ctl.importing import Source
from llmgw.domain.engine import PYTHON, PackageList
from llmgw.domain.errors import ApiError, LlmgwError, NotFound, ParseError, UsageError
from llmgw.domain.view import EngineView
from llmgw.engines import recipes
from llmgw.parse import github_release, lock, wheel
from llmgw.parse.lock import Pins
from llmgw.parse.wheel import Listed
from llmgw.system import data_dir, download, files
from llmgw.system.github import Github
from llmgw.system.internet import Internet

JSON = "application/vnd.pypi.simple.v1+json"
INDEX_BYTES = 32 << 20
LIST_BYTES = 8 << 20
TIMEOUT_SECONDS = 120.0


def index_of(given: str, environ: Mapping[str, str]) -> str:
    """Return the package index to ask; refuse to guess one."""
    index = given or environ.get("UV_DEFAULT_INDEX", "") or environ.get("PIP_INDEX_URL", "")
    if not index:
        raise UsageError("which package index?",
                         hint="name it with --index https://HOST/simple, or in UV_DEFAULT_INDEX")
    return index.rstrip("/")


@dataclass(frozen=True)
class Brought:
    """What a pull did. ``lacking``: a sentence for each tool that it could not bring."""

    packages: int
    new_bytes: int
    lacking: Tuple[str, ...] = ()


class Pull:
    """``index`` is asked for wheels, GitHub for uv and Python; both only for what the mirror lacks."""

    def __init__(self, client: ControlClient, engine: EngineView, machine: str, index: str) -> None:
        if engine.name not in recipes.RECIPES:
            raise UsageError(f"{engine.name} is not made of packages",
                             hint="llmgw.pyz ctl mirror import-engine ARCHIVE brings an archive")
        self._client, self._engine, self._index = client, engine, index
        self._machine, recipe = recipes.machine(machine), recipes.RECIPES[engine.name]
        self._list_name = recipes.platform(recipe, machine)
        major, _, minor = recipe.glibc.partition(".")
        self._glibc = (int(major), int(minor))
        self._held: Dict[Tuple[str, str, str], str] = {}

    def run(self, listed: str) -> Brought:
        """Bring all that the mirror lacks; ``listed``: a file with the list of packages, empty for the fleet's."""
        said = self._client.json("GET", paths.fill(paths.ENGINE_LOCKS, engine=self._engine.name,
                                                   version=self._engine.version))
        as_of, tools = str(said["as_of"]), {str(name): str(version) for name, version in said["tools"].items()}
        self._list_name = recipes.list_name(self._list_name, said.get("with_ray", False) is True)
        text, pins = self._list(listed)
        mirror = wire.MIRROR_VIEW.decode(self._client.json("GET", paths.MIRROR), "mirror")
        self._held = {(held.engine, held.version, held.asset.name): held.asset.sha256 for held in mirror.engines}
        new_bytes, lacking = self._wheels(pins), []
        self._client.call("PUT", self._lock_path(), send=wire.PACKAGE_LIST, value=PackageList("admin", as_of, text),
                          receive=wire.LOCK_VIEW, timeout=TIMEOUT_SECONDS)
        for name, version in sorted(tools.items()):
            try:
                new_bytes += self._tool(name, version)
            except LlmgwError as error:
                lacking.append(f"{name} {version} is not in the mirror: {error.message}")
        return Brought(len(pins), new_bytes, tuple(lacking))

    def _lock_path(self) -> str:
        return paths.fill(paths.ENGINE_LOCK, engine=self._engine.name, version=self._engine.version,
                          platform=self._list_name)

    def _list(self, listed: str) -> Tuple[str, Pins]:
        what = listed or f"the list of the packages of {self._engine.name} {self._engine.version}"
        if listed:
            data = files.read_bytes(listed, LIST_BYTES)
            if data is None:
                raise UsageError(f"there is no file {listed}")
            text = data.decode("utf-8", "replace")
        else:
            try:
                text = self._client.request("GET", self._lock_path(), timeout=TIMEOUT_SECONDS).body.decode(
                    "utf-8", "replace")
            except ApiError as error:
                if error.status == 404:
                    error.hint = ("the first node that reaches a package index makes one; where there is no such node, "
                                  "bring a list with --list FILE")
                raise
        return text, lock.read(text, what)

    def _wheels(self, pins: Pins) -> int:
        internet, total = Internet(self._index), 0
        for number, pin in enumerate(pins, 1):
            if self._has(pin.hashes):
                continue
            for file in wheel.choose(pin, _files(internet, self._index, pin.name), self._machine, self._glibc):
                if self._held.get((self._engine.name, self._engine.version, file.name)) != file.sha256:
                    output.say(f"{number} of {len(pins)}: {file.name}")
                    total += self._bring(self._engine.name, self._engine.version, file)
        return total

    def _has(self, hashes: Sequence[str]) -> bool:
        """Say whether the mirror holds a wheel of a package for this platform: then the index need not be asked."""
        return any(digest in hashes and wheel.fits(name, self._machine, self._glibc)
                   for (engine, version, name), digest in self._held.items()
                   if (engine, version) == (self._engine.name, self._engine.version))

    def _tool(self, name: str, version: str) -> int:
        """Bring the archive of uv or of Python for this platform; return how much came."""
        wanted = (recipes.python_archives(version, self._machine) if name == PYTHON
                  else (recipes.uv_archive(self._machine),))
        if any((name, version, file) in self._held for file in wanted):
            return 0
        repository, tag = recipes.release(name, version)
        release = github_release.parse(Github().release(repository, tag), tag)
        found = {asset.name: asset for asset in release.assets}
        for file in wanted:
            if file in found:
                output.say(f"{name} {version}: {file}")
                return self._bring(name, version, Listed(file, release.urls[file], found[file].sha256,
                                                         found[file].size_bytes))
        raise NotFound(f"its release has no {wanted[0]}")

    def _bring(self, engine: str, version: str, file: Listed) -> int:
        """Fetch a file into a scratch file, send it to the mirror, and return its size."""
        folder = files.make_dir(os.path.join(data_dir.role_dir("ctl"), "pull"))
        target = os.path.join(folder, file.name)
        try:
            source = Internet(f"{urlsplit(file.url).scheme}://{urlsplit(file.url).netloc}")
            size = file.size_bytes or _size(source, file.url)
            download.fetch(lambda offset: source.open(file.url, offset), target, sha256=file.sha256, size=size,
                           partial=target + ".part", progress=lambda done: None, stopping=threading.Event().is_set,
                           reserve_bytes=0)
            importing.upload(self._client, Source(target, file.name), file.sha256, size)
            self._client.json("PUT", paths.fill(paths.MIRROR_ENGINE, engine=engine, version=version, asset=file.name),
                              {"sha256": file.sha256, "size_bytes": size}, timeout=TIMEOUT_SECONDS)
            return size
        finally:
            files.remove(target)


def _files(internet: Internet, index: str, name: str) -> Tuple[Listed, ...]:
    answer = internet.get(f"{index}/{name}/", headers={"Accept": JSON}, max_body=INDEX_BYTES)
    try:
        data: Any = json.loads(answer.body)
    except (ValueError, RecursionError):
        raise ParseError(f"the package index answers no JSON for {name}", hint="take an index that does") from None
    return tuple(Listed(file.name, urljoin(f"{index}/{name}/", file.url), file.sha256, file.size_bytes)
                 for file in wheel.listed(data, name))


def _size(source: Internet, url: str) -> int:
    """Return how large a file is of which the index does not say it."""
    with source.open(url) as opened:
        length = opened.headers.get("content-length", "")
    if not length.isdigit():
        raise ParseError(f"the package index does not say how large {url.rpartition('/')[2]:.100} is")
    return int(length)
