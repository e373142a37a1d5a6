"""The machines of the cluster: what they are, whether they answer, and what troubles them."""
from __future__ import annotations

import argparse
from typing import List

from llmgw.api import paths, wire
from llmgw.ctl import output, watch
from llmgw.ctl.connection import connect
from llmgw.domain.errors import UsageError
from llmgw.domain.view import NodeView

TITLES = ("NODE", "STATE", "SYSTEM", "CPUS", "MEM FREE", "DISK FREE", "GPUS", "REPLICAS")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("command", metavar="revoke|forget NODE", nargs="*",
                        help="revoke: end the node's credential at once, it must join anew; forget: take one that is "
                             "gone for good off the list (without: show the nodes)")
    watch.arguments(parser)


def action(options: argparse.Namespace) -> int:
    if options.command:
        return _act(options)
    client = connect(options)

    def once() -> None:
        data = client.json("GET", paths.NODES)
        if options.json:
            return output.write_json(data)
        nodes = [wire.NODE_VIEW.decode(item, "node") for item in data["items"]]
        output.write_table(TITLES, [row_of(node) for node in nodes],
                           empty="no node has called yet: start one with llmgw.pyz agent --server URL")
        if data.get("suspicion") and any(node.state != "ready" for node in nodes):
            output.say(data["suspicion"])

    return watch.show(options, once)


def _act(options: argparse.Namespace) -> int:
    command, names = options.command[0], options.command[1:]
    if command not in ACTIONS or len(names) != 1:
        raise UsageError("ctl nodes: " + (f"unknown command {command!r:.60}" if command not in ACTIONS
                                          else f"{command} takes one node"),
                         hint="llmgw.pyz ctl nodes shows them; " + ", ".join(
                             f"llmgw.pyz ctl nodes {name} NODE" for name in ACTIONS))
    ACTIONS[command](options, names[0])
    return 0


def _revoke(options: argparse.Namespace, node: str) -> None:
    connect(options).json("POST", paths.fill(paths.REVOKE_NODE, node=node), {})
    output.say(f"node {node} is revoked: it is told nothing any more, and no new request reaches it")
    output.say("its engines go on until somebody stops its agent; to let the machine in again, let it join anew")


def _forget(options: argparse.Namespace, node: str) -> None:
    replicas = connect(options).json("DELETE", paths.fill(paths.NODE, node=node))["replicas"]
    output.say(f"node {node} is forgotten; should its agent ever call again, it comes as a new one")
    if replicas:
        output.say(f"what it served is started elsewhere where there is room: {', '.join(replicas)}")


ACTIONS = {"revoke": _revoke, "forget": _forget}


def row_of(node: NodeView) -> output.Row:
    """Return one line of the table, with what troubles the node."""
    facts = node.facts
    system = " ".join(word for word in (facts.os.pretty_name or facts.os.id, facts.arch) if word)
    return output.Row((
        node.name, node.state, system, str(facts.cpu_count or "-"),
        _of(facts.memory_available_bytes, facts.memory_total_bytes),
        _of(facts.disk_free_bytes, facts.disk_total_bytes),
        _gpus(node), str(len(node.replicas))),
        tuple(notes_of(node)))


def _of(free: int, total: int) -> str:
    """Return both in few columns: 20/32 GB, 900 MB/2.1 GB."""
    if not total:
        return "-"
    (left, unit), whole = output.size(free).split(" "), output.size(total)
    return f"{left}/{whole}" if whole.endswith(" " + unit) else f"{left} {unit}/{whole}"


def _gpus(node: NodeView) -> str:
    names = [gpu.name for gpu in node.facts.gpus]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "-"


def notes_of(node: NodeView) -> List[str]:
    """Return what is to be said of a node beyond its numbers."""
    notes = []
    if node.state != "ready":
        notes.append(node.message or f"last heard of {output.age(node.seen_seconds_ago)} ago")
    if node.draining:
        notes.append("draining: takes no new replicas (llmgw.pyz ctl undrain ends it)")
    if not node.probed and node.state == "ready":
        notes.append("has not finished looking at itself yet")
    notes += node.warnings
    notes += [engine.sentence for engine in node.engines
              if engine.message and not engine.is_plain and engine.phase.value != "skipped"]
    return list(dict.fromkeys(notes))
