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
    able = {name: node.observed for name, node in nodes.items() if node.observed is not None and _is_open(node)}
    holding: Dict[str, Set[str]] = {}                     # fingerprint -> nodes
    for name, observed in able.items():
        for one in observed.weights:
            if one.phase is WeightsPhase.WHOLE:
                holding.setdefault(one.fingerprint, set()).add(name)
    wanting: Dict[str, Set[str]] = {}
    for row in rows:
        if row.wish is not ReplicaWish.STOP:
            wanting.setdefault(row.weights.fingerprint, set()).update(
                shard.node for shard in row.shards if shard.node in nodes)
    found: Dict[str, Dict[str, List[str]]] = {}
    for fingerprint, askers in sorted(wanting.items()):
        having = sorted(name for name in askers | holding.get(fingerprint, set()) if name in able)
        for asker in askers:
            for name in _next(having, asker):
                found.setdefault(asker, {}).setdefault(name, []).append(fingerprint)
    return {asker: {name: tuple(marks) for name, marks in sorted(named.items())} for asker, named in found.items()}


def _is_open(node: NodeState) -> bool:
    return (node.observed is not None and node.observed.identity.gate_port > 0
            and node.liveness.life not in (NodeLife.LOST, NodeLife.STOPPED))


def _next(having: Sequence[str], asker: str) -> List[str]:
    after = [name for name in having if name > asker] + [name for name in having if name < asker]
    return after[:MOST_PEERS]
