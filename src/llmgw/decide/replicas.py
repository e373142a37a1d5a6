"""What must change for every model to have the replicas it wants.

Replicas are rows in the store. A turn looks at all rows, at what the nodes last
said, and gives steps; the rows change, and the next turn looks again. Nothing
follows from silence alone: a row is stopped because somebody asked for it, or
because enough healthy others are seen. Rules, in order of weight:

1. No healthy replica is drained while the model needs it.
2. A changed model is rolled: the new replica is ready before an old one drains,
   where there is room; where there is none, one old one makes room.
3. A replica on a node that is silent for long gets a replacement; whichever is
   surplus at the end goes, the longest healthy one stays.
"""
from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from typing import Dict, FrozenSet, List, Mapping, Optional, Sequence, Tuple, Union

from llmgw.decide import gangs
from llmgw.decide.liveness import NodeLife
from llmgw.decide.placement import Board, Need, NodeState, Placed, Unplaced, has_ended
from llmgw.domain.model import ModelSpec, Weights
from llmgw.domain.replica import Replica, ReplicaWish, Shard, ShardObserved, ShardState

DRAIN_GRACE_SECONDS = 300.0   # streams may finish
DRAIN_LEAST_SECONDS = 5.0     # routers have to hear of it, even where nobody counts requests


@dataclass(frozen=True)
class Wanted:
    """A model as it should be. ``weights`` is None while they cannot be had; ``problem`` says why."""

    spec: ModelSpec
    engine_version: str
    weights: Optional[Weights] = None
    problem: str = ""


@dataclass(frozen=True)
class Place:
    """Start a replica there. Whoever acts gives it an id and a key."""

    need: Need
    shards: Tuple[Shard, ...]
    reason: str


@dataclass(frozen=True)
class Drain:
    """Give it no new requests."""

    replica: str
    reason: str


@dataclass(frozen=True)
class Stop:
    """End it."""

    replica: str
    reason: str


@dataclass(frozen=True)
class Remove:
    """Every node says that it is gone: forget it."""

    replica: str


@dataclass(frozen=True)
class Restart:
    """Start every rank of a replica over several nodes again."""

    replica: str
    reason: str


Step = Union[Place, Drain, Stop, Remove, Restart]


@dataclass(frozen=True)
class Traffic:
    """What the routers say: who answers, who has no request left, and for how long drains have lasted."""

    answering: FrozenSet[str] = frozenset()
    idle: FrozenSet[str] = frozenset()
    draining_seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """``unplaced`` has, per model, one sentence per node (or one for the model)."""

    steps: Tuple[Step, ...] = ()
    unplaced: Mapping[str, Tuple[str, ...]] = field(default_factory=dict)


class Health(str, enum.Enum):
    """How a replica stands, as far as anybody can tell."""

    WELL = "well"             # ready, and heard just now (or a router hears it)
    COMING = "coming"         # fetching or starting
    ILL = "ill"               # its node says that it does not serve
    GONE = "gone"             # silent long enough to be replaced
    UNKNOWN = "unknown"       # nobody has said anything (yet)


_FIRST_TO_GO = {Health.GONE: 0, Health.ILL: 1, Health.COMING: 2, Health.UNKNOWN: 3, Health.WELL: 4}


def health(replica: Replica, nodes: Mapping[str, NodeState], answering: FrozenSet[str]) -> Health:
    """Return how ``replica`` stands; the worst of its shards decides."""
    if replica.id in answering and len(replica.shards) < 2:
        return Health.WELL
    found = [_shard_health(replica, shard, nodes.get(shard.node)) for shard in replica.shards]
    for verdict in (Health.GONE, Health.ILL, Health.UNKNOWN, Health.COMING):
        if verdict in found:
            return verdict
    return Health.WELL


_OF_STATE = {
    ShardState.WAITING: Health.COMING, ShardState.FETCHING: Health.COMING, ShardState.STARTING: Health.COMING,
    ShardState.READY: Health.WELL, ShardState.UNREADY: Health.ILL, ShardState.BACKOFF: Health.ILL,
    ShardState.CRASHLOOP: Health.ILL, ShardState.STOPPING: Health.ILL, ShardState.STOPPED: Health.ILL}


def _shard_health(replica: Replica, shard: Shard, node: Optional[NodeState]) -> Health:
    if node is None:
        return Health.GONE            # an admin removed the node
    if node.liveness.replace:
        return Health.GONE
    if node.observed is None or node.liveness.life is not NodeLife.READY:
        # a suspect node is a maybe: nothing is built on it, and nothing is done against it
        return Health.UNKNOWN
    seen = gangs.seen_shard(replica, shard, node)     # of a gang, what is over is no news
    if seen is None:
        return Health.COMING
    return _OF_STATE[seen.state]


def observed_shard(replica: Replica, shard: Shard, node: Optional[NodeState]) -> Optional[ShardObserved]:
    """Return what the node last said of this shard."""
    if node is None or node.observed is None:
        return None
    wanted = f"{replica.id}.{shard.rank}"
    return next((seen for seen in node.observed.shards if seen.id == wanted), None)


def reconcile(wanted: Sequence[Wanted], replicas: Sequence[Replica], nodes: Sequence[NodeState],
              traffic: Traffic) -> Plan:
    """Return the steps of this turn; the same input always gives the same steps."""
    by_name = {node.name: node for node in nodes}
    board = Board(nodes, replicas)
    steps: List[Step] = []
    unplaced: Dict[str, Tuple[str, ...]] = {}
    models = {want.spec.name for want in wanted}
    rows: Dict[str, List[Replica]] = {name: [] for name in models}
    leaving: Dict[str, List[Replica]] = {}
    for replica in sorted(replicas, key=lambda row: (row.created_at, row.id)):
        if replica.wish is not ReplicaWish.RUN:
            leaving.setdefault(replica.model.name, []).append(replica)
        if replica.wish is ReplicaWish.STOP:
            steps += _after_stop(replica, by_name)
        elif replica.wish is ReplicaWish.DRAIN:
            steps += _after_drain(replica, by_name, traffic)
        elif replica.model.name in rows:
            gone = _lost_node(replica, by_name, traffic)
            if gone:
                steps.append(Drain(replica.id, f"node {gone} is silent, and the other ranks cannot serve without it"))
                leaving.setdefault(replica.model.name, []).append(replica)
                continue
            rows[replica.model.name].append(replica)
            why = gangs.lost(replica, by_name)
            if why:
                steps.append(Restart(replica.id, why))
        else:
            steps.append(Drain(replica.id, "its model is no longer wanted"))
    for want in wanted:
        turn = _Turn(want, rows[want.spec.name], leaving.get(want.spec.name, ()), by_name, board, traffic)
        steps += turn.steps()
        if turn.problems:
            unplaced[want.spec.name] = turn.problems
    return Plan(tuple(steps), unplaced)


def _lost_node(replica: Replica, nodes: Mapping[str, NodeState], traffic: Traffic) -> str:
    """Return the node without which the rest of a gang only holds GPUs that a new one needs; empty: none is lost."""
    if len(replica.shards) < 2 or replica.id in traffic.answering:
        return ""
    return next((shard.node for shard in replica.shards
                 if _shard_health(replica, shard, nodes.get(shard.node)) is Health.GONE), "")


def _after_drain(replica: Replica, nodes: Mapping[str, NodeState], traffic: Traffic) -> List[Step]:
    lasted = traffic.draining_seconds.get(replica.id, 0.0)
    if lasted >= DRAIN_GRACE_SECONDS:
        return [Stop(replica.id, f"{replica.reason}; its grace of {DRAIN_GRACE_SECONDS:.0f} s is over")]
    well = health(replica, nodes, traffic.answering) in (Health.WELL, Health.UNKNOWN)
    if not well or (lasted >= DRAIN_LEAST_SECONDS and replica.id in traffic.idle):
        return [Stop(replica.id, replica.reason)]
    return []


def _after_stop(replica: Replica, nodes: Mapping[str, NodeState]) -> List[Step]:
    for shard in replica.shards:
        node = nodes.get(shard.node)
        if node is None or node.liveness.life is NodeLife.LOST:
            continue                  # it will be told when it comes back: what is not wanted is ended there
        if not has_ended(replica, shard, node):
            return []
    return [Remove(replica.id)]


def is_current(replica: Replica, want: Wanted) -> bool:
    """Whether a replica is what the model wants now; weights that cannot be had change nothing."""
    if replica.engine_version != want.engine_version:
        return False
    if want.weights is not None and replica.weights.fingerprint != want.weights.fingerprint:
        return False
    return _served(replica.model) == _served(want.spec)


def _served(spec: ModelSpec) -> ModelSpec:
    """Return the part of a model that its processes depend on."""
    return replace(spec, replicas=1, aliases=(), labels={}, only_nodes=(), weights="")


class _Turn:
    """One model's turn. ``rows`` are those that should run, ``leaving`` those on their way out."""

    def __init__(self, want: Wanted, rows: Sequence[Replica], leaving: Sequence[Replica],
                 nodes: Mapping[str, NodeState], board: Board, traffic: Traffic) -> None:
        self._want, self._nodes, self._board, self._leaving = want, nodes, board, leaving
        self._health = {row.id: health(row, nodes, traffic.answering) for row in rows}
        self._new = [row for row in rows if is_current(row, want) and self._may_stay(row)]
        self._old = [row for row in rows if row not in self._new]
        self.problems: Tuple[str, ...] = ()

    def _may_stay(self, row: Replica) -> bool:
        return (self._board.may_stay(row, self._want.spec) and not self._is_drained(row)
                and not self._outdated(row))

    def _outdated(self, row: Replica) -> str:
        """Return why a node says that what runs of it is not what it would start now."""
        seen = [observed_shard(row, shard, self._nodes.get(shard.node)) for shard in row.shards]
        return next((one.outdated for one in seen if one is not None and one.outdated), "")

    def _is_drained(self, row: Replica) -> bool:
        return any(self._nodes[shard.node].draining for shard in row.shards if shard.node in self._nodes)

    def _is(self, rows: Sequence[Replica], *kinds: Health) -> List[Replica]:
        return [row for row in rows if self._health[row.id] in kinds]

    def steps(self) -> List[Step]:
        count = self._want.spec.replicas
        if count == 0:
            return [Drain(row.id, "its model wants no replicas") for row in self._new + self._old]
        return self._fill(count) + self._drain_old(count) + self._drain_surplus(count)

    def _fill(self, count: int) -> List[Step]:
        """Place what is missing; beside old ones, one more at a time, when the last new one has proven itself."""
        want = self._want
        new = len(self._new) - len(self._is(self._new, Health.GONE))
        missing = count - new - len(self._is(self._old, Health.WELL, Health.COMING, Health.UNKNOWN))
        if missing <= 0 and self._old and new < count and new == len(self._is(self._new, Health.WELL)):
            missing = 1
        if missing <= 0:
            return []
        if want.weights is None:
            self.problems = (want.problem or "its weights are not there yet",)
            return []
        need = Need(want.spec, want.engine_version, want.weights)
        steps: List[Step] = []
        for _ in range(missing):
            found = self._board.place(need)
            if isinstance(found, Unplaced):
                self.problems = found.reasons
                return steps or self._make_room(need)
            steps.append(self._take(need, found))
        return steps

    def _drain_old(self, count: int) -> List[Step]:
        """Return the old ones that may go: those that do not serve, and those that are not needed."""
        serving = len(self._is(self._new + self._old, Health.WELL))
        started = len(self._new) > len(self._is(self._new, Health.GONE))
        steps: List[Step] = []
        for row in sorted(self._old, key=lambda row: _FIRST_TO_GO[self._health[row.id]]):
            kind = self._health[row.id]
            if kind in (Health.ILL, Health.COMING):
                may_go = started              # it serves nobody, and something newer is there
            else:
                may_go = serving - (kind == Health.WELL) >= count
            if may_go:
                serving -= kind == Health.WELL
                steps.append(Drain(row.id, self._why_old(row)))
        return steps

    def _drain_surplus(self, count: int) -> List[Step]:
        """Return those beyond ``count``, worst and youngest first; silence alone makes nobody surplus."""
        well = len(self._is(self._new, Health.WELL))
        known = len(self._is(self._new, Health.WELL, Health.COMING, Health.ILL))
        steps: List[Step] = []
        for row in sorted(self._new, key=lambda row: (_FIRST_TO_GO[self._health[row.id]], -row.created_at, row.id)):
            kind = self._health[row.id]
            if len(self._new) - len(steps) <= count:
                break
            if kind in (Health.GONE, Health.UNKNOWN):
                may_go = well >= count
            else:
                may_go = known > count and (kind != Health.WELL or well > count)
            if may_go:
                known -= kind not in (Health.GONE, Health.UNKNOWN)
                well -= kind == Health.WELL
                steps.append(Drain(row.id, f"surplus: {count} of {len(self._new)} are wanted"))
        return steps

    def _take(self, need: Need, found: Placed) -> Place:
        self._board.take(need.spec, need.weights, found.shards)
        reason = "the model wants it"
        if self._old:
            reason = f"replaces {self._old[0].id}: {self._why_old(self._old[0])}"
        elif self._is(self._new, Health.GONE):
            lost = self._is(self._new, Health.GONE)[0]
            reason = f"replaces {lost.id}, whose node {lost.shards[0].node} is silent"
        return Place(need, found.shards, reason)

    def _make_room(self, need: Need) -> List[Step]:
        """Return the drain of one old replica, if that is what a new one waits for."""
        if self._leaving:
            return []                         # room is on its way
        usual = (Health.GONE, Health.ILL, Health.COMING, Health.WELL)
        for row in sorted(self._is(self._old, *usual), key=lambda row: usual.index(self._health[row.id])):
            if self._is_drained(row):
                continue                      # its room is not for us
            self._board.release(row)
            fits = isinstance(self._board.place(need), Placed)
            self._board.take(row.model, row.weights, row.shards, row.id)
            if fits:
                return [Drain(row.id, f"{self._why_old(row)}; there is no room for both")]
        return []

    def _why_old(self, row: Replica) -> str:
        want = self._want
        if self._is_drained(row):
            return f"node {row.shards[0].node} is being drained"
        if row.engine_version != want.engine_version:
            return f"{want.spec.engine} {want.engine_version} is wanted instead of {row.engine_version}"
        if want.weights is not None and row.weights.fingerprint != want.weights.fingerprint:
            return "its weights have changed"
        if _served(row.model) != _served(want.spec):
            return "its model was edited"
        if self._outdated(row):
            return self._outdated(row)
        return "it may no longer run on its node"


def stops_too_many(wanted: Sequence[Wanted], replicas: Sequence[Replica]) -> Tuple[str, ...]:
    """Return a sentence for every model of which more than half of the replicas would stop at once."""
    counts = {want.spec.name: want.spec.replicas for want in wanted}
    running: Dict[str, int] = {}
    for replica in replicas:
        if replica.wish is ReplicaWish.RUN:
            running[replica.model.name] = running.get(replica.model.name, 0) + 1
    said = []
    for name, have in sorted(running.items()):
        stops = have - min(have, counts.get(name, 0))
        if 2 * stops > have:
            said.append(f"model {name}: {stops} of {have} replicas would stop"
                        + ("" if name in counts else ", it is no longer there"))
    return tuple(said)
