"""Where every node stands with a model's weights, for people and programs."""
from __future__ import annotations

from typing import List, Mapping, Optional, Sequence, Tuple

from llmgw.decide.liveness import NodeLife
from llmgw.decide.placement import NodeState
from llmgw.domain.model import Weights, WeightsObserved, WeightsPhase
from llmgw.domain.replica import Replica
from llmgw.domain.view import WeightsOnNode

SMALL_FLEET = 16              # up to so many nodes those are named too that have nothing of it


def weights_on_nodes(weights: Optional[Weights], rows: Sequence[Replica],
                     nodes: Mapping[str, NodeState]) -> Tuple[WeightsOnNode, ...]:
    """Return one line per node that holds, fetches or shall have the weights; of a small fleet one per node."""
    if weights is None:
        return ()
    placed = {shard.node for row in rows for shard in row.shards}
    found: List[WeightsOnNode] = []
    for name, node in nodes.items():
        seen = _seen(node, weights.fingerprint)
        if seen is not None and node.liveness.life in (NodeLife.READY, NodeLife.SUSPECT):
            found.append(_line(name, seen, weights.size_bytes))
        elif seen is None and (name in placed or len(nodes) <= SMALL_FLEET):
            found.append(WeightsOnNode(name, WeightsPhase.ABSENT.value))
    return tuple(found)


def _seen(node: NodeState, fingerprint: str) -> Optional[WeightsObserved]:
    observed = node.observed.weights if node.observed is not None else ()
    return next((one for one in observed if one.fingerprint == fingerprint), None)


def _line(name: str, seen: WeightsObserved, size: int) -> WeightsOnNode:
    if seen.phase is not WeightsPhase.FETCHING:
        return WeightsOnNode(name, seen.phase.value, 100 if seen.phase is WeightsPhase.WHOLE else 0,
                             message=seen.message)
    total = seen.total_bytes or size
    left = max(0, total - seen.done_bytes)
    seconds = left // seen.bytes_per_second if seen.bytes_per_second > 0 else None
    percent = 100 * seen.done_bytes // total if total else 100
    return WeightsOnNode(name, seen.phase.value, percent, seconds, seen.message)
