"""Replicas over several nodes: what each rank is told, when the whole is started again, when it serves.

The control plane counts the starts of the whole (``turn``). A node starts its rank once in each turn: rank 0 when all
the others could start, too (their weights may take an hour longer, and it would be taken for stalled), the others when
rank 0 has said where it is met. When any rank has ended, the next turn begins for all of them.
"""
from __future__ import annotations

from typing import Mapping, Optional

from llmgw.decide.placement import NodeState
from llmgw.domain.replica import WAITING_FOR_GANG, Gang, Replica, Shard, ShardObserved, ShardState

# The last two: it was started in this turn and is not there any more, as after its node was started anew.
_LOST = (ShardState.BACKOFF, ShardState.CRASHLOOP, ShardState.WAITING, ShardState.FETCHING)


def seen_shard(replica: Replica, shard: Shard, node: Optional[NodeState]) -> Optional[ShardObserved]:
    """Return what the node last said of this shard; of a gang only what belongs to its present turn."""
    if node is None or node.observed is None:
        return None
    wanted = f"{replica.id}.{shard.rank}"
    seen = next((one for one in node.observed.shards if one.id == wanted), None)
    if seen is None or (len(replica.shards) > 1 and seen.turn != replica.turn):
        return None
    return seen


def told(replica: Replica, shard: Shard, nodes: Mapping[str, NodeState]) -> Optional[Gang]:
    """Return what this rank is told of the others; None for a replica on one node."""
    if len(replica.shards) < 2:
        return None
    lead = replica.shards[0]
    seen = seen_shard(replica, lead, nodes.get(lead.node))
    return Gang(size=len(replica.shards), turn=replica.turn, address=_address(nodes.get(shard.node)),
                lead_address=_address(nodes.get(lead.node)), meet_port=seen.meet_port if seen else 0,
                lead_ready=seen is not None and seen.state is ShardState.READY,
                waits_for=_not_prepared(replica, nodes) if shard.rank == 0 else "")


def _not_prepared(replica: Replica, nodes: Mapping[str, NodeState]) -> str:
    """Return the first of the other ranks that neither waits for rank 0 nor was started in this turn; empty: none."""
    for shard in replica.shards[1:]:
        node, name = nodes.get(shard.node), f"{replica.id}.{shard.rank}"
        said = node.observed.shards if node is not None and node.observed is not None else ()
        if not any(one.id == name and (one.turn == replica.turn or one.reason == WAITING_FOR_GANG) for one in said):
            return f"rank {shard.rank} on {shard.node}"
    return ""


def _address(node: Optional[NodeState]) -> str:
    return node.observed.identity.fabric_address if node is not None and node.observed is not None else ""


def lost(replica: Replica, nodes: Mapping[str, NodeState]) -> str:
    """Return why the whole must be started again: a rank of this turn has ended. Empty when none has."""
    if len(replica.shards) < 2:
        return ""
    for shard in replica.shards:
        seen = seen_shard(replica, shard, nodes.get(shard.node))
        if seen is not None and seen.state in _LOST:
            return f"rank {shard.rank} on {shard.node} ended: {seen.message or seen.reason or seen.state.value}"
    return ""


def is_whole(replica: Replica, nodes: Mapping[str, NodeState]) -> bool:
    """Whether every rank of this turn is ready, as far as its node has spoken since this server started."""
    if len(replica.shards) < 2:
        return True
    for shard in replica.shards:
        node = nodes.get(shard.node)
        if node is None:
            return False
        seen = seen_shard(replica, shard, node)
        if node.observed is not None and (seen is None or seen.state is not ShardState.READY):
            return False
    return True
