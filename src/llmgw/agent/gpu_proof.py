"""Asks the driver whether a shard's programs hold memory on the GPUs they were given."""
from __future__ import annotations

import logging
from typing import Optional, Tuple

from llmgw.decide.gpu_proof import Sample, judge, unreleased
from llmgw.domain.errors import LlmgwError
from llmgw.domain.replica import GpuSlot
from llmgw.probe import gpus
from llmgw.system import proc, spawn
from llmgw.system.process import Processes

log = logging.getLogger(__name__)


RELEASE_SECONDS = 60.0            # drivers free the memory of an ended program within a few


class GpuProof:
    """Made before the programs start: what a card held then is no sign of theirs. ``first``: whether it is before."""

    def __init__(self, slots: Tuple[GpuSlot, ...], processes: Optional[Processes] = None, *,
                 first: bool = True) -> None:
        self._slots, self._processes = slots, processes or Processes()
        self._before = self._sample() if slots and first else None
        self._waits_since: Optional[float] = None

    def why_not(self, marker: spawn.Marker) -> str:
        """Return which GPU holds nothing of the programs with this marker; empty when all do, or nobody can tell."""
        if not self._slots:
            return ""
        now = self._sample()
        if now is None:
            return ""                 # a driver that answers nothing is told by the look at the machine
        verdict = judge(self._slots, self._before, now, frozenset(process.pid for process in spawn.tree(marker)))
        if verdict.unknown:
            log.warning("nobody can tell whether these GPUs are used gpus=%s", verdict.unknown)
        return verdict.sentence

    def unreleased(self, now: float) -> str:
        """Return which GPUs still show memory of its programs, which have ended; empty after a minute at the latest."""
        found = self._sample() if self._slots else None
        if found is None:
            return ""
        pids = {holder.pid for holder in found.holders}
        said = unreleased(self._slots, self._before, found, frozenset(pid for pid in pids if _lives(pid)))
        if not said:
            self._waits_since = None
            return ""
        if self._waits_since is None:
            self._waits_since = now
        if now - self._waits_since < RELEASE_SECONDS:
            return said
        log.warning("not waited for any longer: %s", said)
        return ""

    def _sample(self) -> Optional[Sample]:
        program = gpus.find_program()
        if not program:
            return None
        try:
            used = {gpu.uuid: gpu.memory_used_bytes for gpu in gpus.query(self._processes, program).gpus}
            return Sample(used, gpus.holders(self._processes, program))
        except LlmgwError as error:
            log.warning("the GPUs could not be asked: %s", error.message)
            return None


def _lives(pid: int) -> bool:
    seen = proc.stat(pid)
    return seen is not None and seen.lives
