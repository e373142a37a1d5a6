"""Does a program compute on the GPUs it was given? Told by the memory it holds on each of them."""
from __future__ import annotations

from dataclasses import dataclass
from typing import FrozenSet, List, Mapping, Optional, Sequence, Tuple

from llmgw.domain.replica import GpuSlot

LEAST_BYTES = 64 << 20            # a CUDA context alone takes more


@dataclass(frozen=True)
class Holder:
    """One program on one card, as the driver lists them; ``used_bytes`` None: it does not say."""

    pid: int
    gpu_uuid: str
    used_bytes: Optional[int] = None


@dataclass(frozen=True)
class Sample:
    """What the driver said at one moment; ``used`` is by uuid, None where a card does not say."""

    used: Mapping[str, Optional[int]]
    holders: Tuple[Holder, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """``idle``: cards that hold nothing of the program; ``unknown``: cards of which nobody can tell."""

    idle: Tuple[int, ...] = ()
    unknown: Tuple[int, ...] = ()

    @property
    def sentence(self) -> str:
        """Return what is wrong, empty when nothing is known to be."""
        if not self.idle:
            return ""
        names = ", ".join(str(index) for index in self.idle)
        return (f"GPU {names} holds nothing of it: it probably runs on the CPU" if len(self.idle) == 1 else
                f"GPUs {names} hold nothing of it: it probably runs on the CPU")


def judge(slots: Sequence[GpuSlot], before: Optional[Sample], now: Sample, ours: FrozenSet[int]) -> Verdict:
    """Return which of the cards hold nothing. By pid where the driver shows ours; else by the card's own memory."""
    seen = {holder.gpu_uuid for holder in now.holders if holder.pid in ours and holder.used_bytes != 0}
    if seen:                          # our pids are shown: a card without one of them holds nothing of ours
        return Verdict(idle=tuple(slot.index for slot in slots if slot.uuid not in seen))
    idle: List[int] = []
    unknown: List[int] = []
    for slot in slots:
        grown = _grown(slot.uuid, before, now)
        if grown is None:             # unified memory, and hidden pids
            (unknown if _anyone(slot.uuid, before, now) is not False else idle).append(slot.index)
        elif grown < LEAST_BYTES:
            idle.append(slot.index)
    return Verdict(tuple(idle), tuple(unknown))


def unreleased(slots: Sequence[GpuSlot], before: Optional[Sample], now: Sample, alive: FrozenSet[int]) -> str:
    """Return, in words, which cards still show memory of programs that have ended; ``alive``: pids that run.

    A card whose memory has grown since before the start counts too, unless a stranger runs there that did not then.
    """
    held: List[int] = []
    for slot in slots:
        first = {holder.pid for holder in (before.holders if before else ()) if holder.gpu_uuid == slot.uuid}
        new = {holder.pid for holder in now.holders if holder.gpu_uuid == slot.uuid} - first
        grown = _grown(slot.uuid, before, now)
        if new - alive or (not new and grown is not None and grown >= LEAST_BYTES):
            held.append(slot.index)
    if not held:
        return ""
    which = f"GPU {held[0]} still shows" if len(held) == 1 else f"GPUs {', '.join(map(str, held))} still show"
    return f"{which} memory of programs that ended"


def _grown(uuid: str, before: Optional[Sample], now: Sample) -> Optional[int]:
    """Return by how much the card's used memory has grown since before the start; None when that is not known."""
    first, last = before.used.get(uuid) if before else None, now.used.get(uuid)
    return None if first is None or last is None else last - first


def _anyone(uuid: str, before: Optional[Sample], now: Sample) -> Optional[bool]:
    """Whether more programs hold the card than before; None when the driver lists none at all, anywhere."""
    if not now.holders or before is None:
        return None
    count = sum(holder.gpu_uuid == uuid for holder in now.holders)
    return count > sum(holder.gpu_uuid == uuid for holder in before.holders)
