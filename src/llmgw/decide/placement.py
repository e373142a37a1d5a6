"""Choose a node, and its GPUs, for one replica: filter, fit, score, and say why not.

A Board is what is free on every node; it changes as a plan grows on it. Replicas
that are there are never moved: what is placed stays placed.
"""
from __future__ import annotations

import bisect
import ipaddress
from dataclasses import dataclass, replace
from typing import Dict, List, Mapping, Optional, Sequence, Set, Tuple, Union

from llmgw.decide import fit
from llmgw.decide.liveness import NodeLife, NodeLiveness
from llmgw.decide.weights import reserve
from llmgw.domain.engine import CPU, LLAMA_CPP, EngineObserved, EnginePhase
from llmgw.domain.heartbeat import NodeObserved
from llmgw.domain.model import ModelSpec, Weights, WeightsPhase
from llmgw.domain.node import Gpu
from llmgw.domain.replica import Replica, ReplicaWish, Shard, ShardState


@dataclass(frozen=True)
class NodeState:
    """Everything that is known of one node. ``observed`` is None until its first heartbeat."""

    name: str
    liveness: NodeLiveness
    observed: Optional[NodeObserved] = None
    draining: bool = False
    acknowledged: bool = False    # it acts on the newest desired state


@dataclass(frozen=True)
class Need:
    """What is to be placed."""

    spec: ModelSpec
    engine_version: str
    weights: Weights


@dataclass(frozen=True)
class Placed:
    """Where it goes."""

    shards: Tuple[Shard, ...]


@dataclass(frozen=True)
class Unplaced:
    """Why it goes nowhere: one sentence per node, in the nodes' own words, by name."""

    reasons: Tuple[str, ...]


def has_ended(replica: Replica, shard: Shard, node: NodeState) -> bool:
    """Whether a node that knows it is to end this shard says that nothing of it is left."""
    if node.observed is None or not node.acknowledged:
        return False
    name = f"{replica.id}.{shard.rank}"
    return all(seen.state is ShardState.STOPPED for seen in node.observed.shards if seen.id == name)


class _Room:
    """What is free on one node."""

    def __init__(self, node: NodeState) -> None:
        self.node = node
        observed = node.observed
        facts = observed.facts if observed is not None else None
        self.memory = facts.memory_available_bytes if facts is not None else 0
        self.disk = facts.disk_free_bytes if facts is not None else 0
        self.disk_kept = reserve(facts.disk_total_bytes) if facts is not None else 0     # as the node does itself
        self.gpus: List[Gpu] = list(facts.gpus) if facts is not None else []
        self.taken: Set[str] = set()
        self.models: Dict[str, int] = {}
        self.whole: Set[str] = set()
        self.states: Dict[str, ShardState] = {}
        self.engines: Dict[str, List[EngineObserved]] = {}
        if observed is not None:
            self.whole = {weights.fingerprint for weights in observed.weights
                          if weights.phase is WeightsPhase.WHOLE}
            self.states = {shard.id: shard.state for shard in observed.shards}
            for engine in observed.engines:
                self.engines.setdefault(engine.name, []).append(engine)
        self.promised: Set[str] = set()       # weights that are on their way, counted on the disk

    def free_gpus(self) -> List[Gpu]:
        return [gpu for gpu in self.gpus if gpu.uuid not in self.taken]

    def change(self, spec: ModelSpec, weights: Weights, shard: Shard, replica: str, sign: int) -> None:
        """Count a replica's part here as used (1) or as free again (-1)."""
        self.models[spec.name] = self.models.get(spec.name, 0) + sign
        uuids = {slot.uuid for slot in shard.gpus}
        if sign > 0:
            self.taken |= uuids
        elif uuids:
            self.taken -= uuids               # and what it held of them is free then
            self.gpus = [replace(gpu, memory_used_bytes=0) if gpu.uuid in uuids else gpu for gpu in self.gpus]
        if not shard.gpus:
            state = self.states.get(f"{replica}.{shard.rank}") if replica else None
            self.memory -= sign * _claim(spec, weights, state, sign)
        if sign > 0 and weights.fingerprint not in self.whole and weights.fingerprint not in self.promised:
            self.promised.add(weights.fingerprint)
            self.disk -= weights.size_bytes


class Board:
    """What is free, and who may still come; built once per turn.

    Rooms are kept in order of what is free, so that the tightest is found first:
    1,000 nodes and 500 replicas have to be planned within a second.
    """

    def __init__(self, nodes: Sequence[NodeState], replicas: Sequence[Replica]) -> None:
        self._rooms = {node.name: _Room(node) for node in sorted(nodes, key=lambda node: node.name)}
        self._able_rooms: Dict[Tuple[str, str], Dict[str, _Room]] = {}
        self._memory: List[Tuple[int, str]] = []
        self._gpus: List[Tuple[int, str]] = []
        self._holders: Set[str] = set()       # fingerprints that some node holds
        for replica in replicas:
            held = tuple(shard for shard in replica.shards if not self._has_ended(replica, shard))
            self._count(replica.model, replica.weights, held, replica.id, 1)
        for room in self._rooms.values():
            self._holders |= room.whole
            self._enter(room)

    def take(self, spec: ModelSpec, weights: Weights, shards: Sequence[Shard], replica: str = "") -> None:
        """Count a replica's part on each of its nodes as used."""
        self._leave(shards)
        self._count(spec, weights, shards, replica, 1)
        self._return(shards)

    def release(self, replica: Replica) -> None:
        """Count a replica as gone, to ask what would fit then."""
        self._leave(replica.shards)
        self._count(replica.model, replica.weights, replica.shards, replica.id, -1)
        self._return(replica.shards)

    def _has_ended(self, replica: Replica, shard: Shard) -> bool:
        """Of a gang that is stopped: its row stays as long as one node is silent, the room on the others is free."""
        room = self._rooms.get(shard.node)
        return replica.wish is ReplicaWish.STOP and room is not None and has_ended(replica, shard, room.node)

    def _count(self, spec: ModelSpec, weights: Weights, shards: Sequence[Shard], replica: str,
               sign: int) -> None:
        for shard in shards:
            room = self._rooms.get(shard.node)
            if room is not None:
                room.change(spec, weights, shard, replica, sign)

    def _enter(self, room: _Room) -> None:
        bisect.insort(self._memory, (room.memory, room.node.name))
        if room.gpus:
            bisect.insort(self._gpus, (len(room.free_gpus()), room.node.name))

    def _leave(self, shards: Sequence[Shard]) -> None:
        for name in {shard.node for shard in shards if shard.node in self._rooms}:
            room = self._rooms[name]
            del self._memory[bisect.bisect_left(self._memory, (room.memory, name))]
            if room.gpus:
                del self._gpus[bisect.bisect_left(self._gpus, (len(room.free_gpus()), name))]

    def _return(self, shards: Sequence[Shard]) -> None:
        for name in {shard.node for shard in shards if shard.node in self._rooms}:
            self._enter(self._rooms[name])

    def place(self, need: Need) -> Union[Placed, Unplaced]:
        """Return the best place, or every node with its reason. Take it with ``take``."""
        memory = fit.memory_bytes(need.spec, need.weights)
        if need.spec.nodes > 1:
            return self._place_gang(need, memory)
        shard: Optional[Shard] = None
        if need.spec.gpus != 0:
            first = bisect.bisect_left(self._gpus, (fit.gpu_count(need.spec), ""))
            shard = self._best(need, self._gpus[first:], memory, True)
        if shard is None and fit.may_use_cpu(need.spec):
            first = bisect.bisect_left(self._memory, (memory, ""))
            shard = self._best(need, self._memory[first:], memory, False)
        if shard is not None:
            return Placed((shard,))
        return Unplaced(tuple(f"{name}: {self._why_not(room, need, memory)}"
                              for name, room in self._rooms.items()))

    def _place_gang(self, need: Need, memory: int) -> Union[Placed, Unplaced]:
        """Return a place on every one of ``nodes:`` nodes, with GPUs of one kind on all, or all without them."""
        rooms = [room for room in self._able(need).values()
                 if not _why_filtered(room, need) and not _why_no_disk(room, need)]
        kinds = sorted({gpu.name for room in rooms for gpu in room.gpus}) if need.spec.gpus != 0 else []
        able: Dict[Optional[str], List[str]] = {}     # kind (None: without) -> the nodes that could take a part
        places = []
        for kind in [*kinds, *([None] if fit.may_use_cpu(need.spec) else [])]:
            found = []
            for room in rooms:
                shard = _fit_gpus(room, need, kind) if kind is not None else _fit_cpu(room, need, memory)
                if isinstance(shard, Shard):
                    rank = (room.models.get(need.spec.name, 0), need.weights.fingerprint not in room.whole)
                    found.append((rank, room.node.name, shard))
            able[kind] = [name for _, name, _ in found]
            if len(found) >= need.spec.nodes:
                chosen = sorted(found, key=lambda item: item[:2])[:need.spec.nodes]
                places.append((kind is None, [item[0] for item in chosen], kind or "", chosen))
        if places:
            *_, chosen = min(places, key=lambda item: item[:3])
            return Placed(tuple(replace(shard, rank=at) for at, (_, _, shard) in enumerate(
                sorted(chosen, key=lambda item: item[1]))))
        return self._why_no_gang(need, memory, able)

    def _why_no_gang(self, need: Need, memory: int, able: Mapping[Optional[str], Sequence[str]]) -> Unplaced:
        """Return why: a node that could take a part is told with its kind of GPU where others have another."""
        words = []
        for name, room in self._rooms.items():
            kinds = [kind for kind, names in able.items() if kind and name in names]
            why = self._why_not(room, need, memory)
            words.append(f"{name}: {why}" + (f" with its {' or '.join(kinds)}" if kinds and len(able) > 1 else ""))
        could = max((len(names) for names in able.values()), default=0)
        alike = " with GPUs of one kind" if sum(map(bool, able)) > 1 else ""
        return Unplaced((f"it needs {need.spec.nodes} nodes at once{alike}, {could} could take a part of it", *words))

    def _best(self, need: Need, tightest_first: Sequence[Tuple[int, str]], memory: int,
              on_gpus: bool) -> Optional[Shard]:
        """Return the first of the tightest among those with the fewest of this model, holders of its weights first."""
        able, model, fingerprint = self._able(need), need.spec.name, need.weights.fingerprint
        best: Optional[Shard] = None
        ideal, rank = (0, fingerprint not in self._holders), (1 << 30, True)
        for _, name in tightest_first:
            room = able.get(name)
            if room is None:
                continue
            here = (room.models.get(model, 0), fingerprint not in room.whole)
            if best is not None and here >= rank:
                continue
            if _why_no_disk(room, need) or _why_filtered(room, need):
                continue
            found = _fit_gpus(room, need) if on_gpus else _fit_cpu(room, need, memory)
            if isinstance(found, Shard):
                best, rank = found, here
                if here <= ideal:
                    break
        return best

    def may_stay(self, replica: Replica, spec: ModelSpec) -> bool:
        """Whether its nodes are ones that the model may run on now (labels, named nodes)."""
        rooms = [self._rooms.get(shard.node) for shard in replica.shards]
        return all(room is None or room.node.observed is None or not _why_elsewhere(room, spec)
                   for room in rooms)

    def _able(self, need: Need) -> Dict[str, _Room]:
        key = (need.spec.engine, need.engine_version)
        if key not in self._able_rooms:
            self._able_rooms[key] = {name: room for name, room in self._rooms.items()
                                     if not _why_dead(room.node) and not _why_no_engine(room, *key)}
        return self._able_rooms[key]

    def _why_not(self, room: _Room, need: Need, memory: int) -> str:
        reason = (_why_dead(room.node) or _why_filtered(room, need)
                  or _why_no_engine(room, need.spec.engine, need.engine_version) or _why_no_disk(room, need))
        if reason:
            return reason
        gpu_problem = ""
        if need.spec.gpus != 0:
            found = _fit_gpus(room, need)
            if isinstance(found, Shard) or not fit.may_use_cpu(need.spec):
                return found if isinstance(found, str) else "could take it"
            gpu_problem = found
        on_cpu = _fit_cpu(room, need, memory)
        if isinstance(on_cpu, Shard):
            return "could take it"
        return f"{on_cpu}; {gpu_problem}" if gpu_problem and room.gpus else on_cpu


def _claim(spec: ModelSpec, weights: Weights, state: Optional[ShardState], sign: int) -> int:
    """Return what a CPU replica takes of what the node calls available.

    Weights of a running one are mapped files, which the kernel still counts as
    available; the rest of it is already missing there.
    """
    running = state in (ShardState.READY, ShardState.UNREADY)
    if running and sign > 0:
        return weights.size_bytes
    return fit.memory_bytes(spec, weights)


def _fit_cpu(room: _Room, need: Need, memory: int) -> Union[Shard, str]:
    engine = need.spec.engine
    if engine != LLAMA_CPP:
        if not any(CPU in seen.devices for seen in _usable(room, engine, need.engine_version)):
            return f"its {engine} is not made for the CPU (one that is can be named under engines: in agent.yaml)"
    if room.memory >= memory:
        return Shard(0, room.node.name)
    return f"{fit.gib(memory)} of memory are needed, {fit.gib(room.memory)} are free"


def _fit_gpus(room: _Room, need: Need, kind: Optional[str] = None) -> Union[Shard, str]:
    """Return a part on the tightest cards of one kind, of this one where it is said; or why there is none."""
    if not room.gpus:
        return "it has no GPU"
    spec = need.spec
    if spec.engine == LLAMA_CPP:          # a build without CUDA; the other engines do not start without one
        if not any(engine.devices for engine in _usable(room, spec.engine, need.engine_version)):
            return f"its {spec.engine} sees no GPU"
    free = [gpu for gpu in room.free_gpus() if kind in (None, gpu.name)]
    if len(free) < fit.gpu_count(spec):
        return f"{len(free)} of {len(room.gpus)} GPUs are free, {fit.gpu_count(spec)} are needed"
    chosen = fit.choose_gpus(spec, need.weights, free)
    return chosen if isinstance(chosen, str) else Shard(0, room.node.name, chosen)


def _why_dead(node: NodeState) -> str:
    if node.observed is None or node.liveness.life is not NodeLife.READY:
        return node.liveness.message or node.liveness.life.value
    if node.draining:
        return "it is being drained"
    if not node.observed.probed:
        return "its first probe has not ended yet"
    return ""


def _why_filtered(room: _Room, need: Need) -> str:
    if need.spec.nodes > 1 and room.node.observed is not None:
        why = _why_not_in(need.spec.fabric, room.node.observed.identity.fabric_address)
        if why:
            return why
    return _why_elsewhere(room, need.spec)


def _why_not_in(fabric: str, address: str) -> str:
    """Return why a node cannot take part in the network ``fabric``; empty when it can."""
    if not address:
        return f"it has no fabric_address in {fabric} (try: fabric_address: in its agent.yaml)"
    try:
        inside = ipaddress.ip_address(address) in ipaddress.ip_network(fabric, strict=False)
    except ValueError:
        return f"its fabric_address {address} is no address"
    return "" if inside else f"its fabric_address {address} is not in {fabric}"


def _why_elsewhere(room: _Room, spec: ModelSpec) -> str:
    if spec.only_nodes and room.node.name not in spec.only_nodes:
        return f"the model is placed on {', '.join(spec.only_nodes)} only"
    labels = room.node.observed.identity.labels if room.node.observed is not None else {}
    for key, value in spec.labels.items():
        if labels.get(key) != value:
            return f"its label {key} is {labels[key]}, not {value}" if key in labels \
                else f"it has no label {key}: {value}"
    return ""


def _usable(room: _Room, engine: str, version: str) -> List[EngineObserved]:
    return [seen for seen in room.engines.get(engine, ())
            if seen.usable and (seen.version == version or seen.source == "operator")]


def _why_no_engine(room: _Room, engine: str, version: str) -> str:
    if _usable(room, engine, version):
        return ""
    seen = [one for one in room.engines.get(engine, ()) if one.version == version]
    seen = seen or [one for one in room.engines.get(engine, ()) if one.source == "operator"]
    if not seen:
        return f"{engine} {version} is not installed"
    text = seen[0].sentence
    if seen[0].phase is EnginePhase.INSTALLED and not seen[0].message:
        text += ", but not seen to run"
    return f"{text} (try: {seen[0].hint})" if seen[0].hint else text


def _why_no_disk(room: _Room, need: Need) -> str:
    weights = need.weights
    if weights.fingerprint in room.whole or weights.fingerprint in room.promised:
        return ""
    if room.disk - room.disk_kept >= weights.size_bytes:
        return ""
    return (f"{fit.gib(weights.size_bytes)} of disk are needed for the weights, "
            f"{fit.gib(room.disk)} are free, of which {fit.gib(room.disk_kept)} are kept")
