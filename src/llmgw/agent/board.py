"""What this node wants and sees, shared between the agent's loops: whole values, swapped under a lock."""
from __future__ import annotations

import dataclasses
import threading
from dataclasses import dataclass
from typing import Callable, Dict, FrozenSet, List, Mapping, Optional, Tuple

from llmgw.domain.engine import EngineObserved
from llmgw.domain.heartbeat import NodeDesired, NodeObserved
from llmgw.domain.model import WeightsObserved
from llmgw.domain.node import NodeFacts, NodeIdentity
from llmgw.domain.replica import ShardObserved, ShardState

Key = Tuple[str, str]             # (engine, version), or (weights, fingerprint)
Door = Tuple[str, int]            # (shard, incarnation)
UNKNOWN = "?"                     # a program that an agent started which wrote none down


@dataclass(frozen=True)
class Desired:
    """What is acted on, and which version of it this is."""

    epoch: int
    generation: int
    node: NodeDesired


@dataclass(frozen=True)
class Usable:
    """An engine that was seen to run here, or that the operator named."""

    program: str
    library_dirs: Tuple[str, ...] = ()
    former: Tuple[str, ...] = ()      # folders of it that it took the place of, of other packages


class Board:
    """One writer per part. ``changed`` pokes the heartbeat, ``woken`` the loops that act on others' parts."""

    def __init__(self, identity: NodeIdentity) -> None:
        self.changed = threading.Event()
        self._lock = threading.Lock()
        self._identity = identity
        self._facts = NodeFacts()
        self._probed = (False, False)         # the machine, its engines
        self._desired: Optional[Desired] = None
        self._engines: Dict[Key, EngineObserved] = {}
        self._usable: Dict[Key, Usable] = {}
        self._weights: Dict[Key, WeightsObserved] = {}
        self._shards: Dict[str, ShardObserved] = {}
        self._programs: Dict[str, str] = {}   # of the engine that a shard runs, or is about to; empty: none
        self._open: FrozenSet[Door] = frozenset()
        self._notes: Dict[str, str] = {}
        self._listeners: List[Callable[[], None]] = []

    def listen(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` after every change; it must not block."""
        self._listeners.append(wake)

    @property
    def desired(self) -> Optional[Desired]:
        return self._desired

    def put_desired(self, desired: Desired) -> None:
        self._desired = desired
        self._wake()

    @property
    def facts(self) -> NodeFacts:
        return self._facts

    def put_facts(self, facts: NodeFacts) -> None:
        with self._lock:
            told = self._facts.gpus != facts.gpus or self._facts.warnings != facts.warnings
            self._facts, self._probed = facts, (True, self._probed[1])
        if told:
            self.changed.set()

    def put_note(self, name: str, sentence: str) -> None:
        """Set or clear one standing warning of the agent itself."""
        with self._lock:
            before = dict(self._notes)
            self._notes.pop(name, None)
            if sentence:
                self._notes[name] = sentence
            same = before == self._notes
        if not same:
            self.changed.set()

    def put_gate_port(self, port: int) -> None:
        with self._lock:
            same = self._identity.gate_port == port
            self._identity = dataclasses.replace(self._identity, gate_port=port)
        if not same:
            self.changed.set()

    def put_open(self, doors: FrozenSet[Door]) -> None:
        """Record which shards the gate lets requests through to, as it said itself."""
        with self._lock:
            same, self._open = self._open == doors, doors
        if not same:
            self.changed.set()

    def put_engine(self, seen: EngineObserved, usable: Optional[Usable]) -> None:
        """Record an engine version; ``usable`` None: shards cannot be started with it."""
        key = (seen.name, seen.version)
        with self._lock:
            before = self._engines.get(key)
            self._engines[key] = seen
            self._usable.pop(key, None)
            if usable is not None:
                self._usable[key] = usable
        if before is None or (before.phase, before.message, before.usable) != (
                seen.phase, seen.message, seen.usable):
            self._wake()

    def put_engines_probed(self) -> None:
        with self._lock:
            told, self._probed = not self._probed[1], (self._probed[0], True)
        if told:
            self.changed.set()

    def drop_engine(self, key: Key) -> None:
        with self._lock:
            self._engines.pop(key, None)
            self._usable.pop(key, None)
        self._wake()

    def engine(self, key: Key) -> Tuple[Optional[EngineObserved], Optional[Usable]]:
        with self._lock:
            return self._engines.get(key), self._usable.get(key)

    def take_engine(self, key: Key, shard_id: str) -> Optional[Usable]:
        """Return the engine for a shard that is about to start it: from now on its files stay."""
        with self._lock:
            usable = self._usable.get(key)
            if usable is not None:
                self._programs[shard_id] = usable.program
            return usable

    def put_program(self, key: Key, shard_id: str, program: str) -> str:
        """Record which program a shard runs (empty: none); return, in words, what took its place meanwhile."""
        with self._lock:
            self._programs[shard_id] = program
            usable = self._usable.get(key)
        is_former = usable is not None and any(program.startswith(folder + "/") for folder in usable.former)
        return f"{key[0]} {key[1]} was installed again, of other packages" if is_former else ""

    def programs(self) -> Mapping[str, str]:
        """Return what the shards run; one that was not looked at yet is missing."""
        with self._lock:
            return dict(self._programs)

    def put_weights(self, seen: WeightsObserved) -> None:
        key = (seen.name, seen.fingerprint)
        with self._lock:
            before = self._weights.get(key)
            self._weights[key] = seen
        if before is None or (before.phase, before.message) != (seen.phase, seen.message):
            self._wake()

    def drop_weights(self, key: Key) -> None:
        with self._lock:
            self._weights.pop(key, None)
        self.changed.set()

    def weights(self, key: Key) -> Optional[WeightsObserved]:
        with self._lock:
            return self._weights.get(key)

    def put_shard(self, seen: ShardObserved) -> None:
        with self._lock:
            before = self._shards.get(seen.id)
            self._shards[seen.id] = seen
        if before != seen:
            self._wake()

    def drop_shard(self, shard_id: str) -> None:
        with self._lock:
            self._shards.pop(shard_id, None)
            self._programs.pop(shard_id, None)
        self._wake()

    def shards(self) -> Tuple[ShardObserved, ...]:
        with self._lock:
            return tuple(self._shards.values())

    def observed(self, clock: float, stopping: bool = False) -> NodeObserved:
        """Return everything that is reported, at one instant."""
        with self._lock:
            desired = self._desired
            facts = dataclasses.replace(
                self._facts, warnings=self._facts.warnings + tuple(self._notes[name] for name in sorted(self._notes)))
            return NodeObserved(
                identity=self._identity, facts=facts, probed=all(self._probed),
                epoch=desired.epoch if desired else 0, generation=desired.generation if desired else 0,
                engines=tuple(self._engines[key] for key in sorted(self._engines)),
                weights=tuple(self._weights[key] for key in sorted(self._weights)),
                shards=tuple(self._reachable(self._shards[key]) for key in sorted(self._shards)),
                clock=clock, stopping=stopping)

    def _reachable(self, shard: ShardObserved) -> ShardObserved:
        """A ready shard is reported so once the gate knows it: a router that comes sooner would be refused."""
        is_served = shard.port is not None        # not the part of a replica that rank 0 serves on another node
        if shard.state is not ShardState.READY or not is_served or (shard.id, shard.incarnation) in self._open:
            return shard
        return dataclasses.replace(shard, state=ShardState.STARTING, reason="GateNotOpen",
                                   message="the engine is ready, the gate does not let requests through yet")

    def _wake(self) -> None:
        self.changed.set()
        for wake in self._listeners:
            wake()
