"""What this machine has, and lacks, for each engine: asked here and now, without a control plane."""
from __future__ import annotations

import argparse
import contextlib
import os
import platform
import sys
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Sequence, Tuple

from llmgw.api import wire
from llmgw.ctl import output
from llmgw.decide import packages, requirements
from llmgw.decide.requirements import Machine
from llmgw.domain.cluster import AgentConfig
from llmgw.domain.command import RunAs
from llmgw.domain.engine import DEFAULT_VERSIONS, ENGINES, LLAMA_CPP
from llmgw.domain.errors import ConfigError, LlmgwError, UsageError
from llmgw.domain.node import NodeFacts
from llmgw.domain.requirement import Library, Requirement, Status
from llmgw.engines.needs import NEEDS, needs_of
from llmgw.engines.recipes import RECIPES
from llmgw.parse import agent_yaml
from llmgw.probe import engine, machine
from llmgw.probe.python_package import version_of
from llmgw.system import accounts, data_dir, files, installed
from llmgw.system import packages as package_manager
from llmgw.system.installed import Installed
from llmgw.system.process import Processes

TITLES = ("NEEDS", "STATE", "FOUND")
MISSING_EXIT = 3
RUNS = "program"
ASK_SECONDS = 60.0


@dataclass(frozen=True)
class Finding:
    """One engine on this machine. ``skipped`` says why it is no business of this machine, which is no fault."""

    engine: str
    version: str = ""                 # empty: nothing is installed
    skipped: str = ""
    requirements: Tuple[Requirement, ...] = ()

    @property
    def state(self) -> str:
        if self.skipped:
            return "skipped"
        return Status.MISSING.value if requirements.first_missing(self.requirements) else Status.OK.value


def run(argv: List[str], debug: bool = False) -> int:
    """Look, tell, and return 3 when something is missing."""
    options = _options(argv)
    config = _config(options.config)
    folder = _data_dir(options.data_dir or config.data_dir)
    doctor = Doctor(config, folder)
    findings = [finding for name in options.engine or _usual(config) for finding in doctor.look(name)]
    if options.json:
        output.write_json(_as_data(doctor, findings))
    else:
        _show(doctor, findings)
    return MISSING_EXIT if any(finding.state == Status.MISSING.value for finding in findings) else 0


def _options(argv: List[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="llmgw.pyz doctor", allow_abbrev=False,
        description="Look at this machine: what each engine needs, what is there and what is missing. "
                    f"Exit code {MISSING_EXIT} when something is missing.")
    parser.add_argument("engine", nargs="*", metavar="ENGINE",
                        help=f"one of {', '.join(ENGINES)} (default: those that every node has)")
    parser.add_argument("--config", metavar="FILE", help="the agent.yaml of this node")
    parser.add_argument("--data-dir", metavar="FOLDER", default="", help="the agent's data folder")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    options = parser.parse_args(argv)
    unknown = [name for name in options.engine if name not in ENGINES]
    if unknown:
        raise UsageError(f"doctor: unknown engine {unknown[0]!r:.60}", hint=f"one of {', '.join(ENGINES)}")
    return options


def _config(path: Optional[str]) -> AgentConfig:
    if not path:
        return AgentConfig()
    data = files.read_bytes(path, limit=1 << 20)
    if data is None:
        raise ConfigError(f"{path}: no such file")
    return agent_yaml.decode(data, os.path.basename(path))


def _data_dir(given: str) -> str:
    """Return the agent's folder: its own, or that of the agent which ``up`` runs where only that is there."""
    usual = data_dir.role_dir("agent", given)
    below_up = os.path.join(data_dir.role_dir("up"), "agent")
    return below_up if not given and not os.path.isdir(usual) and os.path.isdir(below_up) else usual


def _usual(config: AgentConfig) -> List[str]:
    return list(dict.fromkeys([*DEFAULT_VERSIONS, *(item.name for item in config.operator_engines)]))


class Doctor:
    """This machine, looked at once; then each engine with what is known of the machine."""

    def __init__(self, config: AgentConfig, folder: str) -> None:
        self._config, self.folder = config, folder
        self._engines = os.path.join(folder, "engines")
        self._closed, user = _engine_user(config, self._engines)
        self._processes = Processes(lambda: user)
        self.facts: NodeFacts = machine.probe(_existing(folder), processes=self._processes,
                                              exclude_gpus=config.exclude_gpus)
        self.ways = packages.Ways(self.facts.os, package_manager.managers(packages.MANAGERS),
                                  package_manager.is_root(), config.install_packages)

    def warnings(self) -> List[str]:
        """Return what troubles the machine as a whole."""
        found = [warning for warning in self.facts.warnings if warning != machine.NO_AVX2]   # each engine tells
        if any(os.path.isdir(place) and not os.access(place, os.R_OK | os.X_OK) for place in (
                self.folder, self._engines)):
            found.append(f"{self.folder} cannot be read by this user: run this as the user that runs the agent")
        return found + ([self._closed] if self._closed else [])

    def look(self, name: str) -> List[Finding]:
        """Return what is found of an engine: one finding for each version that is here."""
        own = [item.path for item in self._config.operator_engines if item.name == name]
        skipped = self._skipped(name, bool(own))
        if skipped:
            return [Finding(name, skipped=skipped)]
        if own:
            return [self._operators(name, own[0])]
        here = [found for found in installed.find(self._engines) if found.name == name]
        here.sort(key=lambda found: found.installed_at, reverse=True)
        return [self._installed(found) for found in here] or [self._absent(name)]

    def _skipped(self, name: str, own: bool) -> str:
        if sys.platform != "linux":
            return f"engines run on Linux only, this is {platform.system()}"
        return "" if own else requirements.skipped(NEEDS[name], self.facts)

    def _installed(self, found: Installed) -> Finding:
        if found.name != LLAMA_CPP:
            return self._as_marked(found)
        folder = found.folder
        path, label = os.path.join(folder, found.program), f"{found.name} {found.version}"
        lacking, problem = self._lacking(engine.elves(folder), path)
        checks = self._check(found.name, lacking, installed=True, cuda=found.cuda)
        return Finding(found.name, found.version, requirements=checks + (
            self._runs(path, label, found.cuda, problem, bool(lacking)),))

    def _as_marked(self, found: Installed) -> Finding:
        """Return an engine that takes a GPU and minutes to run: what its install saw must do."""
        folder = found.folder
        runs = self._holds(found.name, os.path.join(folder, found.program))
        if runs.status is Status.OK:
            runs = Requirement(RUNS, Status.OK, f"{runs.message}; it ran when it was installed: {found.says}")
        return Finding(found.name, found.version, requirements=self._check(
            found.name, None, found.version, installed=True) + (runs,))

    def _holds(self, name: str, path: str) -> Requirement:
        """Ask an environment which version of the engine it holds."""
        if not os.path.isfile(path):
            return Requirement(RUNS, Status.MISSING, f"{path}: no such file",
                               "name a Python that has the engine, in agent.yaml")
        if name not in RECIPES:
            return Requirement(RUNS, Status.OK, path)
        try:
            version = version_of(self._processes, path, RECIPES[name].package, ASK_SECONDS)
        except LlmgwError as error:
            return Requirement(RUNS, Status.MISSING, error.message, "name a Python that has the engine, in agent.yaml")
        return Requirement(RUNS, Status.OK, f"{path} holds {name} {version}")

    def _operators(self, name: str, path: str) -> Finding:
        if name != LLAMA_CPP:                        # which CUDA and which system it is made for, its maker knows
            return Finding(name, "operator", requirements=(self._holds(name, path),))
        lacking, problem = self._lacking(engine.elves_beside(path), path)
        checks = self._check(name, lacking, installed=True, cpu=True)
        return Finding(name, "operator", requirements=checks + (
            self._runs(path, path, "", problem, bool(lacking)),))

    def _absent(self, name: str) -> Finding:
        """Nothing is installed: what can be told beforehand, of the libraries that all of them use."""
        lacking: Optional[Tuple[Library, ...]] = None
        if NEEDS[name].libraries:
            with contextlib.suppress(LlmgwError):    # no ldconfig here: ldd will tell, once something is installed
                lacking = engine.usual_libraries(self._processes, NEEDS[name].libraries)
        checks = self._check(name, lacking, cpu=name in self._config.cpu_engines)
        return Finding(name, requirements=checks + (
            Requirement(RUNS, Status.NOT_APPLICABLE, f"nothing is installed in {self.folder} yet"),))

    def _check(self, name: str, lacking: Optional[Tuple[Library, ...]], version: str = "",
               **more: Any) -> Tuple[Requirement, ...]:
        needs = needs_of(name, version)
        gcc = package_manager.has_compiler() if needs.compiler else None
        return requirements.check(needs, Machine(self.facts, self.ways, lacking=lacking, gcc=gcc, **more))

    def _lacking(self, elves: Sequence[str], path: str) -> Tuple[Tuple[Library, ...], str]:
        if not os.path.isfile(path):
            return (), f"{path}: no such file"
        try:
            return engine.lacking(self._processes, elves), ""
        except LlmgwError as error:
            return (), error.message

    def _runs(self, path: str, label: str, cuda: str, problem: str, lacking: bool) -> Requirement:
        """Run it, unless it is known that it cannot run."""
        if problem:
            return Requirement(RUNS, Status.MISSING, problem, "the agent installs what is wanted anew when it runs")
        if lacking:
            return Requirement(RUNS, Status.NOT_APPLICABLE, "not run: it lacks libraries")
        try:
            seen = engine.run(self._processes, path, label)
            named = engine.must_see_cuda(self._processes, path, label, self.facts) if cuda else ()
        except LlmgwError as error:
            return Requirement(RUNS, Status.MISSING, error.message, error.hint or "")
        return Requirement(RUNS, Status.OK, "; ".join((f"it runs: {seen.says.text}",) + named))


def _engine_user(config: AgentConfig, engines: str) -> Tuple[str, Optional[RunAs]]:
    """Return what keeps the engines' user from its work, and whom to run as here: that user, where it is and can."""
    name = config.engine_user or os.environ.get("LLMGW_ENGINE_USER", "") or accounts.ENGINE_USER
    user = accounts.find(name) if accounts.is_root() and name != "root" else None
    if user is None or not os.path.isdir(engines):           # nothing of the release is there to be run
        return "", None
    if accounts.may_enter(user, engines):
        return "", user
    return (f"the user {name}, whom engines run as, may not enter {accounts.closed(user, engines) or engines}: "
            "the programs below were run as root"), None


def _existing(folder: str) -> str:
    """Return the folder, or the nearest one above it that is there: it will lie on the same disk."""
    while not os.path.isdir(folder) and os.path.dirname(folder) != folder:
        folder = os.path.dirname(folder)
    return folder


def _show(doctor: Doctor, findings: Sequence[Finding]) -> None:
    facts = doctor.facts
    about = (facts.os.pretty_name or platform.system(), facts.arch, facts.libc, f"{facts.cpu_count} CPUs",
             f"{output.size(facts.memory_total_bytes)} of memory" if facts.memory_total_bytes else "")
    output.write(output.clean("this machine: " + ", ".join(word for word in about if word)))
    for warning in doctor.warnings():
        output.write(output.clean(f"warning: {warning}"))
    for finding in findings:
        label = " ".join(word for word in (finding.engine, finding.version) if word)
        said = f": {finding.skipped}" if finding.skipped else ""
        output.write("")
        output.write(output.clean(f"{label}: {finding.state}{said}"))
        if finding.requirements:
            output.write_table(TITLES, [_row(item) for item in finding.requirements], empty="")


def _row(item: Requirement) -> output.Row:
    """A sentence that somebody has to act on stands below its row, where nothing is cut."""
    if item.status in (Status.OK, Status.NOT_APPLICABLE):
        return output.Row((item.name, item.status.value, item.message))
    notes = (item.message, f"try: {item.hint}" if item.hint else "")
    return output.Row((item.name, item.status.value, ""), tuple(note for note in notes if note))


def _as_data(doctor: Doctor, findings: Sequence[Finding]) -> Dict[str, Any]:
    return {"ok": all(finding.state != Status.MISSING.value for finding in findings),
            "data_dir": doctor.folder, "facts": wire.NODE_FACTS.encode(doctor.facts), "warnings": doctor.warnings(),
            "package_managers": list(doctor.ways.managers), "root": doctor.ways.root,
            "engines": [{"engine": finding.engine, "version": finding.version, "state": finding.state,
                         "skipped": finding.skipped, "requirements": [
                             {"name": item.name, "status": item.status.value, "message": item.message,
                              "hint": item.hint} for item in finding.requirements]} for finding in findings]}
