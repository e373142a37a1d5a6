"""Prove that a program runs on this node. What a system package would mend is mended first, where that is allowed."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, List, Optional, Sequence, Tuple

from llmgw.decide import packages, requirements
from llmgw.decide.requirements import Machine
from llmgw.domain.engine import EnginePhase
from llmgw.domain.errors import DiskFull, EngineFailed, LlmgwError, PackagesFailed, RequirementMissing
from llmgw.domain.node import NodeFacts
from llmgw.domain.requirement import Library, Needs, Requirement
from llmgw.engines.needs import NEEDS
from llmgw.parse.engine_version import EngineVersion
from llmgw.probe import engine
from llmgw.system import packages as package_manager
from llmgw.system.process import Processes

Report = Callable[..., None]      # (phase, sentence, done=, total=)


@dataclass(frozen=True)
class Program:
    """What is to be proven: which build it is, and what the release has besides."""

    name: str
    version: str
    path: str
    elves: Callable[[], List[str]]
    cuda: str = ""                # the CUDA version it was built for
    other_cuda: Tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return f"{self.name} {self.version}"


class Prover:
    """``allowed``: missing system packages may be installed, when this process is root."""

    def __init__(self, processes: Processes, log_path: str, allowed: bool, facts: Callable[[], NodeFacts]) -> None:
        self._processes, self._log_path, self._allowed, self._facts = processes, log_path, allowed, facts

    def must_fit(self, name: str, version: str, cpu: bool, archive_bytes: int) -> None:
        """Refuse, before anything is downloaded, an engine that this node cannot run."""
        machine = self._machine(cpu=cpu, archive_bytes=archive_bytes)
        found = requirements.first_missing(requirements.check(NEEDS.get(name, Needs()), machine))
        if found is not None:
            kind = DiskFull if found.name == requirements.DISK else RequirementMissing
            raise kind(f"{name} {version}: {found.message}", hint=found.hint)

    def prove(self, program: Program, report: Report) -> engine.Seen:
        """Return what the program says of itself and its devices; RequirementMissing or EngineFailed otherwise."""
        lacking = self._lacking(program)
        tried = bool(lacking) and self._install_packages(program, lacking, report)
        if tried:
            lacking = self._lacking(program)
        if lacking:
            found = self._libraries(program, lacking)
            raise RequirementMissing(f"{program.label}: {found.message}"
                                     + (", and is installed: its files are damaged or elsewhere" if tried else ""),
                                     hint=found.hint)
        seen = engine.run(self._processes, program.path, program.label)
        _check_build(program, seen.says)
        if program.cuda:
            named = engine.must_see_cuda(self._processes, program.path, program.label, self._facts())
        else:
            named = engine.devices(self._processes, program.path)[0]
        return engine.Seen(seen.says, named)

    def _lacking(self, program: Program) -> Tuple[Library, ...]:
        return engine.lacking(self._processes, program.elves())

    def _install_packages(self, program: Program, lacking: Sequence[Library], report: Report) -> bool:
        """Install what brings the libraries; whether there was anything to install."""
        machine = self._machine()
        plan = requirements.package_plan(NEEDS.get(program.name, Needs()), machine.ways, lacking)
        if plan is None or not plan.argv:
            return False
        report(EnginePhase.INSTALLING_PACKAGES, f"installing {', '.join(plan.packages)} with {plan.argv[0]}: "
               + "; ".join(library.sentence for library in lacking))
        try:
            package_manager.install(plan.argv, plan.refresh, self._log_path)
        except PackagesFailed as error:
            raise _not_installed(program, packages.sentence(lacking, plan), error, plan.by_hand) from error
        report(EnginePhase.CHECKING, f"checking that {program.label} runs here")
        return True

    def _libraries(self, program: Program, lacking: Sequence[Library]) -> Requirement:
        machine = self._machine(lacking=tuple(lacking), cuda=program.cuda, other_cuda=program.other_cuda)
        return requirements.libraries(NEEDS.get(program.name, Needs()), machine)

    def _machine(self, lacking: Optional[Tuple[Library, ...]] = None, **changes) -> Machine:
        facts = self._facts()
        ways = packages.Ways(facts.os, package_manager.managers(packages.MANAGERS), package_manager.is_root(),
                             self._allowed)
        return Machine(facts, ways, lacking=lacking, **changes)


def _not_installed(program: Program, sentence: str, error: PackagesFailed, by_hand: str) -> LlmgwError:
    """What waiting cures is a failure that is tried again; the rest is missing until a person has seen to it."""
    message = f"{program.label}: {sentence}, and {error.message}"
    if error.waits:
        return PackagesFailed(message, hint=error.hint, waits=True)
    return RequirementMissing(message, hint="; ".join(text for text in (error.hint, f"then: {by_hand}") if text))


def _check_build(program: Program, says: EngineVersion) -> None:
    """Refuse an archive of another release; a build that was never told its number says 0."""
    wanted = program.version[1:] if program.version[:1] == "b" else program.version
    if wanted.isdigit() and says.build and says.build != int(wanted):
        raise EngineFailed(f"{program.label}: the program calls itself build {says.build}",
                           hint="the archive holds another release than its name says")
