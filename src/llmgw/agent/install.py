"""Install one version of llama.cpp: download, verify, unpack in a scratch folder, prove that it runs, rename.

While an archive comes it is hashed and unpacked; nothing of it is looked at, let
alone run, before its digest was right. A kill at any line leaves a scratch folder or
a partial download, and the next start removes the one and goes on with the other.
The final name exists only after the program ran.
"""
from __future__ import annotations

import contextlib
import os
import time
from dataclasses import replace
from typing import Callable, List, Optional, Tuple

from llmgw.agent.layout import Layout
from llmgw.agent.outside import Outside
from llmgw.agent.prove import Program, Prover, Report
from llmgw.agent.unpacking import RESERVE_BYTES, Unpacking
from llmgw.api import paths
from llmgw.api.client import ControlClient
from llmgw.domain.engine import Asset, EnginePhase, EngineWanted
from llmgw.domain.errors import EngineFailed, LlmgwError, StorageError
from llmgw.parse import github_release
from llmgw.parse.github_release import Picked
from llmgw.probe import engine
from llmgw.system import download, failpoint, files, installed
from llmgw.system.download import Source
from llmgw.system.installed import Installed

PROGRAM = "llama-server"


class Installer:
    """Brings versions of llama.cpp into ``engines/``."""

    def __init__(self, client: ControlClient, layout: Layout, prover: Prover,
                 stopping: Callable[[], bool], outside: Optional[Outside] = None) -> None:
        self._outside = outside or Outside()
        self._client, self._layout, self._prover, self._stopping = client, layout, prover, stopping

    def listed(self, item: EngineWanted, report: Report) -> EngineWanted:
        """Return the engine with its archives: GitHub is asked from here only when the control plane cannot."""
        if item.assets or not item.server_cannot:
            return item
        report(EnginePhase.RESOLVING, f"the control plane cannot ask for the files of {item.name} {item.version}: "
               "this node asks GitHub itself")
        return self._outside.listed(item)

    def install(self, item: EngineWanted, picked: Picked, report: Report) -> Installed:
        """Install what was picked (the build, and its runtime beside it) and return it."""
        name, version = item.name, item.version
        scratch = self._layout.engine_scratch(name, version)
        files.remove(scratch)
        assets = [asset for asset in (picked.binary, picked.runtime) if asset is not None]
        total = sum(asset.size_bytes for asset in assets)
        self._prover.must_fit(name, version, item.cpu, total)
        unpackings: List[Unpacking] = []
        try:
            done = 0
            for number, asset in enumerate(assets):
                unpackings.append(Unpacking(asset, os.path.join(scratch, str(number))))
                self._download(name, version, asset, done, total, report, unpackings[-1])
                done += asset.size_bytes
            made = self._build(item, picked, unpackings, scratch, report)
        except LlmgwError:
            for unpacking in unpackings:
                unpacking.give_up()
            with contextlib.suppress(StorageError):
                files.remove(scratch)         # what failed takes no room until it is tried again
            raise
        for asset in assets:
            files.remove(self._layout.blob(asset.sha256))
        return made

    def _build(self, item: EngineWanted, picked: Picked, unpackings: List[Unpacking], scratch: str,
               report: Report) -> Installed:
        """Wait until what was downloaded is unpacked, prove it, give it its name."""
        for unpacking in unpackings:
            report(EnginePhase.UNPACKING, f"unpacking {unpacking.name}")
            unpacking.finish()
            failpoint.reach("install-unpacked")
        built = _gathered(scratch, len(unpackings))
        report(EnginePhase.CHECKING, f"checking that {item.name} {item.version} runs here")
        found = Installed(item.name, item.version, _find(built, PROGRAM), "", archive=picked.binary.name,
                          cuda=picked.cuda)
        made = self.prove(built, found, report, github_release.older_cuda(item.assets, picked))
        installed.write(built, made)
        failpoint.reach("install-before-rename")
        self._rename(built, self._layout.engine(item.name, item.version))
        failpoint.reach("install-after-rename")
        files.remove(scratch)
        return made

    def prove(self, folder: str, made: Installed, report: Report, other_cuda: Tuple[str, ...] = ()) -> Installed:
        """Run what lies in ``folder`` and return it with what it says; an error in words when it does not run."""
        path = os.path.join(folder, made.program)
        seen = self._prover.prove(Program(made.name, made.version, path, lambda: engine.elves(folder), made.cuda,
                                          other_cuda), report)
        return replace(made, says=seen.says.text, devices=seen.devices, installed_at=made.installed_at or time.time())

    def prove_operators(self, name: str, path: str, report: Report) -> Installed:
        """The same for a program of the operator's own, of whatever version."""
        seen = self._prover.prove(Program(name, "operator", path, lambda: engine.elves_beside(path)), report)
        return Installed(name, "operator", path, seen.says.text, seen.devices, time.time())

    def _download(self, name: str, version: str, asset: Asset, before: int, total: int,
                  report: Report, unpacking: Unpacking) -> None:
        target = self._layout.blob(asset.sha256)
        report(EnginePhase.VERIFYING, f"looking for {asset.name} on this node")
        if not download.damage(target, asset.size_bytes, (), asset.sha256):
            return unpacking.begin(target, whole=True)
        partial = self._layout.partial(asset.sha256)
        unpacking.begin(partial)
        path = paths.fill(paths.ENGINE_ASSET, engine=name, version=version, asset=asset.name)

        def progress(count: int) -> None:
            unpacking.reaches(count)
            share = 100 * (before + count) // total if total else 100
            report(EnginePhase.DOWNLOADING,
                   f"downloading {asset.name}: {(before + count) / 1e6:.1f} of {total / 1e6:.1f} MB, {share} %",
                   done=before + count, total=total)

        def fetch(open_at: Callable[[int], Source]) -> None:
            download.fetch(open_at, target, sha256=asset.sha256, size=asset.size_bytes,
                           partial=partial, reserve_bytes=RESERVE_BYTES, progress=progress, stopping=self._stopping)
            unpacking.is_whole()

        progress(0)
        self._outside.bring(fetch, lambda offset: self._client.stream(
            path, headers={"Range": f"bytes={offset}-"}, timeout=60.0), name, version, asset,
            lambda sentence: report(EnginePhase.DOWNLOADING, sentence))

    def _rename(self, built: str, final: str) -> None:
        files.remove(final)               # without its marker it was never whole
        with files.storing("rename", built):
            os.replace(built, final)
            files.fsync_dir(os.path.dirname(final))


def _gathered(scratch: str, count: int) -> str:
    """Return the folder of the build; the files of runtime archives are moved beside its program ($ORIGIN)."""
    built = _single_folder(os.path.join(scratch, "0"))
    beside = os.path.dirname(os.path.join(built, _find(built, PROGRAM)))
    for number in range(1, count):
        runtime = _single_folder(os.path.join(scratch, str(number)))
        for name in sorted(os.listdir(runtime)):
            with files.storing("move", name):
                os.replace(os.path.join(runtime, name), os.path.join(beside, name))
    return built


def _single_folder(folder: str) -> str:
    names = os.listdir(folder)
    inner = os.path.join(folder, names[0]) if len(names) == 1 else ""
    return inner if inner and os.path.isdir(inner) and not os.path.islink(inner) else folder


def _find(folder: str, name: str) -> str:
    """Return the relative path of the program; releases are flat, builds of one's own may have bin/."""
    for place in ("", "bin", "build/bin"):
        path = os.path.join(folder, place, name)
        if os.path.isfile(path):
            return os.path.relpath(path, folder)
    raise EngineFailed(f"the archive holds no {name}", hint="is it a llama.cpp release archive for Linux?")
