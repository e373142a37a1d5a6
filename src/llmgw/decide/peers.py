"""Which nodes a node asks for its weights, besides the control plane: those that have them, or will."""
from __future__ import annotations

from typing import Dict, List, Mapping, Sequence, Set, Tuple

from llmgw.decide.liveness import NodeLife
from llmgw.decide.placement import NodeState
from llmgw.domain.model import WeightsPhase
from llmgw.domain.replica import Replica, ReplicaWish

MOST_PEERS = 6                # that one node asks; in a large fleet each asks those after it, in the order of names

Asked = Mapping[str, Mapping[str, Tuple[str, ...]]]       # node -> the nodes it asks -> fingerprints


def asked(rows: Sequence[Replica], nodes: Mapping[str, NodeState]) -> Asked:
    """Return whom every node that shall have weights asks for which of them.

    Told from the placement and not from how far each is: that changes all the time, and they tell each other.
    """
    wanting: Dict[str, Set[str]] = {}                     # fingerprint -> nodes
    for row in rows:
        if row.wish is not ReplicaWish.STOP:
            wanting.setdefault(row.weights.fingerprint, set()).update(
                shard.node for shard in row.shards if shard.node in nodes)
    found: Dict[str, Dict[str, List[str]]] = {}
    for fingerprint, askers in sorted(wanting.items()):
        having = [name for name, node in sorted(nodes.items())
                  if _is_open(node) and (name in askers or _holds(node, fingerprint))]
        for asker in askers:
            for name in _next(having, asker):
                found.setdefault(asker, {}).setdefault(name, []).append(fingerprint)
    return {asker: {name: tuple(marks) for name, marks in sorted(named.items())} for asker, named in found.items()}


def _is_open(node: NodeState) -> bool:
    return (node.observed is not None and node.observed.identity.gate_port > 0
            and node.liveness.life not in (NodeLife.LOST, NodeLife.STOPPED))


def _holds(node: NodeState, fingerprint: str) -> bool:
    return node.observed is not None and any(
        one.fingerprint == fingerprint and one.phase is WeightsPhase.WHOLE for one in node.observed.weights)


def _next(having: Sequence[str], asker: str) -> List[str]:
    after = [name for name in having if name > asker] + [name for name in having if name < asker]
    return after[:MOST_PEERS]
