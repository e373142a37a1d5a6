"""What the nodes last said, and what each is to be told. In memory: it comes back with the heartbeats."""
from __future__ import annotations

import logging
import secrets
import threading
from dataclasses import dataclass, replace
from typing import Dict, List, Mapping, Tuple

from llmgw.decide.liveness import HEARTBEAT_SECONDS, SUSPECT_SECONDS, Seen
from llmgw.domain.engine import EnginePhase
from llmgw.domain.errors import Conflict, LlmgwError, NotFound, TryAgain
from llmgw.domain.heartbeat import HeartbeatAnswer, LogTail, NodeDesired, NodeObserved, NodeRequest
from llmgw.domain.replica import ShardState
from llmgw.server import records
from llmgw.server.store import Compare, Delete, Put, Store
from llmgw.system.clock import Clock
from llmgw.system.logs import Said

log = logging.getLogger(__name__)

BUSY_SECONDS = 1.0            # between heartbeats of a node where something is on its way
SMALL_FLEET = 50              # up to so many nodes, everything may be told sooner
SMALL_FLEET_SECONDS = 2.0
MOST_PER_SECOND = 200.0
REQUEST_SECONDS = 60.0        # how long a request to a node is repeated
_MOVING_SHARDS = frozenset({ShardState.WAITING, ShardState.FETCHING, ShardState.STARTING, ShardState.STOPPING})
_RESTING = frozenset({EnginePhase.INSTALLED, EnginePhase.SKIPPED, EnginePhase.MISSING, EnginePhase.FAILED})


@dataclass(frozen=True)
class Heard:
    """The last heartbeat of a node; ``at`` is the server's monotonic clock."""

    observed: NodeObserved
    at: float
    skew_seconds: float


class Nodes:
    """Called by every heartbeat's thread, and by the loop."""

    def __init__(self, store: Store, clock: Clock, poke: threading.Event) -> None:
        self._store, self._clock, self.poke = store, clock, poke   # poke: the loop has something to look at
        self._lock = threading.Lock()
        self._heard: Dict[str, Heard] = {}
        self._known = {entry.value["name"] for entry in store.range(records.NODES)}
        self._desired: Dict[str, Tuple[int, NodeDesired]] = {}
        self._generations: Dict[str, int] = {}         # of forgotten nodes too: one that returns refuses a lower one
        self._requests: Dict[str, List[Tuple[float, NodeRequest]]] = {}
        self._said = Said()
        self._tails: Dict[str, Tuple[threading.Event, List[LogTail]]] = {}
        self.changes = 0              # grows when a node said something new, not with every heartbeat
        self.heartbeats = 0
        self.highest_epoch = 0        # that any node has acted on, and must be overtaken when it is not ours
        self.silent_answers = False   # after a restore: hear everybody, tell nothing

    def hear(self, observed: NodeObserved) -> None:
        """Take a heartbeat. A second agent that calls itself the same is refused."""
        name, now = observed.identity.name, self._clock.monotonic()
        skew = observed.clock - self._clock.wall() if observed.clock else 0.0
        with self._lock:
            before = self._heard.get(name)
            if before is not None:
                _refuse_twin(before, observed, now)
            self._heard[name] = Heard(observed, now, skew)
            self.heartbeats += 1
            self.highest_epoch = max(self.highest_epoch, observed.epoch)
            is_news = before is None or _said(before.observed) != _said(observed)
            self.changes += is_news
        if is_news:
            self.poke.set()
        if name not in self._known:
            self._remember(observed)

    def _remember(self, observed: NodeObserved) -> None:
        name = observed.identity.name
        row = {"name": name, "first_seen": self._clock.wall(), "draining": False,
               "address": observed.identity.address}
        try:
            self._store.txn([Compare(records.NODES + name, 0)], [Put(records.NODES + name, row)])
        except LlmgwError as error:
            if self._said.is_new(name, error.message):
                log.warning("node=%s is not remembered yet, each heartbeat tries again: %s", name, error.message)
            return
        self._said.is_over(name)
        self._known.add(name)

    def answer(self, observed: NodeObserved, cluster: str, epoch: int) -> HeartbeatAnswer:
        """Return what this node is to be told now."""
        name = observed.identity.name
        with self._lock:
            generation, desired = self._desired.get(name, (self._generations.get(name, 0), None))
            if observed.epoch == epoch and observed.generation > generation:       # of a control plane before this one
                self.highest_epoch = max(self.highest_epoch, epoch + 1)
            requests = self._due(name)
            count = len(self._heard)
        if self.silent_answers:
            generation, desired = observed.generation, None
        is_told = (observed.epoch, observed.generation) == (epoch, generation)
        return HeartbeatAnswer(cluster, epoch, generation, call_again_seconds(observed, count, desired is None),
                               None if is_told else desired, requests)

    def _due(self, name: str) -> Tuple[NodeRequest, ...]:
        waiting = self._requests.get(name)
        if not waiting:
            return ()
        now = self._clock.monotonic()
        waiting = [(until, request) for until, request in waiting if until > now]
        self._requests[name] = waiting
        return tuple(request for _, request in waiting)

    def heard(self) -> Mapping[str, Heard]:
        """Return the last heartbeat of every node."""
        with self._lock:
            return dict(self._heard)

    def seen(self) -> Dict[str, Seen]:
        """Return when each known node was last heard, for liveness."""
        with self._lock:
            seen = {name: Seen(None) for name in self._known}
            seen.update({name: Seen(heard.at, heard.observed.stopping) for name, heard in self._heard.items()})
            return seen

    def publish(self, desired: Mapping[str, NodeDesired]) -> None:
        """Set what each node is to have; a change raises the node's generation."""
        with self._lock:
            for name, wanted in desired.items():
                if name not in self._desired or self._desired[name][1] != wanted:
                    self._generations[name] = self._generations.get(name, 0) + 1
                    self._desired[name] = (self._generations[name], wanted)
            for name in set(self._desired) - set(desired):
                del self._desired[name]

    def acknowledged(self, name: str, epoch: int) -> bool:
        """Whether the node said that it acts on the newest desired state."""
        with self._lock:
            heard, wanted = self._heard.get(name), self._desired.get(name)
        return (heard is not None and wanted is not None
                and (heard.observed.epoch, heard.observed.generation) == (epoch, wanted[0]))

    def draining(self) -> Dict[str, bool]:
        """Return, for every remembered node, whether it is being drained."""
        return {entry.value["name"]: bool(entry.value["draining"]) for entry in self._store.range(records.NODES)}

    def drain(self, name: str, draining: bool) -> None:
        """Start or end draining a node."""
        entry = self._store.get(records.NODES + name)
        if entry is None:
            raise NotFound(f"no such node: {name:.100}", hint="llmgw.pyz ctl nodes shows them")
        row = {**entry.value, "draining": draining}
        if self._store.txn([Compare(entry.key, entry.revision)], [Put(entry.key, row)]) is None:
            raise TryAgain(f"node {name} was changed by somebody else just now")
        self.poke.set()

    def forget(self, name: str, although_alive: bool = False) -> None:
        """Forget a node that is gone for good; one that still speaks is refused, unless it may not speak any more."""
        with self._lock:
            heard = self._heard.get(name)
            if not although_alive and heard is not None and not heard.observed.stopping and \
                    self._clock.monotonic() - heard.at < SUSPECT_SECONDS:
                raise Conflict(f"node {name} is alive", hint="stop its agent first")
            if self._store.get(records.NODES + name) is None:
                raise NotFound(f"no such node: {name:.100}", hint="llmgw.pyz ctl nodes shows them")
        self._store.txn((), [Delete(records.NODES + name)])
        with self._lock:
            self._known.discard(name)
            self._heard.pop(name, None)
            self._desired.pop(name, None)
        self.poke.set()

    # Questions that ride in the answers.

    def ask_log_tail(self, node: str, shard: str, size: int, wait_seconds: float) -> LogTail:
        """Return the end of a shard's log, once the node sends it; TryAgain when it does not in time."""
        request = NodeRequest(secrets.token_hex(8), "log-tail", {
            "shard": shard, "replica": shard.rpartition(".")[0], "bytes": str(size)})
        arrived = threading.Event()
        box: List[LogTail] = []
        with self._lock:
            self._tails[request.id] = (arrived, box)
            self._requests.setdefault(node, []).append((self._clock.monotonic() + REQUEST_SECONDS, request))
        try:
            if not arrived.wait(wait_seconds):
                raise TryAgain(f"node {node} did not send the log within {wait_seconds:g} seconds")
            return box[0]
        finally:
            with self._lock:
                self._tails.pop(request.id, None)
                self._requests[node] = [(until, other) for until, other in self._requests.get(node, [])
                                        if other.id != request.id]

    def take_log_tail(self, tail: LogTail) -> None:
        """Hand a log's end to whoever waits for it; nobody may be waiting any more."""
        with self._lock:
            waiting = self._tails.get(tail.request)
        if waiting is not None:
            waiting[1].append(tail)
            waiting[0].set()


def _said(observed: NodeObserved) -> NodeObserved:
    """Return what counts as news: not the clock, nor how much memory is free just now."""
    facts = replace(observed.facts, memory_available_bytes=0, disk_free_bytes=0, gpus=tuple(
        replace(gpu, memory_used_bytes=None) for gpu in observed.facts.gpus))
    return replace(observed, clock=0.0, facts=facts)


def _refuse_twin(before: Heard, observed: NodeObserved, now: float) -> None:
    old, new = before.observed.identity, observed.identity
    if old.instance and new.instance:
        is_other = (old.boot_id, old.instance) != (new.boot_id, new.instance)
    else:                                 # one of them is of an older version
        is_other = old.boot_id != new.boot_id or bool(
            old.gate_port and new.gate_port and (old.gate_port, old.address) != (new.gate_port, new.address))
    if is_other and not before.observed.stopping and now - before.at < SUSPECT_SECONDS:
        raise Conflict(f"another agent calls itself {new.name} and was heard {now - before.at:.0f} s ago "
                       f"(at {old.address}:{old.gate_port})",
                       hint="give this one another name with --node NAME; after a reboot it is let in by itself")


def call_again_seconds(observed: NodeObserved, count: int, is_new: bool) -> float:
    """Return when the node should call again: sooner while something is on its way."""
    if count > SMALL_FLEET:
        return max(HEARTBEAT_SECONDS, count / MOST_PER_SECOND)
    is_moving = (is_new or not observed.probed or any(shard.state in _MOVING_SHARDS for shard in observed.shards)
                 or any(engine.phase not in _RESTING for engine in observed.engines))
    return BUSY_SECONDS if is_moving else SMALL_FLEET_SECONDS
