"""What environments are made with: uv and a build of Python, each from its release and checked against its digest."""
from __future__ import annotations

import os
from typing import Callable, Optional, Sequence
from urllib.parse import quote

from llmgw.agent.layout import Layout
from llmgw.agent.outside import Opener, Outside
from llmgw.agent.prove import Report
from llmgw.agent.uv import Uv
from llmgw.api import paths
from llmgw.api.client import ControlClient
from llmgw.domain.command import Command
from llmgw.domain.engine import PYTHON, UV, Asset, EnginePhase, EngineWanted, Tool
from llmgw.domain.errors import CommandFailed, EngineFailed, LlmgwError, TryAgain
from llmgw.domain.names import file_name
from llmgw.engines import recipes
from llmgw.system import download, failpoint, files, lent
from llmgw.system.process import Processes
from llmgw.system.unpack import budget, unpack

RESERVE_BYTES = 256 << 20
RUN_SECONDS = 60.0
_ARCHIVE = "python.tar.gz"
_ENV = {"PATH": "/usr/bin:/bin", "LC_ALL": "C"}


class PythonTools:
    """Brings the tools below ``tools/``; what lies there under its name was whole once and ran."""

    def __init__(self, client: ControlClient, layout: Layout, processes: Processes,
                 stopping: Callable[[], bool], outside: Optional[Outside] = None) -> None:
        self._outside = outside or Outside()
        self._client, self._layout, self._processes, self._stopping = client, layout, processes, stopping

    def uv(self, item: EngineWanted, arch: str, report: Report) -> str:
        """Return the path of uv, brought here if need be."""
        tool = _tool(item, UV)
        folder = self._folder(tool)
        program = os.path.join(folder, "uv")
        if self._says(program) == f"uv {tool.version}":
            return program
        asset = self._asset(item, tool, (recipes.uv_archive(arch),), report)
        self._fetch(tool, asset, report)
        scratch = os.path.join(self._layout.tools, f".{file_name(os.path.basename(folder))}.scratch")
        files.remove(scratch)
        files.remove(folder)
        files.make_dir(self._layout.tools)
        free = max(0, files.free_bytes(self._layout.tools) - RESERVE_BYTES)
        unpack(self._layout.blob(asset.sha256), scratch, max_bytes=budget(asset.size_bytes, free))
        inner = os.path.join(scratch, asset.name[:-len(".tar.gz")])
        said = self._says(os.path.join(inner, "uv"))
        if said != f"uv {tool.version}":
            raise EngineFailed(f"{asset.name} holds no uv {tool.version} that runs here: it says {said or 'nothing'}")
        failpoint.reach("tools-before-rename")
        with files.storing("rename", inner):
            os.replace(inner, folder)
            files.fsync_dir(self._layout.tools)
        files.remove(scratch)
        files.remove(self._layout.blob(asset.sha256))
        return program

    def python(self, item: EngineWanted, arch: str, uv: Uv, report: Report) -> str:
        """Return the path of the Python that environments run on, brought here if need be."""
        tool = _tool(item, PYTHON)
        folder, patch = self._folder(tool), tool.version.partition("+")[0]
        name = f"cpython-{patch}-linux-{recipes.machine(arch)}-gnu"
        program = os.path.join(folder, name, "bin", f"python{patch.rpartition('.')[0]}")
        if not lent.is_lent(folder) and self._says(program) == f"Python {patch}":
            return program
        asset = self._asset(item, tool, recipes.python_archives(tool.version, arch), report)
        self._fetch(tool, asset, report)
        files.remove(folder)                      # what a kill left of it
        listing, archive = (os.path.join(self._layout.tools, name) for name in ("python.json", _ARCHIVE))
        files.make_dir(self._layout.tools)
        files.remove(archive)
        with files.storing("link", archive):      # uv wants a name that tells what it is
            os.link(self._layout.blob(asset.sha256), archive)
        files.write_json(listing, {name: _entry(patch, recipes.machine(arch), tool.version, archive, asset.sha256)},
                         mode=0o644)
        report(EnginePhase.UNPACKING, f"unpacking {asset.name}")
        uv.install_python(listing, patch, folder, lambda line: None)
        failpoint.reach("tools-python-unpacked")
        uv.take_back(folder)
        failpoint.reach("tools-python-ours")
        if self._says(program) != f"Python {patch}":
            raise EngineFailed(f"{asset.name}: its Python does not run here: {self._why_not(program)}",
                               hint="is this system's C library glibc, of at least 2.17?")
        files.remove(archive)
        files.remove(self._layout.blob(asset.sha256))
        return program

    def forget_others(self, kept: Sequence[str]) -> None:
        """Remove tools that nothing needs any more: ``kept`` are programs in use, or folders of them."""
        for name in sorted(os.listdir(self._layout.tools)) if os.path.isdir(self._layout.tools) else ():
            folder = os.path.join(self._layout.tools, name)
            is_tool = name.startswith((f"{UV}-", f"{PYTHON}-")) and folder != self._layout.uv_cache
            if is_tool and not any(path.startswith(folder + os.sep) for path in kept):
                files.remove(folder)

    def tidy(self) -> None:
        """Remove what a kill left of unpacking."""
        for name in os.listdir(self._layout.tools) if os.path.isdir(self._layout.tools) else ():
            if name.endswith(".scratch") or name == _ARCHIVE:
                files.remove(os.path.join(self._layout.tools, name))

    def _folder(self, tool: Tool) -> str:
        return os.path.join(self._layout.tools, f"{tool.name}-{file_name(tool.version)}")

    def _says(self, program: str) -> str:
        """Return the first words of what the program says of itself, empty when it does not run."""
        try:
            outcome = self._processes.run(Command((program, "--version"), env=_ENV, cwd="/"), timeout=RUN_SECONDS)
        except CommandFailed:
            return ""
        return " ".join(outcome.out.split()[:2]) if outcome.code == 0 else ""

    def _why_not(self, program: str) -> str:
        try:
            outcome = self._processes.run(Command((program, "--version"), env=_ENV, cwd="/"), timeout=RUN_SECONDS)
        except CommandFailed as error:
            return error.message
        return " ".join((outcome.err or outcome.out).split())[:300] or f"it ends with code {outcome.code}"

    def _asset(self, item: EngineWanted, tool: Tool, names: Sequence[str], report: Report) -> Asset:
        """Return the first of ``names`` that its release has; GitHub is asked only when the control plane cannot."""
        by_hand = (f"a machine with internet can bring it: llmgw.pyz ctl mirror pull-engine {item.name}, or "
                   f"import-engine {names[0]} --version {tool.version} --sha256 HEX")
        if not tool.assets and tool.server_cannot:
            report(EnginePhase.RESOLVING, f"the control plane cannot ask for the files of {tool.name} {tool.version}: "
                   "this node asks GitHub itself")
            try:
                tool = self._outside.listed_tool(tool)
            except LlmgwError as error:
                error.hint = by_hand
                raise
        if not tool.assets:
            raise TryAgain(f"waits for {tool.name} {tool.version}: "
                           f"{tool.problem or 'the control plane has no list of its archives yet'}", hint=by_hand)
        found = {asset.name: asset for asset in tool.assets}
        for name in names:
            if name in found:
                return found[name]
        raise EngineFailed(f"{tool.name} {tool.version}: its release has no {names[0]}", hint=by_hand)

    def _fetch(self, tool: Tool, asset: Asset, report: Report) -> None:
        """Bring a file of the tool's release into ``blobs/``, whole and verified."""
        target = self._layout.blob(asset.sha256)
        if not download.damage(target, asset.size_bytes, (), asset.sha256):
            return
        path = paths.fill(paths.ENGINE_ASSET, engine=tool.name, version=tool.version, asset=asset.name)

        def progress(count: int) -> None:
            report(EnginePhase.DOWNLOADING, f"downloading {asset.name}: {count / 1e6:.1f} of "
                   f"{asset.size_bytes / 1e6:.1f} MB", done=count, total=asset.size_bytes)

        def fetch(opened: Opener) -> None:
            if self._stopping():
                raise download.Stopped(f"{asset.name} was left where it was")
            download.fetch(opened, target, sha256=asset.sha256, size=asset.size_bytes,
                           partial=self._layout.partial(asset.sha256), reserve_bytes=RESERVE_BYTES,
                           progress=progress, stopping=self._stopping)

        progress(0)
        self._outside.bring(fetch, lambda offset: self._client.stream(
            path, headers={"Range": f"bytes={offset}-"}, timeout=60.0), tool.name, tool.version, asset,
            lambda text: report(EnginePhase.DOWNLOADING, text))


def _tool(item: EngineWanted, name: str) -> Tool:
    for tool in item.tools:
        if tool.name == name:
            return tool
    raise TryAgain(f"{item.name} {item.version}: the control plane does not say yet which {name} to take")


def _entry(patch: str, machine: str, version: str, archive: str, sha256: str) -> object:
    """Return a build of Python as uv lists it."""
    major, minor, micro = (int(part) for part in patch.split("."))
    return {"name": "cpython", "arch": {"family": machine, "variant": None}, "os": "linux", "libc": "gnu",
            "major": major, "minor": minor, "patch": micro, "prerelease": "", "url": f"file://{quote(archive)}",
            "sha256": sha256, "variant": None, "build": version.partition("+")[2]}
