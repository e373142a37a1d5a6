"""What an edit of server.yaml would do, told beforehand; nothing is changed."""
from __future__ import annotations

from typing import Any, Dict, List, Tuple

from llmgw.decide import replicas
from llmgw.decide.replicas import Drain, Place, Traffic, Wanted
from llmgw.domain.cluster import ClusterConfig
from llmgw.domain.model import WeightsPhase
from llmgw.domain.replica import Replica
from llmgw.server.loop import Snapshot


def plan(config: ClusterConfig, wanted: Tuple[Wanted, ...], snapshot: Snapshot,
         traffic: Traffic) -> Dict[str, Any]:
    """Return starts, stops, rolls, downloads, engines, what cannot be placed and why, and what needs a confirm."""
    decided = replicas.reconcile(wanted, snapshot.replicas, tuple(snapshot.nodes.values()), traffic)
    rows = {row.id: row for row in snapshot.replicas}
    names = {want.spec.name: want for want in wanted}
    starts: List[Dict[str, str]] = []
    downloads: List[Dict[str, Any]] = []
    for step in decided.steps:
        if isinstance(step, Place):
            for shard in step.shards:
                starts.append({"model": step.need.spec.name, "node": shard.node, "reason": step.reason})
                if not _holds(snapshot, shard.node, step.need.weights.fingerprint):
                    downloads.append({"model": step.need.spec.name, "node": shard.node,
                                      "size_bytes": step.need.weights.size_bytes})
    drained = {step.replica: step.reason for step in decided.steps if isinstance(step, Drain)}
    rolls = [_row(row, "is replaced by a changed one") for row in rows.values()
             if row.id not in drained and row.wish.value == "run" and row.model.name in names
             and not replicas.is_current(row, names[row.model.name])]
    return {
        "starts": starts,
        "stops": [_row(rows[name], reason) for name, reason in sorted(drained.items())],
        "rolls": rolls,
        "downloads": downloads,
        "engines": [f"{engine.name} {engine.version}" for engine in config.engines],
        "unplaced": [{"model": name, "reasons": list(reasons)} for name, reasons in sorted(decided.unplaced.items())],
        "needs_confirm": list(replicas.stops_too_many(wanted, snapshot.replicas)),
        "warnings": list(config.warnings)}


def _row(row: Replica, reason: str) -> Dict[str, str]:
    return {"replica": row.id, "model": row.model.name, "node": ", ".join(shard.node for shard in row.shards),
            "reason": reason}


def _holds(snapshot: Snapshot, node: str, fingerprint: str) -> bool:
    state = snapshot.nodes.get(node)
    return state is not None and state.observed is not None and any(
        weights.fingerprint == fingerprint and weights.phase is WeightsPhase.WHOLE
        for weights in state.observed.weights)
