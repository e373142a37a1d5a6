"""Events out of what changed between two turns: nothing is told twice."""
from __future__ import annotations

import re
from typing import TYPE_CHECKING, Dict, Set, Tuple

from llmgw.domain.engine import EngineObserved, EnginePhase
from llmgw.domain.replica import ShardState
from llmgw.server.events import Events

if TYPE_CHECKING:
    from llmgw.server.loop import Snapshot

_DIGITS = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_TOLD_PHASES = frozenset({EnginePhase.INSTALLED, EnginePhase.SKIPPED, EnginePhase.MISSING, EnginePhase.FAILED})
# Steps on the way, told of engines of which an install takes minutes.
_STEPS = frozenset({EnginePhase.RESOLVING, EnginePhase.DOWNLOADING, EnginePhase.UNPACKING,
                    EnginePhase.INSTALLING_PACKAGES, EnginePhase.CHECKING})
_STUCK = frozenset({"EngineFailed", "EngineMissing"})
_TOLD_STATES = frozenset({ShardState.READY, ShardState.UNREADY, ShardState.BACKOFF, ShardState.CRASHLOOP,
                          ShardState.STOPPED})


class Transitions:
    """Remembers, per subject, what was last told."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._told: Dict[str, Tuple[str, str]] = {}

    def note(self, snapshot: "Snapshot") -> None:
        """Tell what is new in ``snapshot``."""
        now: Dict[str, Tuple[str, str, str]] = {}     # key: (subject, reason, message)
        same: Set[str] = set()                        # keys of what only tries again
        for name, node in snapshot.nodes.items():
            life = node.liveness.life.value
            if node.observed is not None or name in self._told:
                now[f"node/{name}"] = (f"node/{name}", life.capitalize(), node.liveness.message)
            if node.observed is not None:
                for engine in node.observed.engines:
                    key = f"node/{name}/{engine.name}"
                    is_step = engine.source == "packages" and engine.phase in _STEPS
                    if self._told.get(key, ("", ""))[0] in _STUCK and engine.phase not in _TOLD_PHASES:
                        same.add(key)
                    elif is_step or engine.phase in _TOLD_PHASES:
                        now[key] = (f"node/{name}", _reason(engine), _engine(engine))
                for shard in node.observed.shards:
                    if shard.state in _TOLD_STATES:
                        now[f"shard/{shard.id}"] = (f"replica/{shard.id.rpartition('.')[0]}",
                                                    shard.state.value.capitalize(),
                                                    f"on {name}: {shard.message or shard.state.value}")
        for model in snapshot.models:
            served = any(not row.draining for row in model.replicas)
            reasons = snapshot.unplaced.get(model.name, ())
            if served and not reasons:
                now[f"model/{model.name}"] = (f"model/{model.name}", "Served", "at least one replica is ready")
            elif reasons:
                now[f"model/{model.name}"] = (f"model/{model.name}", "Unplaced", "; ".join(reasons)[:1000])
        self._tell(now, same)
        if "network is suspected" in snapshot.suspicion:
            self._tell_once("server", "PartitionSuspected", snapshot.suspicion)
        else:
            self._told.pop("server", None)

    def _tell(self, now: Dict[str, Tuple[str, str, str]], same: Set[str]) -> None:
        for key, (subject, reason, message) in now.items():
            self._tell_once(key, reason, message, subject)
        for key in set(self._told) - set(now) - same:
            if not key.startswith("server"):
                del self._told[key]

    def _tell_once(self, key: str, reason: str, message: str, subject: str = "") -> None:
        mark = (reason, _DIGITS.sub("#", message))    # "1.2 GiB are free" is no news when it is 1.3
        if self._told.get(key) != mark:
            self._told[key] = mark
            self._events.add(subject or key, reason, message or reason.lower())


def _reason(engine: EngineObserved) -> str:
    return "Engine" + engine.phase.value.title().replace(" ", "")


def _engine(engine: EngineObserved) -> str:
    return f"{engine.name} {engine.version}: {engine.message or engine.phase.value}"
