"""Install one version of llama.cpp: download, verify, unpack in a scratch folder, prove that it runs, rename.

A kill at any line leaves a scratch folder or a partial download, and the next
start removes the one and goes on with the other. The final name exists only
after the program ran.
"""
from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass
from typing import Any, Callable, List, Optional, Sequence, Tuple

from llmgw.agent.layout import Layout
from llmgw.api import paths
from llmgw.api.client import ControlClient
from llmgw.domain.command import Command
from llmgw.domain.engine import Asset, EnginePhase
from llmgw.domain.errors import DiskFull, EngineFailed, LlmgwError, RequirementMissing, StorageError
from llmgw.parse import engine_version, ldd
from llmgw.system import download, failpoint, files
from llmgw.system.process import Processes
from llmgw.system.unpack import TooMuch, budget, unpack

MARKER = ".llmgw-installed.json"
PROGRAM = "llama-server"
RUN_SECONDS = 60.0                # a first run from a cold disk, with CUDA libraries of a gigabyte
LDD_SECONDS = 20.0
RESERVE_BYTES = 256 << 20
_ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C"}

Report = Callable[..., None]      # (phase, sentence, done=, total=)


@dataclass(frozen=True)
class Installed:
    """What the marker of an installed version says."""

    name: str
    version: str
    program: str                  # relative to the version's folder
    says: str
    devices: Tuple[str, ...] = ()
    installed_at: float = 0.0


class Installer:
    """Brings versions of llama.cpp into ``engines/``."""

    def __init__(self, client: ControlClient, layout: Layout, processes: Processes,
                 stopping: Callable[[], bool]) -> None:
        self._client, self._layout, self._processes, self._stopping = client, layout, processes, stopping

    def install(self, name: str, version: str, assets: Sequence[Asset], needs_gpu: bool,
                report: Report) -> Installed:
        """Install the version from ``assets`` (the build first, its runtime after it) and return it."""
        scratch = self._layout.engine_scratch(name, version)
        files.remove(scratch)
        total = sum(asset.size_bytes for asset in assets)
        done = 0
        for asset in assets:
            self._download(name, version, asset, done, total, report)
            done += asset.size_bytes
        try:
            installed = self._build(name, version, assets, scratch, needs_gpu, report)
        except LlmgwError:
            with contextlib.suppress(StorageError):
                files.remove(scratch)         # what failed takes no room until it is tried again
            raise
        for asset in assets:
            files.remove(self._layout.blob(asset.sha256))
        return installed

    def _build(self, name: str, version: str, assets: Sequence[Asset], scratch: str, needs_gpu: bool,
               report: Report) -> Installed:
        """Unpack what was downloaded, prove it, give it its name."""
        for number, asset in enumerate(assets):
            report(EnginePhase.UNPACKING, f"unpacking {asset.name}")
            self._unpack(asset, os.path.join(scratch, str(number)))
            failpoint.reach("install-unpacked")
        built = _gathered(scratch, len(assets))
        report(EnginePhase.CHECKING, f"checking that {name} {version} runs here")
        program = _find(built, PROGRAM)
        installed = self.prove(name, version, os.path.join(built, program), program, needs_gpu)
        files.write_json(os.path.join(built, MARKER), _to_json(installed), mode=0o644)
        failpoint.reach("install-before-rename")
        self._rename(built, self._layout.engine(name, version))
        failpoint.reach("install-after-rename")
        files.remove(scratch)
        return installed

    def prove(self, name: str, version: str, path: str, program: str, needs_gpu: bool) -> Installed:
        """Run it and return what it says; RequirementMissing or EngineFailed in words otherwise."""
        lacks = self._lacking(os.path.dirname(path))
        if lacks:
            raise RequirementMissing(f"{name} {version}: " + "; ".join(lacks), hint=_hint(lacks))
        outcome = self._processes.run(Command((path, "--version"), env=_ENV, cwd="/"), timeout=RUN_SECONDS)
        if outcome.code != 0:
            told = ldd.missing(outcome.err)
            said = "; ".join(told) or _last_line(outcome.err or outcome.out) or "nothing"
            raise EngineFailed(f"{name} {version}: --version ends with code {outcome.code}: {said}")
        says = engine_version.llama_cpp(outcome.out, outcome.err)
        _check_build(name, version, says)
        devices = self._devices(path)
        if needs_gpu and not any("CUDA" in device for device in devices):
            raise EngineFailed(f"{name} {version}: the build for NVIDIA GPUs runs, but finds no GPU",
                               hint="check nvidia-smi on this node; its driver may be too old for this build")
        return Installed(name, version, program, says.text, devices, time.time())

    def _download(self, name: str, version: str, asset: Asset, before: int, total: int,
                  report: Report) -> None:
        target = self._layout.blob(asset.sha256)
        report(EnginePhase.VERIFYING, f"looking for {asset.name} on this node")
        if not download.damage(target, asset.size_bytes, (), asset.sha256):
            return
        path = paths.fill(paths.ENGINE_ASSET, engine=name, version=version, asset=asset.name)

        def progress(count: int) -> None:
            share = 100 * (before + count) // total if total else 100
            report(EnginePhase.DOWNLOADING,
                   f"downloading {asset.name}: {(before + count) / 1e6:.1f} of {total / 1e6:.1f} MB, {share} %",
                   done=before + count, total=total)

        progress(0)
        download.fetch(lambda offset: self._client.stream(path, headers={"Range": f"bytes={offset}-"},
                                                          timeout=60.0),
                       target, sha256=asset.sha256, size=asset.size_bytes,
                       partial=self._layout.partial(asset.sha256), reserve_bytes=RESERVE_BYTES,
                       progress=progress, stopping=self._stopping)

    def _unpack(self, asset: Asset, folder: str) -> None:
        files.make_dir(os.path.dirname(folder), 0o755)
        free = max(0, files.free_bytes(os.path.dirname(folder)) - RESERVE_BYTES)
        most = budget(asset.size_bytes, free)
        try:
            unpack(self._layout.blob(asset.sha256), folder, max_bytes=most)
        except TooMuch:
            if most < free:
                raise                     # the disk has room, but nothing honest is that large
            raise DiskFull(f"cannot unpack {asset.name} in {os.path.dirname(folder)}: {free} bytes are free there "
                           f"beside the {RESERVE_BYTES} that are kept, and it holds more",
                           hint="free some space there, or choose another data folder") from None

    def _rename(self, built: str, final: str) -> None:
        files.remove(final)               # without its marker it was never whole
        with files.storing("rename", built):
            os.replace(built, final)
            files.fsync_dir(os.path.dirname(final))

    def _lacking(self, folder: str) -> Tuple[str, ...]:
        """Return the sentences of ldd over every program and library, backend plugins too, each once."""
        found: List[str] = []
        own = set(os.listdir(folder))
        for path in _elf_files(folder):
            outcome = self._processes.run(Command(("ldd", path), env=_ENV, cwd="/"), timeout=LDD_SECONDS)
            for sentence in ldd.missing(outcome.err + "\n" + outcome.out):
                library = sentence.split(" ", 1)[0]
                if sentence not in found and library not in own and library not in ldd.DRIVER_LIBRARIES:
                    found.append(sentence)
        return _once_per_library(found)

    def _devices(self, path: str) -> Tuple[str, ...]:
        outcome = self._processes.run(Command((path, "--list-devices"), env=_ENV, cwd="/"), timeout=RUN_SECONDS)
        return engine_version.devices(outcome.out + "\n" + outcome.err) if outcome.code == 0 else ()


def read_marker(folder: str) -> Optional[Installed]:
    """Return what is installed in ``folder``, None when nothing whole is."""
    try:
        data = files.read_bytes(os.path.join(folder, MARKER))
        return _from_json(json.loads(data)) if data else None
    except (ValueError, KeyError, TypeError, AttributeError, StorageError):
        return None


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


def _elf_files(folder: str) -> List[str]:
    found = []
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if os.path.islink(path) or not os.path.isfile(path):
            continue
        if name != PROGRAM and ".so" not in name:
            continue                      # the other programs of a release are not used
        with open(path, "rb") as source:
            if source.read(4) == b"\x7fELF":
                found.append(path)
    return found


def _once_per_library(sentences: Sequence[str]) -> Tuple[str, ...]:
    """Keep the sentence with the newest version for each library: files differ in what they ask of it."""
    kept: dict = {}
    for sentence in sentences:
        key = sentence.split(" ", 1)[0]
        if key not in kept or _version(sentence) > _version(kept[key]):
            kept[key] = sentence
    return tuple(kept.values())


def _version(sentence: str) -> Tuple[int, ...]:
    number = sentence.rstrip(")").rsplit("_", 1)[-1]
    return tuple(int(part) for part in number.split(".") if part.isdigit())


def _check_build(name: str, version: str, says: engine_version.EngineVersion) -> None:
    """Refuse an archive of another release; a build that was never told its number says 0."""
    wanted = version[1:] if version[:1] == "b" else version
    if wanted.isdigit() and says.build and says.build != int(wanted):
        raise EngineFailed(f"{name} {version}: the program calls itself build {says.build}",
                           hint="the archive holds another release than its name says")


def _hint(lacks: Sequence[str]) -> str:
    if any("too old" in sentence for sentence in lacks):
        return "use a newer system on this node, or a build made for an older one (engines.llama.cpp.binary)"
    return "install the missing libraries with this system's package manager"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def _to_json(installed: Installed) -> Any:
    return {"engine": installed.name, "version": installed.version, "program": installed.program,
            "says": installed.says, "devices": list(installed.devices), "installed_at": installed.installed_at}


def _from_json(data: Any) -> Installed:
    return Installed(str(data["engine"]), str(data["version"]), str(data["program"]), str(data["says"]),
                     tuple(str(item) for item in data["devices"]), float(data["installed_at"]))
