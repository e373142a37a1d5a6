"""Which replica gets a request: the home of its prompt's beginning while that has room, else the least busy.

Counts of two units are never compared: when one candidate's gauges are unknown,
all are compared by this router's own requests in flight.
"""
from __future__ import annotations

from typing import List, Optional, Protocol, Sequence, TypeVar

LOAD_FACTOR = 1.25            # of its share, that a home may have
KV_FULL = 0.9
KV_WEIGHT = 0.15
# 30 bits are one digit of Python's integers; the upper bits of the product depend on all of the factor's.
_MASK = (1 << 30) - 1
_ODD = 0x2545F491


class Candidate(Protocol):
    """What the choice looks at; the router's replicas have these."""

    seed: int                 # 30 bits of the replica's id
    slots: int                # requests it runs at once
    in_flight: int            # this router's own, now
    queue: Optional[float]    # running + waiting as last read; None: unknown
    in_flight_then: int       # this router's own when ``queue`` was read
    kv_used: Optional[float]


C = TypeVar("C", bound=Candidate)


def choose(candidates: Sequence[C], affinity: int, sticky: bool) -> C:
    """Return the replica for a request; ``affinity`` (30 bits) breaks ties and, where ``sticky``, names a home."""
    if len(candidates) == 1:
        return candidates[0]
    counts = requests(candidates)
    # Rendezvous: the highest has the key, and a replica that comes or goes moves few other keys.
    ranks = [((affinity ^ item.seed) * _ODD) & _MASK for item in candidates]
    if sticky:
        home = ranks.index(max(ranks))
        if has_room(candidates, counts, home):
            return candidates[home]
    scores = _scores(candidates, counts)
    least = min(scores)
    best = max(range(len(ranks)), key=lambda index: (scores[index] == least, ranks[index]))
    return candidates[best]


def requests(candidates: Sequence[C]) -> List[float]:
    """Return how many requests each has, all in the same unit."""
    counts: List[float] = []
    for item in candidates:
        if item.queue is None:
            return [other.in_flight for other in candidates]
        # what was read, corrected by what we have sent and got back since
        count = item.queue + item.in_flight - item.in_flight_then
        counts.append(count if count > item.in_flight else item.in_flight)
    return counts


def has_room(candidates: Sequence[C], counts: Sequence[float], home: int) -> bool:
    """Return whether one more leaves ``home`` within its share of all requests, and memory is left."""
    kv_used = candidates[home].kv_used
    if kv_used is not None and kv_used >= KV_FULL:
        return False
    if not counts[home]:
        return True
    if counts[home] >= candidates[home].slots and any(
            count < item.slots for count, item in zip(counts, candidates)):
        return False              # it would wait here, while another has a free slot
    slots = sum([item.slots for item in candidates])
    share = LOAD_FACTOR * (sum(counts) + 1) * candidates[home].slots / slots
    return counts[home] + 1 <= int(share)


def _scores(candidates: Sequence[C], counts: Sequence[float]) -> List[float]:
    scores = [count / item.slots for count, item in zip(counts, candidates)]
    pressures = []
    for item in candidates:
        if item.kv_used is None:
            return scores
        used = min(max(item.kv_used, 0.0), 0.999)
        pressures.append(KV_WEIGHT * used / (1.0 - used))
    return [score + pressure for score, pressure in zip(scores, pressures)]
