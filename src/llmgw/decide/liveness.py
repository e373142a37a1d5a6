"""Which nodes are alive, by when the server last heard them; and when to doubt the server instead.

Times are the server's own monotonic clock. A node's silence never stops anything:
it only ends new placements, then routes, then brings replacements.
"""
from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Dict, List, Mapping, Optional, Tuple

HEARTBEAT_SECONDS = 5.0
SUSPECT_SECONDS = 15.0
UNREACHABLE_SECONDS = 30.0
REPLACE_SECONDS = 60.0
LOST_SECONDS = 600.0
SETTLE_SECONDS = 60.0         # after a start, or after being deaf: nobody is demoted
LATE_SECONDS = 5.0            # a turn of the server's own loop that came this late: it was deaf
MASS_COUNT = 3                # this many, and more than half, silent within one window: the network
MASS_WINDOW_SECONDS = 30.0


class NodeLife(str, enum.Enum):
    """How alive a node is; ``stopped`` said so itself."""

    READY = "ready"
    SUSPECT = "suspect"           # no new placements
    UNREACHABLE = "unreachable"   # out of routing unless a router says that it answers
    LOST = "lost"
    STOPPED = "stopped"


@dataclass(frozen=True)
class Seen:
    """When a node was last heard; ``at`` is None when it was not since this server started."""

    at: Optional[float]
    stopping: bool = False


@dataclass(frozen=True)
class NodeLiveness:
    """``silent_seconds`` counts from the server's start for a node not heard since."""

    life: NodeLife
    silent_seconds: float
    replace: bool = False         # silent for so long that its replicas get replacements
    message: str = ""


@dataclass(frozen=True)
class Verdict:
    """``suspicion`` is why nobody is demoted just now, empty when all is well."""

    nodes: Mapping[str, NodeLiveness] = field(default_factory=dict)
    suspicion: str = ""


def judge(seen: Mapping[str, Seen], now: float, *, started_at: float,
          deaf_at: Optional[float] = None) -> Verdict:
    """Return how alive every node is. ``deaf_at``: when the server's own loop last came late."""
    held, suspicion = _held(seen, now, started_at, deaf_at)
    nodes: Dict[str, NodeLiveness] = {}
    for name, node in seen.items():
        silent = max(0.0, now - (started_at if node.at is None else node.at))
        nodes[name] = _node(node, silent, name in held)
    return Verdict(nodes, suspicion)


def _node(node: Seen, silent: float, held: bool) -> NodeLiveness:
    said = f"no heartbeat for {silent:.0f} s"
    if node.at is None:
        said = f"not heard since the control plane started {silent:.0f} s ago"
    if node.stopping:
        return NodeLiveness(NodeLife.STOPPED, silent, silent >= REPLACE_SECONDS and not held,
                            "its agent was stopped")
    if node.at is not None and silent < SUSPECT_SECONDS:
        return NodeLiveness(NodeLife.READY, silent)
    if held or silent < UNREACHABLE_SECONDS:
        return NodeLiveness(NodeLife.SUSPECT, silent, message=said)
    replace = silent >= REPLACE_SECONDS
    if silent < LOST_SECONDS:
        return NodeLiveness(NodeLife.UNREACHABLE, silent, replace, said)
    return NodeLiveness(NodeLife.LOST, silent, replace, said)


def _held(seen: Mapping[str, Seen], now: float, started_at: float,
          deaf_at: Optional[float]) -> Tuple[List[str], str]:
    """Return the nodes that must not be demoted further, and why."""
    if now - started_at < SETTLE_SECONDS:
        return list(seen), f"the control plane started {now - started_at:.0f} s ago"
    if deaf_at is not None and now - deaf_at < SETTLE_SECONDS:
        return list(seen), f"the control plane itself was late {now - deaf_at:.0f} s ago"
    together = _silent_together(seen, now)
    if together:
        return together, (f"{len(together)} of {len(seen)} nodes fell silent at once: the network is suspected, "
                          "nothing is moved until they return or an admin drains them")
    return [], ""


def _silent_together(seen: Mapping[str, Seen], now: float) -> List[str]:
    """Return the nodes that fell silent within one window, when they are most of those alive at its start."""
    times = sorted((node.at, name) for name, node in seen.items() if node.at is not None and not node.stopping)
    silent = [(at, name) for at, name in times if now - at >= SUSPECT_SECONDS]
    worst: List[str] = []
    first = 0
    for last, (at, _) in enumerate(silent):
        while at - silent[first][0] > MASS_WINDOW_SECONDS:
            first += 1
        count, alive_then = last - first + 1, len(times) - first
        if count >= MASS_COUNT and 2 * count > alive_then and count > len(worst):
            worst = [name for _, name in silent[first:last + 1]]
    return worst
