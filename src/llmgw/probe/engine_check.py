"""Check every flag llmgw would give an engine against the engine's own help, asked of its own program."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping, Optional, Sequence, Tuple

from llmgw.domain.command import Command
from llmgw.domain.engine import CPU, LLAMA_CPP
from llmgw.domain.errors import LlmgwError
from llmgw.engines import trtllm, widest
from llmgw.engines.base import Engine
from llmgw.engines.recipes import RECIPES
from llmgw.engines.widest import Status, Verdict, Wide
from llmgw.parse import engine_help
from llmgw.probe import engine as binary
from llmgw.probe.python_package import version_of
from llmgw.system.process import Processes

HELP_SECONDS = 300.0              # a Python engine imports gigabytes to say it
VERSION_SECONDS = 60.0
# What it prints is read here: no colours, no narrow terminal.
_PLAIN = {"LC_ALL": "C.UTF-8", "TERM": "dumb", "NO_COLOR": "1", "COLUMNS": "120"}
_DEVICES = ("import torch\nfor n in range(torch.cuda.device_count()):\n"
            " print('CUDA%d: %s' % (n, torch.cuda.get_device_name(n)))")


@dataclass(frozen=True)
class ProgramCheck:
    """One program. ``skipped`` says why it could not be asked; ``truncated`` why its help looks cut."""

    title: str
    verdicts: Tuple[Verdict, ...] = ()
    skipped: str = ""
    truncated: str = ""

    @property
    def faults(self) -> Tuple[str, ...]:
        return tuple(one.message for one in self.verdicts if one.status in (Status.MISSING, Status.REFUSED))


@dataclass(frozen=True)
class EngineCheck:
    """All programs of an engine; ``version`` and ``devices`` as it says itself, empty when it cannot be asked."""

    engine: str
    version: str
    devices: Tuple[str, ...]
    programs: Tuple[ProgramCheck, ...]

    @property
    def faults(self) -> Tuple[str, ...]:
        """Return a sentence for each flag that is gone, or does not take its value any more."""
        return tuple(fault for program in self.programs for fault in program.faults)


class Asker:
    """Runs an engine's programs; ``run`` may be replaced by what runs them as another user."""

    def __init__(self, processes: Processes, work_dir: str, has_gpu: bool) -> None:
        self._processes, self._work_dir, self._has_gpu = processes, work_dir, has_gpu

    def check(self, engine: Engine, program: str, args: Sequence[str] = (),
              helps: Optional[Mapping[str, str]] = None) -> EngineCheck:
        """Return the check of every program; ``helps`` (by title) stand for what a program would print."""
        saved = helps or {}
        found = []
        for wide in widest.programs(engine, program, self._work_dir, args):
            found.append(self._program(engine, wide, saved.get(wide.title)))
        version, devices = self._about(engine, program) if program else ("", ())
        return EngineCheck(engine.name, version, devices, tuple(found))

    def _program(self, engine: Engine, wide: Wide, saved: Optional[str]) -> ProgramCheck:
        if saved is None:
            try:
                saved = self._help(engine, wide)
            except LlmgwError as error:
                return ProgramCheck(wide.title, skipped=error.message)
        said = engine_help.read(saved, wide.sections)
        verdicts = widest.judge(wide, said, tuple(engine.unlisted_flags), same_dashes=engine.dashes_are_underscores)
        return ProgramCheck(wide.title, verdicts, truncated=said.truncated)

    def _help(self, engine: Engine, wide: Wide) -> str:
        """Return what the program prints when asked for help; some print it on stderr."""
        if not wide.help[0]:
            raise LlmgwError(f"no program is known here: {_how_to_name(engine)}")
        outcome = self._processes.run(Command(wide.help, env=self._env(engine, wide), cwd=self._work_dir),
                                      timeout=HELP_SECONDS)
        if outcome.code != 0:
            lines = [line.strip() for line in (outcome.err or outcome.out).splitlines() if line.strip()]
            raise LlmgwError(f"{' '.join(wide.help)} ends with code {outcome.code}: "
                             f"{(lines or ['no word'])[-1][:300]}")
        return outcome.out if len(outcome.out) >= len(outcome.err) else outcome.err

    def _env(self, engine: Engine, wide: Wide) -> Mapping[str, str]:
        without_gpu = RECIPES[engine.name].without_gpu if engine.name in RECIPES and not self._has_gpu else {}
        return {**wide.env, **_PLAIN, **without_gpu, "HOME": self._work_dir}

    def _about(self, engine: Engine, program: str) -> Tuple[str, Tuple[str, ...]]:
        """Return the version and the devices; what cannot be told is empty, the programs say why."""
        try:
            if engine.name == LLAMA_CPP:
                seen = binary.run(self._processes, program, engine.name)
                return seen.says.text, binary.devices(self._processes, program)[0] or (CPU,)
            package = RECIPES[engine.name].package if engine.name in RECIPES else trtllm.PACKAGE
            version = version_of(self._processes, program, package, VERSION_SECONDS)
            return version, self._devices(program, version)
        except LlmgwError:
            return "", ()

    def _devices(self, python: str, version: str) -> Tuple[str, ...]:
        if version.endswith("+cpu"):
            return (CPU,)
        outcome = self._processes.run(Command((python, "-c", _DEVICES), env={
            "PATH": "/usr/local/bin:/usr/bin:/bin", "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "HOME": self._work_dir,
            "PYTHONNOUSERSITE": "1", **_PLAIN}, cwd=self._work_dir), timeout=HELP_SECONDS)
        return tuple(line.strip() for line in outcome.out.splitlines() if line.startswith("CUDA"))


def _how_to_name(engine: Engine) -> str:
    return "name it with --binary PATH" if engine.name == LLAMA_CPP else "name it with --python PATH"
