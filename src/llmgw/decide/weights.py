"""Which weights a node fetches, and which it gives up when room is short."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, FrozenSet, Sequence, Tuple

from llmgw.domain.model import Weights

RESERVE_BYTES = 5_000_000_000     # kept free on the filesystem of data_dir ...
UNUSED_SECONDS = 24 * 3600.0      # after which weights go that nobody wants
RESERVE_SHARE = 0.05              # ... or this share of a small one


@dataclass(frozen=True)
class Held:
    """Weights that lie here whole. ``used_at``: when a shard last wanted them."""

    name: str
    fingerprint: str
    size_bytes: int
    used_at: float = 0.0


@dataclass(frozen=True)
class Plan:
    """What to fetch, in order, and what to remove first."""

    fetch: Tuple[Weights, ...] = ()
    remove: Tuple[Held, ...] = ()


def reserve(total_bytes: int) -> int:
    """Return how much of a filesystem stays free."""
    return min(RESERVE_BYTES, int(total_bytes * RESERVE_SHARE))


def plan(wanted: Sequence[Weights], held: Sequence[Held], *, free_bytes: int, reserve_bytes: int,
         now: float = 0.0, in_use: FrozenSet[str] = frozenset()) -> Plan:
    """Return what to do. Weights nobody wants stay for a day (they make the next start quick), while there is room.

    ``in_use`` are fingerprints of what still runs: those stay whatever happens.
    """
    have = {item.fingerprint for item in held}
    missing: Dict[str, Weights] = {item.fingerprint: item for item in wanted if item.fingerprint not in have}
    needed = sum(item.size_bytes for item in missing.values()) + reserve_bytes - free_bytes
    still_wanted = in_use | {item.fingerprint for item in wanted}
    removable = sorted((item for item in held if item.fingerprint not in still_wanted),
                       key=lambda item: (item.used_at, item.fingerprint))
    removed = []
    for item in removable:
        is_old = now - item.used_at >= UNUSED_SECONDS
        if not is_old and (not missing or needed <= 0):
            break                             # the others are younger
        removed.append(item)
        needed -= item.size_bytes
    return Plan(fetch=tuple(missing.values()), remove=tuple(removed))
