"""The engines of a node: brings every wanted version to ``installed``, and says at each step where it stands."""
from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from llmgw.agent import flags
from llmgw.agent.board import Board, Key, Usable
from llmgw.agent.former import Former
from llmgw.agent.install import Installer
from llmgw.agent.layout import Layout
from llmgw.agent.prove import Report
from llmgw.agent.python_engine import PythonInstaller
from llmgw.decide import engines as decide
from llmgw.decide import requirements
from llmgw.domain.cluster import OperatorEngine
from llmgw.domain.engine import BESIDE, LLAMA_CPP, TRTLLM, VLLM, EngineObserved, EnginePhase, EngineWanted
from llmgw.domain.errors import DiskFull, EngineFailed, LlmgwError, RequirementMissing, TryAgain
from llmgw.engines import recipes, trtllm
from llmgw.engines.needs import NEEDS
from llmgw.parse import github_release
from llmgw.parse.engine_version import MIN_LLAMA_BUILD, has_known_holes
from llmgw.system import download, files, installed, rehearsal
from llmgw.system.clock import Clock
from llmgw.system.installed import Installed
from llmgw.system.logs import Said

log = logging.getLogger(__name__)

LOOKING = "waits for the look at this machine"
EVERY_SECONDS = 5.0
REPORT_SECONDS = 1.0
OPERATOR_RETRY_SECONDS = 30.0
RECHECK_SECONDS = rehearsal.seconds("RECHECK_SECONDS", decide.RECHECK_SECONDS)
DISK_FAILURES = 2                 # as many failures a full disk counts as, at most: tried again within 15 s


class EngineKeeper:
    """One thread; the only writer of ``engines/``."""

    def __init__(self, installer: Installer, python: PythonInstaller, board: Board, layout: Layout, clock: Clock,
                 operator: Sequence[OperatorEngine], cpu: Sequence[str] = (),
                 flag_check: Optional[flags.FlagCheck] = None) -> None:
        self._python, self._flags = python, flag_check
        self._cpu = frozenset(cpu)            # engines whose CPU build this node takes on purpose
        self._installer, self._board, self._layout, self._clock = installer, board, layout, clock
        self._operator = {item.name: item for item in operator}
        self._here: Dict[Key, decide.Here] = {}
        self._installed: Dict[Key, Installed] = {}
        self._former = Former(board)
        self._agreed: Dict[Key, EngineWanted] = {}         # was found to be installed as it is wanted
        self._operators_due: Dict[Key, float] = {}         # when the operator's programs are looked at next
        self._attempts: Dict[Key, Tuple[EngineWanted, decide.Attempt]] = {}
        self._last: Dict[Key, Tuple[EnginePhase, float, float]] = {}     # phase, since, told at
        self._said = Said()
        self.poke = threading.Event()

    def recall(self) -> None:
        """Find what is installed; remove what an interrupted install left. Nothing here is usable yet."""
        self._python.recall()
        whole = installed.find(self._layout.engines)
        for folder in sorted(set(installed.folders(self._layout.engines)) - {found.folder for found in whole}):
            log.info("unfinished install removed path=%s", folder)
            files.remove(folder)
        for found in whole:                   # the newest of a version comes last
            key = (found.name, found.version)
            if key in self._installed:
                self._former.add(self._installed[key])
            self._installed[key] = found
            self._here[key] = decide.Here(installed_at=found.installed_at, cuda=found.cuda)

    def turn(self) -> Optional[float]:
        """Take every step that is due. A failed one is told, and tried again later."""
        desired = self._board.desired
        wanted = [dataclasses.replace(item, cpu=item.cpu or item.name in self._cpu)
                  for item in (desired.node.engines if desired else ())]
        in_use = _in_use(self._board)
        for name in self._operator:
            self._check_operators(name, wanted)
        ours = [item for item in wanted if item.name not in self._operator and self._can_be_ours(item)]
        # installed versions that shards use, or that nobody has asked about yet, are looked at too
        kept = [EngineWanted(*key) for key in self._here
                if key not in {(item.name, item.version) for item in ours} and (desired is None or key in in_use)]
        steps = decide.plan([*ours, *kept], self._here, self._due(ours), in_use, self._clock.monotonic(),
                            has_gpu=bool(self._board.facts.gpus), recheck_seconds=RECHECK_SECONDS)
        for step in steps:
            if isinstance(step, decide.Install):
                self._install(step.wanted)
            elif isinstance(step, decide.Recheck):
                self._recheck((step.wanted.name, step.wanted.version))
            else:
                self._remove((step.name, step.version))
        outdated = [item for item in ours if self._is_outdated(item)]
        for item in outdated:
            self._renew(item)
        self._remove_former()
        if desired is not None:
            self._forget_unwanted(wanted)
            if not outdated and all(
                    (item.name, item.version) in self._here for item in wanted
                    if self._python.knows(item.name) and item.name not in self._operator):
                self._python.tidy()           # no install is under way, or waits for its next try
                self._sweep_tools()
        self._board.put_engines_probed()
        return None

    def _can_be_ours(self, item: EngineWanted) -> bool:
        key = (item.name, item.version)
        if item.name == LLAMA_CPP or key in self._here:      # a GPU that is not seen just now costs no environment
            return True
        why_not = requirements.skipped(NEEDS[item.name], self._board.facts) if item.name in NEEDS else ""
        if not self._board.facts.arch:
            self._tell(key, EnginePhase.RESOLVING, LOOKING)
        elif why_not:
            self._tell(key, EnginePhase.SKIPPED, why_not)
        elif self._python.knows(item.name):
            return True
        else:
            self._tell(key, EnginePhase.MISSING, f"llmgw does not install {item.name}",
                       f"name a Python that has it: engines: {{{item.name}: {{python: /PATH}}}} in agent.yaml")
        return False

    def _is_outdated(self, item: EngineWanted) -> bool:
        """Whether an environment is of packages that are no longer the fleet's."""
        key = (item.name, item.version)
        made = self._installed.get(key)
        return (made is not None and self._python.knows(item.name) and self._agreed.get(key) != item
                and self._python.is_outdated(made, item))

    def _renew(self, item: EngineWanted) -> None:
        """Make an environment of the fleet's packages beside the one there is, which serves until the new one runs."""
        key = (item.name, item.version)
        before, attempt = self._installed[key], self._attempts.get(key)
        if attempt is not None and self._clock.monotonic() < decide.retry_at(attempt[1]):
            return
        made = self._made(item, lambda: self._python.install(
            item, self._renewing(key), [before, *self._former.of(key)]))
        if made is None:
            return
        self._agreed[key] = item
        if made.folder == before.folder:
            self._recheck(key)                # it was of the right packages all the time
            return
        self._former.drop(made)
        self._former.add(before)
        self._runs(key, made)
        log.info("engine installed beside its former packages name=%s version=%s archive=%s says=%s", *key,
                 made.archive, made.says)
        self._sweep_tools()

    def _made(self, item: EngineWanted, install: Callable[[], Installed]) -> Optional[Installed]:
        """Return what ``install`` made; None when it was stopped, or failed, which is then told."""
        try:
            made = install()
        except download.Stopped:
            return None
        except LlmgwError as error:
            self._failed(item, error)
            return None
        self._attempts.pop((item.name, item.version), None)
        self._said.is_over(f"{(item.name, item.version)}")
        return made

    def _renewing(self, key: Key) -> Report:
        """Return who tells the progress while the former environment serves."""
        def tell(phase: EnginePhase, message: str, done: Optional[int] = None, total: Optional[int] = None) -> None:
            if self._board.engine(key)[1] is None:
                self._report(key, phase, message, done, total)
            elif time.monotonic() - self._last[key][2] >= REPORT_SECONDS:
                self._tell_serving(key, message, done=done, total=total)
        return tell

    def _tell_serving(self, key: Key, message: str, hint: str = "", done: Optional[int] = None,
                      total: Optional[int] = None) -> None:
        """Tell of an environment that serves while another one is made, or cannot be."""
        made = self._installed[key]
        self._tell(key, EnginePhase.INSTALLED, f"{made.says}{BESIDE}{message}", hint, usable=self._board.engine(key)[1],
                   devices=made.devices, done=done, total=total)

    def _remove_former(self) -> None:
        """Remove environments beside which a newer one runs, once nothing runs of them."""
        gone = [made for made in self._former.unused() if self._here[made.name, made.version].runs]
        for made in gone:
            self._python.removing(made)
            files.remove(made.folder)
            self._former.drop(made)
            log.info("engine of former packages removed path=%s", made.folder)
        if gone:
            self._sweep_tools()

    def _due(self, wanted: Sequence[EngineWanted]) -> Mapping[Key, decide.Attempt]:
        """Return the failed attempts; one at what is no longer wanted in that form does not count."""
        current = {(item.name, item.version): item for item in wanted}
        for key in [key for key, (item, _) in self._attempts.items() if current.get(key) != item]:
            del self._attempts[key]
        return {key: attempt for key, (_, attempt) in self._attempts.items()}

    def _install(self, item: EngineWanted) -> None:
        key = (item.name, item.version)
        is_python = self._python.knows(item.name)
        if not (item.as_of if is_python else item.assets or item.server_cannot):
            self._tell(key, EnginePhase.RESOLVING,
                       item.assets_problem or ("waits for the control plane to say as of when its packages are taken"
                                               if is_python else "the control plane has no list of its archives yet"))
            return
        if not self._board.facts.arch:
            self._tell(key, EnginePhase.RESOLVING, LOOKING)
            return
        install = self._python.install if is_python else self._install_archive
        made = self._made(item, lambda: install(item, self._reporter(key)))
        if made is None:
            return
        self._runs(key, made)
        log.info("engine installed name=%s version=%s archive=%s says=%s", *key, made.archive, made.says)
        self._sweep_tools()

    def _install_archive(self, item: EngineWanted, report: Report) -> Installed:
        listed = self._installer.listed(item, report)
        return self._installer.install(listed, self._pick(listed), report)

    def _pick(self, item: EngineWanted) -> github_release.Picked:
        """Return the archive for this node. One that waits for its reboot has a GPU: it gets no CPU build meanwhile."""
        facts = self._board.facts
        if facts.reboot_needed and not item.cpu:
            raise RequirementMissing(f"{item.name} {item.version}: {facts.reboot_needed}", hint="reboot the node")
        capabilities = [gpu.compute_capability for gpu in facts.gpus if gpu.compute_capability]
        return github_release.pick(item.assets, item.version, facts.arch,
                                   facts.nvidia_driver if facts.gpus else None, item.cpu,
                                   min(capabilities, key=github_release.numbers) if capabilities else None, item.cuda)

    def _failed(self, item: EngineWanted, error: LlmgwError) -> None:
        key = (item.name, item.version)
        before = self._attempts.get(key)
        failures = (before[1].failures if before else 0) + 1
        if isinstance(error, DiskFull):
            failures = min(failures, DISK_FAILURES)      # looking for room costs nothing
        attempt = decide.Attempt(failures, self._clock.monotonic())
        self._attempts[key] = (item, attempt)
        phase = (EnginePhase.MISSING if isinstance(error, RequirementMissing) else
                 EnginePhase.RESOLVING if isinstance(error, TryAgain) else EnginePhase.FAILED)
        wait = decide.retry_at(attempt) - self._clock.monotonic()
        told = error.message + f"; tried again in {wait:.0f} seconds"
        if self._board.engine(key)[1] is not None:
            self._tell_serving(key, told, error.hint or "")
        else:
            self._tell(key, phase, told, error.hint or "")
        if self._said.is_new(f"{key}", error.message):
            log.warning("engine not installed name=%s version=%s reason=%s: %s", *key, error.reason, error.message)

    def _recheck(self, key: Key) -> None:
        """Run an installed version again. One that stops running is reported; what runs of it is left alone."""
        found, folder = self._installed[key], self._folder(key)
        try:
            again = self._prove(key, folder, found)
        except LlmgwError as error:
            self._here[key] = dataclasses.replace(self._here[key], checked_at=self._clock.monotonic(), runs=False)
            phase = EnginePhase.MISSING if isinstance(error, RequirementMissing) else EnginePhase.FAILED
            self._tell(key, phase, error.message, error.hint or "")
            if not os.path.exists(os.path.join(folder, found.program)):
                self._remove(key)             # its files are gone: it is installed anew
            return
        self._runs(key, again)

    def _prove(self, key: Key, folder: str, found: Installed) -> Installed:
        """Run it; a Python engine, of which one run takes half a minute, only once after each start."""
        if not self._python.knows(key[0]):
            return self._installer.prove(folder, found, self._reporter(key))
        if not self._here[key].runs:
            return self._python.prove(folder, found)
        self._python.look(folder, found)
        return found

    def _runs(self, key: Key, seen: Installed) -> None:
        self._installed[key] = seen
        self._here[key] = decide.Here(self._clock.monotonic(), True, seen.installed_at, seen.cuda)
        program = os.path.join(self._folder(key), seen.program)
        if not self._has_lost_flags(key, program, seen.says):
            self._tell(key, EnginePhase.INSTALLED, seen.says, usable=Usable(program, former=self._former.folders(key)),
                       devices=seen.devices)

    def _has_lost_flags(self, key: Key, program: str, says: str, source: str = "") -> bool:
        """Whether it does not take some flag of ours; then that is told, and it is not offered."""
        if self._flags is None:
            return False
        label = f"{key[0]} {key[1]}"
        last = self._last.get(key)
        if last is None or last[0] is not EnginePhase.INSTALLED:
            self._tell(key, EnginePhase.CHECKING, f"checking the flags of {label}", source=source)
        faults = self._flags.faults(key[0], program, says)
        if faults:
            message = flags.sentence(label, faults)
            self._tell(key, EnginePhase.FAILED, message, flags.HINT, source=source)
            if self._said.is_new(f"flags {key}", message):
                log.warning("engine not offered name=%s version=%s: %s", *key, message)
        return bool(faults)

    def _check_operators(self, name: str, wanted: Sequence[EngineWanted]) -> None:
        """The operator's own program stands for whatever version is wanted; it is looked at like ours."""
        keys = [(item.name, item.version) for item in wanted if item.name == name] or [(name, "operator")]
        named = {(item.name, item.version): item for item in wanted}
        for key in keys:
            now = self._clock.monotonic()
            if now < self._operators_due.get(key, now):
                continue
            self._operators_due[key] = now + RECHECK_SECONDS
            path = self._operator[name].path
            try:
                says, devices = self._operators_words(key, path, named.get(key, EngineWanted(*key)))
            except LlmgwError as error:
                self._operators_due[key] = now + OPERATOR_RETRY_SECONDS
                self._tell(key, EnginePhase.MISSING, f"{path}: {error.message}", error.hint or "", source="operator")
                continue
            if not self._has_lost_flags(key, path, says, source="operator"):
                self._tell(key, EnginePhase.INSTALLED, f"{path}: {says}", usable=Usable(path), devices=devices,
                           source="operator")

    def _operators_words(self, key: Key, path: str, item: EngineWanted) -> Tuple[str, Tuple[str, ...]]:
        """Return what the operator's program says of itself, and its devices."""
        wanted = "" if key[1] == "operator" else key[1]
        if self._python.knows(key[0]):
            if item.with_ray:
                self._need_ray(path)
            return self._python.prove_operators(key[0], wanted, path)
        if key[0] == TRTLLM:                  # to run it takes a GPU and minutes: its first shard proves it
            return f"{TRTLLM} {self._python.brought_version(trtllm.PACKAGE, wanted, path)}", ()
        seen = self._installer.prove_operators(key[0], path, self._reporter(key))
        if not item.allow_insecure and has_known_holes(seen.says):
            raise EngineFailed(f"{seen.says} has known holes", hint=f"bring b{MIN_LLAMA_BUILD} or newer, or say "
                               f"allow_insecure: true for {key[0]} in server.yaml")
        return seen.says, seen.devices

    def _need_ray(self, path: str) -> None:
        """Refuse an environment whose Ray knows no token (launch_mode: ray): it would run what anybody sends it."""
        needed = f"launch_mode: ray needs Ray {recipes.MIN_RAY} or newer"
        hint = f"install '{recipes.RAY}' into it, or say launch_mode: mp for {VLLM} in server.yaml"
        try:
            found = self._python.brought_version(recipes.RAY_PACKAGE, "", path)
        except EngineFailed as error:
            raise EngineFailed(f"{error.message}, {needed}", hint=hint) from error
        if recipes.ray_is_too_old(found):
            raise EngineFailed(f"it holds ray {found}, {needed}", hint=hint)

    def _remove(self, key: Key) -> None:
        here = [made for made in (self._installed.get(key), *self._former.of(key)) if made is not None]
        for made in here:
            if self._python.knows(key[0]):
                self._python.removing(made)
            files.remove(self._folder(key, made))
            self._former.drop(made)
        self._here.pop(key, None)
        self._installed.pop(key, None)
        self._board.drop_engine(key)
        log.info("engine removed name=%s version=%s", *key)

    def _folder(self, key: Key, made: Optional[Installed] = None) -> str:
        return (made or self._installed[key]).folder or self._layout.engine(*key)

    def _sweep_tools(self) -> None:
        desired = self._board.desired
        self._python.sweep(desired.node.engines if desired else (),
                           [made for made in (*self._installed.values(), *self._former.all())
                            if self._python.knows(made.name)])

    def _forget_unwanted(self, wanted: Sequence[EngineWanted]) -> None:
        """Drop from the report what is neither wanted nor here."""
        keep = {(item.name, item.version) for item in wanted} | set(self._here)
        names = {item.name for item in wanted}
        keep |= {(name, "operator") for name in self._operator if name not in names}
        for key in [key for key in self._last if key not in keep]:
            del self._last[key]
            self._board.drop_engine(key)

    def _reporter(self, key: Key) -> Report:
        return lambda phase, message, done=None, total=None: self._report(key, phase, message, done, total)

    def _report(self, key: Key, phase: EnginePhase, message: str, done: Optional[int],
                total: Optional[int]) -> None:
        """Tell the progress of an install, at most once a second within one phase."""
        last = self._last.get(key)
        if last is None or last[0] is not phase or time.monotonic() - last[2] >= REPORT_SECONDS:
            self._tell(key, phase, message, done=done, total=total)

    def _tell(self, key: Key, phase: EnginePhase, message: str, hint: str = "", *,
              usable: Optional[Usable] = None, devices: Tuple[str, ...] = (), source: str = "",
              done: Optional[int] = None, total: Optional[int] = None) -> None:
        last = self._last.get(key)
        since = last[1] if last and last[0] is phase else self._clock.wall()
        self._last[key] = (phase, since, time.monotonic())
        source = source or ("packages" if self._python.knows(key[0]) else "archive")
        self._board.put_engine(EngineObserved(*key, phase, message, hint, usable is not None, source, done,
                                              total, devices, since), usable)


def _in_use(board: Board) -> List[Key]:
    desired = board.desired
    return [(shard.model.engine, shard.engine_version) for shard in desired.node.shards] if desired else []
