"""Install one version of vLLM or SGLang: an environment of its own, from packages that the whole fleet agrees on.

Everything happens under a scratch name on the same filesystem; the final name
exists only after the engine ran. A kill at any line leaves a scratch folder, which
the next start removes, and uv's cache, from which the next try goes on.
"""
from __future__ import annotations

import contextlib
import os
import time
from dataclasses import replace
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from llmgw.agent import fleet_list, python_wheels, uv
from llmgw.agent.engine_user import EngineUser
from llmgw.agent.layout import Layout
from llmgw.agent.outside import Outside
from llmgw.agent.prove import Report
from llmgw.agent.python_checks import check_environment
from llmgw.agent.python_needs import PythonNeeds
from llmgw.agent.python_tools import PythonTools
from llmgw.agent.python_wheels import Wheels
from llmgw.agent.uv import Uv
from llmgw.api.client import ControlClient
from llmgw.domain.command import Command
from llmgw.domain.engine import CPU, EnginePhase, EngineWanted
from llmgw.domain.errors import EngineFailed, LlmgwError, StorageError, TryAgain, Unreachable
from llmgw.domain.names import file_name
from llmgw.domain.node import NodeFacts
from llmgw.engines import recipes
from llmgw.engines.recipes import RECIPES, Recipe
from llmgw.parse import lock, uv_output
from llmgw.probe.python_package import version_of
from llmgw.system import accounts, download, failpoint, files, follow, installed
from llmgw.system.installed import Installed
from llmgw.system.process import Processes

PROGRAM = os.path.join("bin", "python")
LIST = ".llmgw-packages.txt"
RUN_SECONDS = 600.0               # the first import of some gigabytes, from a cold disk
QUICK_SECONDS = 60.0


class PythonInstaller:
    """Brings versions of Python engines into ``engines/``. ``given``: index and proxy, see uv.from_node."""

    def __init__(self, client: ControlClient, layout: Layout, processes: Processes, needs: PythonNeeds, node: str,
                 given: Mapping[str, str], facts: Callable[[], NodeFacts], stopping: Callable[[], bool],
                 known: Mapping[str, Recipe] = RECIPES, user: Optional[EngineUser] = None,
                 outside: Optional[Outside] = None) -> None:
        self._user = user
        self._client, self._layout, self._processes, self._needs = client, layout, processes, needs
        self._node, self._given, self._facts, self._stopping = node, given, facts, stopping
        self._tools = PythonTools(client, layout, processes, stopping, outside)
        self._wheels = Wheels(client, layout, stopping)
        self._known = known
        self._operators: Dict[Tuple[str, str], str] = {}       # (path, version) that was seen to run -> what it said

    def knows(self, name: str) -> bool:
        return name in self._known

    def recall(self) -> None:
        """End what an agent that was killed left running."""
        uv.end_leftovers(self._layout)

    def is_outdated(self, made: Installed, item: EngineWanted) -> bool:
        """Whether the fleet has another list of packages now than the one this was made from."""
        kept = dict(item.locks)
        name = self._list_name(item)
        if name in kept:
            return kept[name] != made.packages
        return made.packages in kept.values()                  # the list with Ray, or without, is another one

    def _list_name(self, item: EngineWanted) -> str:
        return recipes.list_name(recipes.platform(self._known[item.name], self._facts().arch), item.with_ray)

    def install(self, item: EngineWanted, report: Report, here: Sequence[Installed] = ()) -> Installed:
        """Install it and return it; an error in words when something is missing, withdrawn or different.

        ``here``: what there is of this version already. One of it is returned when it is of the right packages;
        what is new comes beside it.
        """
        if not item.as_of:
            raise TryAgain(item.assets_problem or "the control plane does not say yet as of when to take its packages")
        recipe, facts = self._known[item.name], self._facts()
        self._needs.must_fit(item.name, item.version, report)
        scratch = self._layout.engine_scratch(item.name, item.version)
        uv.end_leftovers(self._layout)
        files.remove(scratch)
        label = f"{item.name} {item.version}"
        try:
            runner = Uv(self._tools.uv(item, facts.arch, report), self._layout, self._given, label, self._stopping,
                        self._user.of_uv() if self._user else None)
            base = self._tools.python(item, facts.arch, runner, report)
            made = self._build(item, recipe, runner, base, scratch, report, here)
        except follow.Stopped as error:
            raise download.Stopped(error.message) from None
        except LlmgwError:
            with contextlib.suppress(StorageError):
                files.remove(scratch)         # what failed takes no room until it is tried again; the cache stays
            raise
        files.remove(scratch)                 # of what was there already
        self.tidy()
        return made

    def tidy(self) -> None:
        """Remove what only an install that is under way needs, some gigabytes; a kill may have left it."""
        files.remove(self._layout.uv_cache)
        self._wheels.remove()
        self._tools.tidy()

    def _build(self, item: EngineWanted, recipe: Recipe, runner: Uv, base: str, scratch: str,
               report: Report, here: Sequence[Installed]) -> Installed:
        runner.make_environment(base, scratch)
        failpoint.reach("python-made")
        python = os.path.join(scratch, PROGRAM)
        report(EnginePhase.RESOLVING, f"finding the packages of {runner.label} as of {item.as_of}")
        pins = self._pins(item, recipe, runner, python, report)
        known = next((made for made in here if made.packages == lock.digest(pins)), None)
        if known is not None:
            return known
        listed = os.path.join(scratch, LIST)
        files.write_atomic(listed, lock.write(pins).encode("ascii"), mode=0o644)
        failpoint.reach("python-agreed")
        wheels = python_wheels.chosen(item, pins)
        folder = self._wheels.bring(item, wheels, report) if wheels else ""
        runner.install(listed, python, _progress(runner.label, len(pins), recipe, report), folder)
        failpoint.reach("python-installed")
        runner.compile(base, os.path.join(scratch, "lib", os.path.basename(base), "site-packages"))
        runner.take_back(scratch)
        failpoint.reach("python-ours")
        files.write_atomic(listed, lock.write(pins).encode("ascii"), mode=0o644)      # uv could write there
        report(EnginePhase.CHECKING, f"checking that {runner.label} runs here")
        check_environment(runner.label, scratch, os.path.dirname(os.path.dirname(base)), recipe.pth)
        found = Installed(item.name, item.version, PROGRAM, "", archive=f"{len(pins)} packages as of {item.as_of}",
                          packages=lock.digest(pins))
        made = self._prove(scratch, found, recipe)
        failpoint.reach("python-checked")
        os.sync()                             # uv leaves that to others: what is named must be on the disk
        installed.write(scratch, made)
        failpoint.reach("python-before-rename")
        final = self._layout.engine(item.name, item.version)
        if final in [there.folder for there in here]:
            final = installed.beside(final, made.packages)
        files.remove(final)                   # without its marker it was never whole
        with files.storing("rename", scratch):
            os.replace(scratch, final)
            files.fsync_dir(os.path.dirname(final))
        failpoint.reach("python-after-rename")
        return replace(made, folder=final)

    def _pins(self, item: EngineWanted, recipe: Recipe, runner: Uv, python: str, report: Report) -> lock.Pins:
        """Return the packages as this node finds them, the same as the fleet's; without an index, a vouched list."""
        try:
            pins = runner.resolve(recipes.requirements(recipe, item.version, item.with_ray), python,
                                  recipes.platform(recipe, self._facts().arch), item.as_of)
        except Unreachable as error:
            pins = python_wheels.vouched_list(self._client, item, self._list_name(item), error)
            report(EnginePhase.RESOLVING, f"{runner.label}: no package index, {len(pins)} packages from the mirror")
            return pins
        report(EnginePhase.RESOLVING, f"{runner.label}: {len(pins)} packages, compared with the fleet's list")
        failpoint.reach("python-resolved")
        fleet_list.must_be_the_fleets(self._client, self._node, item, self._list_name(item), pins)
        return pins

    def prove(self, folder: str, made: Installed) -> Installed:
        """Run what lies in ``folder`` again and return it; EngineFailed when it does not run."""
        return self._prove(folder, made, self._known[made.name])

    def _prove(self, folder: str, made: Installed, recipe: Recipe) -> Installed:
        says = self._run(made, os.path.join(folder, made.program), recipe)
        return replace(made, says=f"{made.name} {says}", installed_at=made.installed_at or time.time())

    def look(self, folder: str, made: Installed) -> None:
        """A quick look at what was proven before: its Python runs and finds the package; EngineFailed otherwise."""
        self._check_version(made, version_of(self._processes, os.path.join(folder, made.program),
                                             self._known[made.name].package, QUICK_SECONDS))

    def prove_operators(self, name: str, wanted: str, path: str) -> Tuple[str, Tuple[str, ...]]:
        """Return what an operator's environment says, and the devices it is made for; another version is refused.

        It is run once; after that a quick look is enough.
        """
        recipe = self._known[name]
        version = version_of(self._processes, path, recipe.package, QUICK_SECONDS)
        plain = version.partition("+")[0]
        if wanted and plain != wanted:
            raise EngineFailed(f"it holds {name} {version}, wanted is {wanted}",
                               hint=f"name {plain} under engines: in server.yaml, or bring the other")
        if (path, version) not in self._operators:
            self._operators[path, version] = self._run(Installed(name, version, path, ""), path, recipe)
        return f"{name} {self._operators[path, version]}", (CPU,) if version.endswith("+cpu") else ()

    def brought_version(self, package: str, wanted: str, path: str) -> str:
        """Return the version of a package that only operators bring; another than the wanted one is refused."""
        version = version_of(self._processes, path, package, QUICK_SECONDS)
        if wanted and version.partition("+")[0] != wanted:
            raise EngineFailed(f"it holds {package} {version}, wanted is {wanted}",
                               hint=f"name {version.partition('+')[0]} under engines: in server.yaml, or bring "
                                    "the other")
        return version

    def _run(self, made: Installed, path: str, recipe: Recipe) -> str:
        """Return the version that the engine itself prints, its last word after lines of its log."""
        run_as = self._user.run_as() if self._user else None
        home = files.make_dir(os.path.join(self._layout.tools, "home" if run_as is None else "engine-home"))
        if run_as is not None:
            accounts.give(home, run_as, 0o700)
        env = {"PATH": f"{os.path.dirname(path)}:/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C.UTF-8",
               "HOME": home, "PYTHONNOUSERSITE": "1",
               "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
               **({} if self._facts().gpus else recipe.without_gpu)}
        said: List[str] = []
        outcome = follow.follow(Command((path, *recipe.version_words), env=env, cwd=home, run_as=run_as),
                                (uv.MARKER, self._layout.root), seconds=RUN_SECONDS, line=said.append,
                                stopping=self._stopping)
        lines = [line.strip() for line in (outcome.out or outcome.err).splitlines() if line.strip()]
        last = lines[-1][:300] if lines else "nothing"
        if outcome.code != 0:
            raise EngineFailed(f"{made.name} {made.version} does not run here: it ends with code {outcome.code} "
                               f"and says: {_last_error(outcome.err) or last}")
        self._check_version(made, last)
        return last

    def _check_version(self, made: Installed, says: str) -> None:
        if says.partition("+")[0] != made.version.partition("+")[0]:
            raise EngineFailed(f"{made.name} {made.version}: it calls itself {says:.100}")

    def removing(self, made: Installed) -> None:
        """Keep the list of an environment that is about to be removed."""
        text = files.read_bytes(os.path.join(made.folder, LIST))
        if text:
            files.make_dir(self._layout.lists)
            name = f"{made.name}-{os.path.basename(made.folder)}.txt"
            files.write_atomic(os.path.join(self._layout.lists, name), text)

    def sweep(self, wanted: Sequence[EngineWanted], here: Sequence[Installed]) -> None:
        """Remove tools that neither an environment nor a wanted engine needs."""
        kept = [os.path.realpath(os.path.join(made.folder, made.program)) for made in here]
        kept += [os.path.join(self._layout.tools, f"{tool.name}-{file_name(tool.version)}", "x")
                 for item in wanted for tool in item.tools]
        self._tools.forget_others(kept)


def _progress(label: str, packages: int, recipe: Recipe, report: Report) -> Callable[[str], None]:
    state: Dict[str, uv_output.Progress] = {"now": uv_output.Progress()}

    def line(text: str) -> None:
        state["now"] = now = uv_output.progress(state["now"], text)
        if now.prepared:
            report(EnginePhase.UNPACKING, f"installing {packages} packages of {label}")
            return
        total = max(now.total_bytes, recipe.download_bytes)
        report(EnginePhase.DOWNLOADING, f"downloading {packages} packages of {label}: {now.done_bytes / 1e6:.0f} of "
               f"{'about ' if total > now.total_bytes else ''}{total / 1e6:.0f} MB", done=now.done_bytes, total=total)

    report(EnginePhase.DOWNLOADING, f"downloading {packages} packages of {label}")
    return line


def _last_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or [""])[-1][:300]
