"""The view of the nodes: what each is, whether it answers, what it runs and holds."""
from __future__ import annotations

from typing import Any, List, Tuple

from llmgw.api import paths, wire
from llmgw.ctl import models, output
from llmgw.ctl.console.view import View
from llmgw.ctl.nodes import notes_of, row_of
from llmgw.ctl.output import Row
from llmgw.domain.view import NodeView, WeightsOnNode

Nodes = Tuple[NodeView, ...]


def _decode(data: Any) -> Nodes:
    return tuple(wire.NODE_VIEW.decode(item, "node") for item in data["items"])


def _rows(nodes: Nodes) -> List[Row]:
    return [Row((*row_of(node).cells[:2], *row_of(node).cells[3:])) for node in nodes]


def _detail(nodes: Nodes, at: int) -> List[str]:
    node = nodes[at]
    facts, identity = node.facts, node.identity
    lines = [f"{node.name}: {node.state}" + (f" ({node.message})" if node.message else ""), "",
             f"system    {facts.os.pretty_name or facts.os.id or '-'}, {facts.kernel or '-'}, {facts.arch or '-'}, "
             f"{facts.libc or '-'}",
             f"processor {facts.cpu_count or '-'} x {facts.cpu_model or '-'}",
             f"memory    {output.size(facts.memory_available_bytes)} of {output.size(facts.memory_total_bytes)} free",
             f"disk      {output.size(facts.disk_free_bytes)} of {output.size(facts.disk_total_bytes)} free",
             f"agent     {identity.agent_version or '-'}, gate {identity.address}:{identity.gate_port}, "
             f"heard of {output.age(node.seen_seconds_ago)} ago"]
    lines += [f"GPU {gpu.index}     {gpu.name}, {output.size(gpu.memory_total_bytes)}" for gpu in facts.gpus]
    lines += ["", "engines"] + ([f"  {engine.name} {engine.version}: {engine.phase.value}"
                                 + (f", {engine.message}" if engine.message else "") for engine in node.engines]
                                or ["  none"])
    lines += ["", "weights"] + ([f"  {seen.name}: " + models.weights_word(WeightsOnNode(
        node.name, seen.phase.value, 100 * seen.done_bytes // seen.total_bytes if seen.total_bytes else 0,
        (seen.total_bytes - seen.done_bytes) // seen.bytes_per_second if seen.bytes_per_second > 0 else None,
        "" if seen.phase.value == "fetching" else seen.message)) for seen in node.weights] or ["  none"])
    lines += ["", "replicas"] + ([f"  {name}" for name in node.replicas] or ["  none"])
    notes = notes_of(node)
    return lines + (["", "notes", *(f"  {note}" for note in notes)] if notes else [])


def _summary(nodes: Nodes) -> str:
    ready = sum(node.state == "ready" for node in nodes)
    return f"{len(nodes)} nodes, {ready} ready"


VIEW = View("Nodes", paths.NODES, _decode, ("NODE", "STATE", "CPUS", "MEM FREE", "DISK FREE", "GPUS", "REPLICAS"),
            _rows, _detail, _summary, "no node has called yet")
