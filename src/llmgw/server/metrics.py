"""The control plane's own numbers, as Prometheus reads them."""
from __future__ import annotations

from typing import Dict, Iterable, List, Mapping, Tuple

from llmgw import __version__
from llmgw.server.loop import Snapshot

Labels = Tuple[Tuple[str, str], ...]


def page(snapshot: Snapshot, *, epoch: int, heartbeats: int, connections: int, revision: int, routers: int,
         answers: Mapping[Tuple[str, int], int], mirror_bytes: int = 0) -> bytes:
    """Return the whole page."""
    lines: List[str] = []
    _add(lines, "llmgw_server_info", "gauge", [((("version", __version__),), 1.0)])
    _add(lines, "llmgw_epoch", "gauge", [((), float(epoch))])
    _add(lines, "llmgw_store_revision", "gauge", [((), float(revision))])
    _add(lines, "llmgw_heartbeats_total", "counter", [((), float(heartbeats))])
    _add(lines, "llmgw_http_connections", "gauge", [((), float(connections))])
    _add(lines, "llmgw_mirror_sent_bytes_total", "counter", [((), float(mirror_bytes))])
    _add(lines, "llmgw_routers", "gauge", [((), float(routers))])
    _add(lines, "llmgw_demotions_held", "gauge", [((), float(bool(snapshot.suspicion)))])
    lives: Dict[str, int] = {}
    for node in snapshot.nodes.values():
        lives[node.liveness.life.value] = lives.get(node.liveness.life.value, 0) + 1
    _add(lines, "llmgw_nodes", "gauge", [((("state", life),), float(count)) for life, count in sorted(lives.items())])
    _add(lines, "llmgw_model_replicas_wanted", "gauge",
         [((("model", want.spec.name),), float(want.spec.replicas)) for want in snapshot.wanted])
    _add(lines, "llmgw_model_replicas_ready", "gauge",
         [((("model", model.name),), float(sum(not row.draining for row in model.replicas)))
          for model in snapshot.models])
    _add(lines, "llmgw_http_answers_total", "counter",
         [((("route", pattern), ("status", str(status))), float(count))
          for (pattern, status), count in sorted(answers.items())])
    return ("\n".join(lines) + "\n").encode("utf-8")


def _add(lines: List[str], name: str, kind: str, values: Iterable[Tuple[Labels, float]]) -> None:
    lines.append(f"# TYPE {name} {kind}")
    for labels, value in values:
        text = ",".join(f'{key}="{_escaped(label)}"' for key, label in labels)
        lines.append(f"{name}{{{text}}} {value:.17g}" if text else f"{name} {value:.17g}")


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
