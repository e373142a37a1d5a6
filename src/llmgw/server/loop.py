"""The reconcile loop: observe, decide, act; once a second, or at once when somebody pokes it."""
from __future__ import annotations

import logging
import secrets
import threading
from dataclasses import dataclass, field, replace
from typing import Dict, List, Mapping, Optional, Tuple

from llmgw.decide import gangs, liveness, peers, replicas, routes_table
from llmgw.decide.liveness import Verdict
from llmgw.decide.placement import NodeState
from llmgw.decide.replicas import Drain, Place, Remove, Restart, Step, Stop, Traffic, Wanted
from llmgw.domain.cluster import ClusterConfig
from llmgw.domain.errors import LlmgwError
from llmgw.domain.heartbeat import NodeDesired
from llmgw.domain.names import file_name
from llmgw.domain.replica import Replica, ReplicaWish, ShardWanted
from llmgw.domain.route import RoutedModel
from llmgw.domain.secret import Secret
from llmgw.server import records
from llmgw.server.admissions import Admissions
from llmgw.server.config import ConfigWatch
from llmgw.server.engine_assets import EngineAssets
from llmgw.server.events import Events
from llmgw.server.nodes import Nodes
from llmgw.server.peers import PeerKeys, Told
from llmgw.server.routers import Routers
from llmgw.server.routes_feed import RoutesFeed, epoch_of
from llmgw.server.sources import Sources
from llmgw.server.store import Compare, Delete, Operation, Store, put
from llmgw.server.tokens import Tokens
from llmgw.server.transitions import Transitions
from llmgw.system.clock import Clock
from llmgw.system.logs import Said

log = logging.getLogger(__name__)

EVERY_SECONDS = 1.0
AT_LEAST_EVERY_SECONDS = 5.0  # with nothing new, time itself may be the news
OBSERVE_SECONDS = 40.0        # after a restore: heartbeats are heard, nothing is done


@dataclass(frozen=True)
class Snapshot:
    """What the last turn saw and decided; swapped whole, read by every handler."""

    config: ClusterConfig = field(default_factory=ClusterConfig)
    wanted: Tuple[Wanted, ...] = ()
    replicas: Tuple[Replica, ...] = ()
    nodes: Mapping[str, NodeState] = field(default_factory=dict)
    unplaced: Mapping[str, Tuple[str, ...]] = field(default_factory=dict)
    models: Tuple[RoutedModel, ...] = ()
    suspicion: str = ""


@dataclass
class Parts:
    """Everything that a turn asks or tells."""

    store: Store
    clock: Clock
    config: ConfigWatch
    nodes: Nodes
    routers: Routers
    events: Events
    sources: Sources
    engines: EngineAssets
    tokens: Tokens
    feed: RoutesFeed
    rows: records.Replicas
    admissions: Admissions


class Reconciler:
    """Owns the rows of replicas, the epoch and the routing table. One thread calls ``turn``."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.snapshot = Snapshot()
        self.epoch = self._next_epoch(records.number(parts.store, records.EPOCH))
        self.turned = threading.Event()
        self._started_at = parts.clock.monotonic()
        self._turn_at: Optional[float] = None
        self._deaf_at: Optional[float] = None
        self._last: Tuple[object, ...] = ()
        self._last_at = 0.0
        self._observing = parts.store.get(records.RESTORED) is not None
        parts.nodes.silent_answers = self._observing
        self._transitions = Transitions(parts.events)
        self._peer_keys = PeerKeys(parts.store)
        self._said = Said()

    def _next_epoch(self, seen: int) -> int:
        put(self._parts.store, records.EPOCH, seen + 1)
        return seen + 1

    def turn(self) -> Optional[float]:
        """Look at everything once, and do what follows from it."""
        parts, now = self._parts, self._parts.clock.monotonic()
        if self._turn_at is not None and now - self._turn_at > EVERY_SECONDS + liveness.LATE_SECONDS:
            self._deaf_at = now
        self._turn_at = now
        parts.config.poll()
        self._overtake()
        verdict = liveness.judge(parts.nodes.seen(), now, started_at=self._started_at, deaf_at=self._deaf_at)
        wanted = self.wanted(parts.config.state.current)
        news = self._news(verdict, wanted)
        if news != self._last or now - self._last_at >= AT_LEAST_EVERY_SECONDS or parts.routers.draining_seconds():
            self._last, self._last_at = news, now
            self._reconcile(wanted, verdict)
        parts.events.flush()
        self.turned.set()
        return None

    def _overtake(self) -> None:
        """Be younger than all that agents and routers have seen: they refuse an older one; this may be set up anew."""
        parts, seen = self._parts, self._parts.nodes.highest_epoch
        if parts.routers.highest_revision > parts.feed.table.revision:
            seen = max(seen, epoch_of(parts.routers.highest_revision) + 1)
        if seen > self.epoch:
            self.epoch = self._next_epoch(seen)
            parts.events.add("server", "EpochRaised", f"nodes or routers knew a later epoch, it is {self.epoch} now")

    def _news(self, verdict: Verdict, wanted: Tuple[Wanted, ...]) -> Tuple[object, ...]:
        parts = self._parts
        return (parts.store.revision, parts.nodes.changes, parts.config.state.current, wanted, self.epoch,
                parts.routers.answering(), verdict.suspicion != "",
                tuple((name, node.life, node.replace) for name, node in verdict.nodes.items()))

    def wanted(self, config: ClusterConfig) -> Tuple[Wanted, ...]:
        """Return what a configuration asks for, with the weights as far as they are here."""
        versions = {engine.name: engine.version for engine in config.engines}
        found = []
        for spec in config.models:
            weights, problem = self._parts.sources.weights(spec)
            if spec.engine not in versions:
                problem = f"{spec.engine} is not among the wanted engines"
            found.append(Wanted(spec, versions.get(spec.engine, ""), weights, problem))
        return tuple(found)

    def node_states(self, verdict: Verdict) -> Dict[str, NodeState]:
        """Return every known node with its last words."""
        parts, heard, draining = self._parts, self._parts.nodes.heard(), self._parts.nodes.draining()
        return {name: NodeState(name, alive, heard[name].observed if name in heard else None,
                                draining.get(name, False), parts.nodes.acknowledged(name, self.epoch))
                for name, alive in sorted(verdict.nodes.items())}

    def traffic(self) -> Traffic:
        routers = self._parts.routers
        return Traffic(routers.answering(), routers.idle(), routers.draining_seconds())

    def _reconcile(self, wanted: Tuple[Wanted, ...], verdict: Verdict) -> None:
        parts = self._parts
        rows = [row for _, row in parts.rows.all()]
        self._publish(rows, verdict)
        states = self.node_states(verdict)
        traffic = self.traffic()
        plan = replicas.reconcile(wanted, rows, tuple(states.values()), traffic)
        unplaced = dict(plan.unplaced)
        if self._observing:
            self._observe()
        elif plan.steps:
            unplaced.update(self._act(plan.steps))
            rows = [row for _, row in parts.rows.all()]
            self._publish(rows, verdict)
        models = routes_table.routed_models(wanted, rows, states, traffic.answering, unplaced,
                                            parts.feed.table, parts.admissions.gate_names())
        parts.feed.publish(parts.config.state.current.cluster, self.epoch, models, parts.tokens.routed(),
                           parts.admissions.fleet_ca())
        parts.routers.note_drains({row.id: row for row in rows}, parts.feed.table.revision)
        self.snapshot = Snapshot(parts.config.state.current, wanted, tuple(rows), states, unplaced, models,
                                 verdict.suspicion)
        self._transitions.note(self.snapshot)

    def _observe(self) -> None:
        if self._parts.clock.monotonic() - self._started_at >= OBSERVE_SECONDS:
            self._parts.store.txn((), (Delete(records.RESTORED),))
            self._observing = self._parts.nodes.silent_answers = False
            self._parts.events.add("server", "Observed", "the restored state is in force from now on")
            self._parts.nodes.poke.set()

    def _publish(self, rows: List[Replica], verdict: Verdict) -> None:
        self._parts.engines.has_gpus = any(heard.observed.facts.gpus for heard in self._parts.nodes.heard().values())
        engines = tuple(self._parts.engines.wanted(engine) for engine in self._parts.config.state.current.engines)
        shards: Dict[str, List[ShardWanted]] = {name: [] for name in verdict.nodes}
        states = self.node_states(verdict)
        told = self._peer_keys.told(peers.asked(rows, states), states, self._parts.admissions.gate_names())
        shares = peers.shares(rows, states)
        for row in rows:
            if row.wish is ReplicaWish.STOP:
                continue
            for shard in row.shards:
                if shard.node in shards:
                    shards[shard.node].append(ShardWanted(
                        f"{row.id}.{shard.rank}", row.id, shard.rank, row.model, row.engine_version, row.weights,
                        row.key, shard.gpus, gangs.told(row, shard, states)))
        self._parts.nodes.publish({
            name: NodeDesired(engines, tuple(wanted), *told.get(name, Told()), shares.get(name, ()))
            for name, wanted in shards.items()})

    def _act(self, steps: Tuple[Step, ...]) -> Dict[str, Tuple[str, ...]]:
        """Write each step on its own; a row that changed meanwhile is left to the next turn.

        Returns the models that have no place because it could not be written down, and why.
        """
        entries = {row.id: (entry, row) for entry, row in self._parts.rows.all()}
        everybody = [row for _, row in entries.values()]
        for step in steps:
            try:
                if isinstance(step, Place):
                    self._place(step)
                elif step.replica in entries:
                    entry, row = entries[step.replica]
                    self._change(step, row, Compare(entry.key, entry.revision), everybody)
                self._said.is_over("step")
            except LlmgwError as error:
                if self._said.is_new("step", error.message):
                    log.warning("step not written, the next turn tries again reason=%s: %s", error.reason,
                                error.message)
                return {step.need.spec.name: (error.message,) for step in steps if isinstance(step, Place)}
        return {}

    def _place(self, step: Place) -> None:
        parts, spec = self._parts, step.need.spec
        name = f"{file_name(spec.name)[:60]}-{secrets.token_hex(3)}"
        row = Replica(name, spec, step.need.engine_version, step.need.weights, step.shards,
                      Secret(secrets.token_urlsafe(32)), created_at=parts.clock.wall(),
                      wish_since=parts.clock.wall(), reason=step.reason)
        if parts.store.txn([Compare(records.REPLICAS + name, 0)], parts.rows.writing(row)) is not None:
            where = ", ".join(shard.node for shard in step.shards)
            parts.events.add(f"replica/{name}", "Placed", f"on {where}: {step.reason}")

    def _change(self, step: Step, row: Replica, unchanged: Compare, everybody: List[Replica]) -> None:
        parts = self._parts
        if isinstance(step, Remove):
            if parts.store.txn([unchanged], parts.rows.removing(row, everybody)) is not None:
                everybody.remove(row)
                parts.events.add(f"replica/{row.id}", "Removed", "every node says that it is gone")
            return
        if isinstance(step, Restart):
            if parts.store.txn([unchanged], parts.rows.writing(replace(row, turn=row.turn + 1))) is not None:
                parts.events.add(f"replica/{row.id}", "Restarting", f"every rank is started again: {step.reason}")
            return
        assert isinstance(step, (Drain, Stop))
        wish = ReplicaWish.DRAIN if isinstance(step, Drain) else ReplicaWish.STOP
        changed = replace(row, wish=wish, wish_since=parts.clock.wall(), reason=step.reason)
        operations: List[Operation] = parts.rows.writing(changed)
        if parts.store.txn([unchanged], operations) is not None:
            said = "Draining" if wish is ReplicaWish.DRAIN else "Stopping"
            parts.events.add(f"replica/{row.id}", said, step.reason)
