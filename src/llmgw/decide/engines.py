"""Which engine work a node owes: install, look again, remove."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List, Mapping, Optional, Sequence, Tuple, Union

from llmgw.domain.engine import LLAMA_CPP, EngineWanted

RECHECK_SECONDS = 600.0           # an unrelated upgrade can remove a library
RETRY_SECONDS = (5.0, 15.0, 60.0, 300.0)
KEEP_OLD = {LLAMA_CPP: 1}         # archives keep one old version; environments of gigabytes none

Key = Tuple[str, str]             # (engine, version)


@dataclass(frozen=True)
class Install:
    wanted: EngineWanted


@dataclass(frozen=True)
class Recheck:
    wanted: EngineWanted


@dataclass(frozen=True)
class Remove:
    name: str
    version: str


Step = Union[Install, Recheck, Remove]


@dataclass(frozen=True)
class Here:
    """An installed version: when it was last seen to run, whether it did, when it came."""

    checked_at: Optional[float] = None
    runs: bool = False
    installed_at: float = 0.0
    cuda: str = ""                # the CUDA version it was built for; empty: the CPU build


@dataclass(frozen=True)
class Attempt:
    """Installing that failed: how often, and when last."""

    failures: int
    at: float


def retry_at(attempt: Attempt) -> float:
    """Return when a failed install is tried again."""
    return attempt.at + RETRY_SECONDS[min(attempt.failures, len(RETRY_SECONDS)) - 1]


def other_build(item: EngineWanted, found: Here, has_gpu: bool) -> bool:
    """Say whether the installed build of a version is not the one that is wanted now.

    A GPU that is not seen just now is no reason for the CPU build: that is only taken on purpose.
    """
    if item.name != LLAMA_CPP:
        return False                  # of the others there is one build only
    if item.cpu:
        return bool(found.cuda)
    if not found.cuda:
        return has_gpu
    return bool(item.cuda) and _numbers(found.cuda) > _numbers(item.cuda)


def _numbers(version: str) -> Tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def plan(wanted: Sequence[EngineWanted], here: Mapping[Key, Here], attempts: Mapping[Key, Attempt],
         in_use: Sequence[Key], now: float, *, has_gpu: bool = False,
         recheck_seconds: float = RECHECK_SECONDS) -> List[Step]:
    """Return the steps in the order of ``wanted``, removals last.

    A version stays while anything uses it, until the wanted one runs, and the
    newest old archive stays after that. Of an engine that is not wanted at all, none stays.
    """
    steps: List[Step] = []
    for item in wanted:
        key = (item.name, item.version)
        found = here.get(key)
        if found is None or other_build(item, found, has_gpu):
            attempt = attempts.get(key)
            if attempt is None or now >= retry_at(attempt):
                steps.append(Install(item))
        elif found.checked_at is None or now - found.checked_at >= recheck_seconds:
            steps.append(Recheck(item))
    return steps + _removals(wanted, here, in_use)


def _removals(wanted: Sequence[EngineWanted], here: Mapping[Key, Here], in_use: Sequence[Key]) -> List[Step]:
    keep = {(item.name, item.version) for item in wanted} | set(in_use)
    names = {item.name for item in wanted}
    running = {item.name for item in wanted if here.get((item.name, item.version), Here()).runs}
    steps: List[Step] = [Remove(*key) for key in sorted(here) if key[0] not in names and key not in keep]
    old: Dict[str, List[Key]] = {}
    for key in here:
        if key not in keep and key[0] in running:
            old.setdefault(key[0], []).append(key)
    for name, keys in old.items():
        keys.sort(key=lambda key: (here[key].installed_at, key), reverse=True)
        steps += [Remove(*key) for key in keys[KEEP_OLD.get(name, 0):]]
    return steps
