"""The table that routers serve from: which replicas are ready, and why a model has none."""
from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import FrozenSet, List, Mapping, Optional, Sequence, Tuple

from llmgw.decide import gangs
from llmgw.decide.liveness import NodeLife
from llmgw.decide.placement import NodeState
from llmgw.decide.replicas import Wanted, observed_shard
from llmgw.domain.model import told_context
from llmgw.domain.replica import Replica, ReplicaWish, ShardState
from llmgw.domain.route import RoutedKey, RoutedModel, RoutedReplica, RouteTable

MAX_WHY = 600
COMING_RETRY_SECONDS = 5
PROBLEM_RETRY_SECONDS = 30


def routed_models(wanted: Sequence[Wanted], replicas: Sequence[Replica], nodes: Mapping[str, NodeState],
                  answering: FrozenSet[str], unplaced: Mapping[str, Tuple[str, ...]],
                  previous: Optional[RouteTable],
                  tls_names: Mapping[str, str] = MappingProxyType({})) -> Tuple[RoutedModel, ...]:
    """Return every model with its ready replicas.

    A replica whose node has not spoken since this server started stays as it
    was in ``previous``: a restart of the server is no news about nodes.
    ``tls_names`` has the name in the certificate of each gate that speaks TLS.
    """
    kept = {row.id: row for model in previous.models for row in model.replicas} if previous is not None else {}
    return tuple(_model(want, [row for row in replicas if row.model.name == want.spec.name], nodes, answering,
                        unplaced.get(want.spec.name, ()), kept, tls_names) for want in wanted)


def table(cluster: str, epoch: int, revision: int, models: Tuple[RoutedModel, ...],
          keys: Sequence[RoutedKey], ca: str = "") -> RouteTable:
    """Return the whole table."""
    return RouteTable(cluster, epoch, revision, models, tuple(sorted(keys, key=lambda key: key.id)), ca)


def _model(want: Wanted, rows: Sequence[Replica], nodes: Mapping[str, NodeState], answering: FrozenSet[str],
           unplaced: Tuple[str, ...], kept: Mapping[str, RoutedReplica],
           tls_names: Mapping[str, str]) -> RoutedModel:
    routed: List[RoutedReplica] = []
    for row in sorted(rows, key=lambda row: row.id):
        one = _replica(row, nodes.get(row.shards[0].node), row.id in answering, kept.get(row.id))
        if one is not None and gangs.is_whole(row, nodes):
            routed.append(replace(one, tls_name=tls_names.get(one.node, "")))
    weights = want.weights or (rows[0].weights if rows else None)
    is_served = any(not row.draining for row in routed)
    coming = any(row.wish is ReplicaWish.RUN for row in rows)
    return RoutedModel(
        name=want.spec.name, engine=want.spec.engine, aliases=want.spec.aliases, task=want.spec.task,
        created=int(min((row.created_at for row in rows), default=0.0)),
        context_length=told_context(want.spec, weights),
        replicas=tuple(routed),
        why_not="" if is_served else _short(why_not(want, rows, nodes, unplaced)),
        retry_after_seconds=COMING_RETRY_SECONDS if coming else PROBLEM_RETRY_SECONDS)


def _replica(row: Replica, node: Optional[NodeState], answers: bool,
             kept: Optional[RoutedReplica]) -> Optional[RoutedReplica]:
    draining = row.wish is ReplicaWish.DRAIN
    if row.wish is ReplicaWish.STOP or node is None:
        return None
    observed = node.observed
    if observed is None:
        if kept is None or node.liveness.life is NodeLife.LOST:
            return None
        return RoutedReplica(kept.id, kept.node, kept.host, kept.port, row.key, kept.engine, kept.slots,
                             kept.incarnation, draining)
    seen = observed_shard(row, row.shards[0], node)
    if seen is None or seen.state is not ShardState.READY or not observed.identity.gate_port:
        return None
    if node.liveness.life not in (NodeLife.READY, NodeLife.SUSPECT) and not answers:
        return None
    return RoutedReplica(
        id=row.id, node=node.name, host=observed.identity.address, port=observed.identity.gate_port, key=row.key,
        engine=row.model.engine, slots=max(1, row.model.parallel), incarnation=seen.incarnation, draining=draining)


def why_not(want: Wanted, rows: Sequence[Replica], nodes: Mapping[str, NodeState],
            unplaced: Tuple[str, ...]) -> Tuple[str, ...]:
    """Return why the model is not served, or not fully, in the words of those who know."""
    said: List[str] = []
    for row in rows:
        if row.wish is ReplicaWish.RUN:
            said += _shard_words(row, nodes)
    said += [reason for reason in unplaced if reason not in said]
    if not said and not want.spec.replicas:
        said.append("it wants no replicas (replicas: 0)")
    if not said and want.weights is None:
        said.append(want.problem or "its weights are not there yet")
    return tuple(said)


def _shard_words(row: Replica, nodes: Mapping[str, NodeState]) -> List[str]:
    said = []
    for shard in row.shards:
        node = nodes.get(shard.node)
        if node is None:
            said.append(f"{shard.node}: the node is gone")
            continue
        seen = observed_shard(row, shard, node)
        if node.liveness.life is not NodeLife.READY and node.liveness.message:
            said.append(f"{shard.node}: {node.liveness.message}")
        elif seen is None:
            said.append(f"{shard.node}: it has been told to start it")
        elif seen.state is not ShardState.READY:
            said.append(f"{shard.node}: {seen.message or seen.state.value}")
        elif node.observed is not None and not node.observed.identity.gate_port:
            said.append(f"{shard.node}: its gate is not open yet")
    return said


def _short(sentences: Tuple[str, ...]) -> str:
    text = "; ".join(sentences) or "no replica is ready yet"
    return text if len(text) <= MAX_WHY else text[:MAX_WHY - 2] + " …"
