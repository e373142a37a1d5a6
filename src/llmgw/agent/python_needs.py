"""Does this node have what a Python engine needs? All that is missing is named at once; a compiler is brought."""
from __future__ import annotations

import os
from dataclasses import replace
from typing import Callable, List

from llmgw.agent.layout import Layout
from llmgw.agent.prove import Report
from llmgw.decide import packages, requirements
from llmgw.domain.engine import EnginePhase
from llmgw.domain.errors import DiskFull, PackagesFailed, RequirementMissing
from llmgw.domain.node import NodeFacts
from llmgw.domain.requirement import Requirement, Status
from llmgw.engines.needs import needs_of
from llmgw.system import files
from llmgw.system import packages as package_manager

GCC = "gcc"


class PythonNeeds:
    """``allowed``: missing system packages may be installed, when this process is root."""

    def __init__(self, layout: Layout, facts: Callable[[], NodeFacts], allowed: bool) -> None:
        self._layout, self._facts, self._allowed = layout, facts, allowed

    def must_fit(self, name: str, version: str, report: Report) -> None:
        """Refuse, before anything is downloaded, an engine that this node cannot run."""
        missing = self._missing(name, version)
        plan = packages.for_compiler(self._ways())
        if any(item.name == GCC for item in missing) and plan.argv:
            report(EnginePhase.INSTALLING_PACKAGES, f"installing {', '.join(plan.packages)} with {plan.argv[0]}: "
                   f"{name} {version} compiles while it runs")
            try:
                package_manager.install(plan.argv, plan.refresh, self._layout.packages_log)
            except PackagesFailed as error:
                raise PackagesFailed(f"{name} {version}: gcc is missing, and {error.message}", hint=error.hint,
                                     waits=error.waits) from error
            missing = self._missing(name, version)
        if missing:
            kind = DiskFull if [item.name for item in missing] == [requirements.DISK] else RequirementMissing
            raise kind(f"{name} {version}: " + "; ".join(item.message for item in missing),
                       hint="; ".join(dict.fromkeys(item.hint for item in missing if item.hint)))

    def _missing(self, name: str, version: str) -> List[Requirement]:
        facts = self._facts()
        # what an earlier try has in the cache need not come again
        free = files.free_bytes(self._layout.root) + _size(self._layout.uv_cache)
        machine = requirements.Machine(replace(facts, disk_free_bytes=free), self._ways(),
                                       gcc=package_manager.has_compiler())
        return [item for item in requirements.check(needs_of(name, version), machine) if item.status is Status.MISSING]

    def _ways(self) -> packages.Ways:
        return packages.Ways(self._facts().os, package_manager.managers(packages.MANAGERS), package_manager.is_root(),
                             self._allowed)


def _size(folder: str) -> int:
    """Return how much lies in ``folder``; what vanishes meanwhile counts nothing."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_blocks * 512
            except OSError:
                continue
    return total
