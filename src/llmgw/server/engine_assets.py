"""The archives of the wanted engines: imported ones, and those of the engine's own releases."""
from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from typing import Any, Dict, List, Optional, Tuple

from llmgw.domain.engine import PYTHON, PYTHON_ENGINES, TOOL_VERSIONS, UV, Asset, EngineWanted, Tool
from llmgw.domain.errors import LlmgwError, NotFound, TryAgain, Unreachable
from llmgw.engines import recipes
from llmgw.server.engine_locks import EngineLocks
from llmgw.server.mirror import Mirror

log = logging.getLogger(__name__)

KEPT_SECONDS = 30.0           # that a failure is told to whoever asks, before it is tried again
WAIT_SECONDS = 20.0           # that a node's request waits for a fetch before it is told to ask again


class _Fetch:
    """One archive on its way from the internet."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.path = ""
        self.error: Optional[LlmgwError] = None
        self.ended_at = 0.0

    def is_over(self, now: float) -> bool:
        """Return whether it came, or its failure was told for long enough."""
        return self.done.is_set() and (self.error is None or now - self.ended_at > KEPT_SECONDS)


class EngineAssets:
    """``releases`` asks the internet; None in a build, or on a site, without it.

    ``has_gpus``: some node has one. Until then nobody is asked about engines that need one.
    """

    def __init__(self, mirror: Mirror, releases: Optional[Any], locks: EngineLocks) -> None:
        self._mirror, self._releases, self.locks = mirror, releases, locks
        self.has_gpus = False
        self._lock = threading.Lock()
        self._fetches: Dict[Tuple[str, str, str], _Fetch] = {}

    def wanted(self, engine: EngineWanted) -> EngineWanted:
        """Return the engine with the list of its archives, as far as it is known now. Never waits."""
        if engine.name in PYTHON_ENGINES:
            return self._python_engine(engine) if self.has_gpus else engine
        assets, problem = self._assets(engine.name, engine.version)
        return replace(engine, assets=assets, assets_problem=problem,
                       server_cannot=not assets and self._cannot(engine.name, engine.version))

    def _cannot(self, name: str, version: str) -> bool:
        return self._releases is not None and self._releases.cannot(name, version)

    def tools(self, engine: EngineWanted) -> Dict[str, str]:
        """Return the versions of what makes environments: the configuration's, else what llmgw was checked with."""
        return {**TOOL_VERSIONS, **{tool.name: tool.version for tool in engine.tools}}

    def _python_engine(self, engine: EngineWanted) -> EngineWanted:
        """Return the engine with the date and lists of its packages, and with what makes its environment."""
        found = []
        for name, version in self.tools(engine).items():
            assets, problem = self._assets(name, version)
            fitting = tuple(asset for asset in assets if asset.name in _tool_files(name, version))
            if assets and not fitting:
                problem = f"the release of {name} {version} has no archive for Linux"
            found.append(Tool(name, version, fitting, problem, not assets and self._cannot(name, version)))
        wheels, _ = self._assets(engine.name, engine.version)
        return replace(self.locks.complete(engine), tools=tuple(found), assets=wheels)

    def _assets(self, name: str, version: str) -> Tuple[Tuple[Asset, ...], str]:
        """Return the files of a release, imported ones instead of its own, or why there are none."""
        assets: Dict[str, Asset] = {}
        problem = "this build cannot ask for releases"
        if self._releases is not None:
            listed, problem = self._releases.assets(name, version)
            assets.update((asset.name, asset) for asset in listed)
        imported = [archive.asset for archive in self._mirror.archives()
                    if (archive.engine, archive.version) == (name, version)]
        assets.update((asset.name, asset) for asset in imported)
        return tuple(assets[name] for name in sorted(assets)), "" if assets else problem

    def open(self, engine: str, version: str, name: str) -> Tuple[Any, str]:
        """Return (open file, sha256) of an archive; it is fetched when the first node asks.

        A fetch that takes long is a TryAgain with how far it is; it goes on meanwhile.
        """
        archive = self._mirror.archive(engine, version, name)
        if archive is not None:
            return self._mirror.open(archive.asset.sha256), archive.asset.sha256
        listed: List[Asset] = []
        if self._releases is not None:
            listed = [asset for asset in self._releases.assets(engine, version)[0] if asset.name == name]
        if not listed and self._releases is not None and self._releases.cannot(engine, version):
            raise Unreachable(self._releases.assets(engine, version)[1])
        if not listed:
            raise NotFound(f"no such archive: {engine} {version} {name:.100}",
                           hint="llmgw.pyz ctl mirror import-engine ARCHIVE --sha256 HEX brings one")
        fetch = self._start((engine, version, name), listed[0].sha256)
        if fetch is None:
            return self._mirror.open(listed[0].sha256), listed[0].sha256
        if not fetch.done.wait(WAIT_SECONDS):
            assert self._releases is not None
            raise TryAgain(self._releases.progress(listed[0].sha256) or f"fetching {name}")
        if fetch.error is not None:
            raise fetch.error
        return open(fetch.path, "rb"), listed[0].sha256

    def activity(self) -> List[str]:
        """Return a sentence for every fetch under way."""
        return [] if self._releases is None else list(self._releases.activity())

    def _start(self, key: Tuple[str, str, str], digest: str) -> Optional[_Fetch]:
        """Return the fetch of an archive, begun if need be; None when it is here."""
        with self._lock:                          # it may have come since somebody looked: looked for in here
            fetch = self._fetches.get(key)
            over = fetch is None or fetch.is_over(time.monotonic())
            if self._mirror.has(digest):          # after "over": a fetch may end between the two
                self._fetches.pop(key, None)
                return None
            if fetch is None or over:
                fetch = self._fetches[key] = _Fetch()
                threading.Thread(target=self._fetch, args=(key, fetch), name="fetch-archive", daemon=True).start()
            return fetch

    def _fetch(self, key: Tuple[str, str, str], fetch: _Fetch) -> None:
        assert self._releases is not None
        try:
            fetch.path = self._releases.fetch(*key)
            log.info("archive is here engine=%s version=%s name=%s", *key)
        except LlmgwError as error:
            log.warning("archive cannot be fetched name=%s reason=%s: %s", key[2], error.reason, error.message)
            fetch.error = error
        except Exception:
            log.exception("fetch failed name=%s", key[2])
            fetch.error = TryAgain(f"{key[2]}: the fetch failed inside the server, its log has the details")
        finally:
            fetch.ended_at = time.monotonic()
            fetch.done.set()


def _tool_files(name: str, version: str) -> List[str]:
    """Return the names of those files of a tool's release that a node may need."""
    if name == UV:
        return [recipes.uv_archive(arch) for arch in recipes.ARCHES]
    assert name == PYTHON
    return [file for arch in recipes.ARCHES for file in recipes.python_archives(version, arch)]
