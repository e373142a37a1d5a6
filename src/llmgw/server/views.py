"""What people and programs are shown, made of the last turn's snapshot."""
from __future__ import annotations

from dataclasses import replace
from typing import Mapping, Optional, Tuple

from llmgw.decide.liveness import NodeLife
from llmgw.decide.placement import NodeState
from llmgw.decide.replicas import Wanted, observed_shard
from llmgw.decide.routes_table import why_not
from llmgw.domain.engine import EngineWanted
from llmgw.domain.model import told_context
from llmgw.domain.node import NodeFacts, NodeIdentity
from llmgw.domain.replica import CANNOT_STOP, Replica, ReplicaWish, ShardObserved, ShardState
from llmgw.domain.route import Gauges
from llmgw.domain.view import EngineView, ModelView, NodeView, ReplicaView, ShardView
from llmgw.server.loop import Snapshot
from llmgw.server.weights_views import weights_on_nodes

SKEW_SECONDS = 5.0
# The worst shard gives the replica's state; the order is from worst to best.
_WORST = (ShardState.CRASHLOOP, ShardState.BACKOFF, ShardState.UNREADY, ShardState.STOPPED, ShardState.STOPPING,
          ShardState.WAITING, ShardState.FETCHING, ShardState.STARTING, ShardState.READY)


def node_view(node: NodeState, skew_seconds: float, replicas: Tuple[str, ...]) -> NodeView:
    """Return one node; what was never heard is empty, not guessed."""
    alive, observed = node.liveness, node.observed
    state, message = alive.life.value, alive.message
    if alive.life is NodeLife.READY and observed is not None and not observed.probed:
        message = "its first probe has not ended yet"
    if node.draining:
        message = f"{message}; draining" if message else "draining"
    if observed is None:
        return NodeView(node.name, state, message, NodeIdentity(node.name, "", ""), NodeFacts(), False,
                        alive.silent_seconds, node.draining, replicas=replicas)
    warnings = list(observed.facts.warnings)
    if abs(skew_seconds) > SKEW_SECONDS:
        warnings.append(f"its clock is {abs(skew_seconds):.0f} s {'ahead' if skew_seconds > 0 else 'behind'}")
    return NodeView(node.name, state, message, observed.identity, observed.facts, observed.probed,
                    alive.silent_seconds, node.draining, skew_seconds, observed.engines, observed.weights, replicas,
                    tuple(warnings))


def model_view(want: Wanted, snapshot: Snapshot) -> ModelView:
    """Return one model, with everybody's reason while it is not fully served."""
    rows = [row for row in snapshot.replicas if row.model.name == want.spec.name]
    weights = want.weights or (rows[0].weights if rows else None)
    routed = next((model for model in snapshot.models if model.name == want.spec.name), None)
    ready = sum(not row.draining for row in routed.replicas) if routed is not None else 0
    reasons: Tuple[str, ...] = ()
    if ready < want.spec.replicas or want.spec.name in snapshot.unplaced:
        reasons = why_not(want, rows, snapshot.nodes, snapshot.unplaced.get(want.spec.name, ()))
    return ModelView(
        name=want.spec.name, engine=want.spec.engine, engine_version=want.engine_version,
        task=want.spec.task.value, weights=want.spec.weights, wanted=want.spec.replicas, ready=ready,
        aliases=want.spec.aliases, replicas=tuple(row.id for row in rows), why_not=reasons,
        context_length=told_context(want.spec, weights),
        size_bytes=weights.size_bytes if weights is not None else None,
        vision=weights is not None and bool(weights.projector),
        nodes=weights_on_nodes(weights, rows, snapshot.nodes))


def replica_view(row: Replica, nodes: Mapping[str, NodeState], gauges: Optional[Gauges]) -> ReplicaView:
    """Return one replica, wanted and observed side by side."""
    shards = tuple(ShardView(shard.rank, shard.node, shard.gpus, observed_shard(row, shard, nodes.get(shard.node)))
                   for shard in row.shards)
    state, reason, message = _summary(row, shards, nodes)
    return ReplicaView(row.id, row.model.name, row.model.engine, row.engine_version, row.wish.value, state, reason,
                       message, row.created_at, shards, gauges)


def without_logs(view: ReplicaView) -> ReplicaView:
    """Return it for those who may look but not read logs: an engine's log can quote what it was asked."""
    return replace(view, shards=tuple(_without_log(shard) for shard in view.shards))


def _without_log(shard: ShardView) -> ShardView:
    seen = shard.observed
    if seen is None or seen.first_failure is None:
        return shard
    return replace(shard, observed=replace(seen, first_failure=replace(seen.first_failure, log_tail="")))


def _summary(row: Replica, shards: Tuple[ShardView, ...],
             nodes: Mapping[str, NodeState]) -> Tuple[str, str, str]:
    for shard in shards:
        node = nodes.get(shard.node)
        if node is None:
            return "unknown", "NodeGone", f"node {shard.node} is gone"
        if node.liveness.life not in (NodeLife.READY, NodeLife.SUSPECT):
            return "unknown", "NodeSilent", f"node {shard.node}: {node.liveness.message}"
    seen = [(shard, shard.observed) for shard in shards if shard.observed is not None]
    stuck = [_where(row, shard, one) for shard, one in seen if one.reason == CANNOT_STOP]
    if stuck:                             # before all else: what it holds is free for nobody
        return ShardState.STOPPING.value, CANNOT_STOP, "; ".join(stuck)
    if row.wish is ReplicaWish.STOP:      # what has ended already says nothing of the rest
        seen = [(shard, one) for shard, one in seen if one.state is not ShardState.STOPPED]
        if not seen:
            return ShardState.STOPPED.value, "", row.reason
    elif len(seen) < len(shards):
        return "placed", "", "its node has been told to start it"
    shard, worst = min(seen, key=lambda pair: _WORST.index(pair[1].state))
    if row.wish is ReplicaWish.DRAIN:
        return "draining", worst.reason, row.reason
    return worst.state.value, worst.reason, _where(row, shard, worst)


def _where(row: Replica, shard: ShardView, seen: ShardObserved) -> str:
    """Return what a shard says; of several, also which and on which node it is."""
    is_said = seen.message and (len(row.shards) > 1 or seen.reason == CANNOT_STOP)
    rank = f"rank {shard.rank} on " if len(row.shards) > 1 else ""
    return f"{rank}{shard.node}: {seen.message}" if is_said else seen.message


def engine_view(engine: EngineWanted, nodes: Mapping[str, NodeState]) -> EngineView:
    """Return one wanted engine, with what every node says of it."""
    said = []
    for name, node in nodes.items():
        if node.observed is None:
            continue
        said += [(name, seen) for seen in node.observed.engines
                 if seen.name == engine.name and (seen.version == engine.version or seen.source == "operator")]
    return EngineView(engine.name, engine.version, engine.assets, engine.assets_problem, tuple(said))
