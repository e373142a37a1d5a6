"""Each engine that the cluster wants, on each node, in the node's own words.

`engines lock ENGINE` shows the fleet's list of its packages, `engines relock ENGINE` has a new one made.
"""
from __future__ import annotations

import argparse
from typing import Any, List

from llmgw.api import paths, wire
from llmgw.ctl import output, watch
from llmgw.ctl.connection import connect
from llmgw.domain.engine import EngineObserved
from llmgw.domain.errors import NotFound, UsageError
from llmgw.domain.view import EngineView, LockView

LOCK_TITLES = ("ENGINE", "VERSION", "PLATFORM", "AS OF", "PACKAGES", "FROM", "SHA256")
TITLES = ("ENGINE", "VERSION", "NODE", "STATE", "FROM", "DEVICES")


def arguments(parser: argparse.ArgumentParser) -> None:
    watch.arguments(parser)
    parser.add_argument("what", nargs="?", choices=("lock", "relock"),
                        help="lock: show the list of packages of an engine; relock: have a new one made")
    parser.add_argument("engine", nargs="?", metavar="ENGINE", default="", help="vllm or sglang")
    parser.add_argument("--text", metavar="PLATFORM", default="", help="with lock: the list itself, for one platform")


def action(options: argparse.Namespace) -> int:
    client = connect(options)
    if options.what:
        return _lock(options, client)

    def once() -> None:
        data = client.json("GET", paths.ENGINES)
        if options.json:
            return output.write_json(data)
        engines = [wire.ENGINE_VIEW.decode(item, "engine") for item in data["items"]]
        output.write_table(TITLES, [row for engine in engines for row in _rows(engine)],
                           empty="no engine is wanted: engines: in server.yaml is empty")

    return watch.show(options, once)


def _rows(engine: EngineView) -> List[output.Row]:
    problem = (engine.assets_problem,) if engine.assets_problem and not engine.assets else ()
    if not engine.nodes:
        return [output.Row((engine.name, engine.version, "", "", "", ""), problem)]
    rows = [_row(engine, node, seen) for node, seen in engine.nodes]
    if any(sentence in note for row in rows for note in row.notes for sentence in problem):
        return rows
    return rows[:-1] + [output.Row(rows[-1].cells, rows[-1].notes + problem)]


def _row(engine: EngineView, node: str, seen: EngineObserved) -> output.Row:
    notes = [] if seen.is_plain else [seen.message + _percent(seen)]
    if seen.hint and not seen.is_plain:
        notes.append(f"try: {seen.hint}")
    return output.Row((engine.name, engine.version, node, seen.phase.value, seen.source,
                       ", ".join(seen.devices)), tuple(note for note in notes if note))


def _percent(seen: EngineObserved) -> str:
    if not seen.message or not seen.total_bytes or seen.done_bytes is None or "%" in seen.message:
        return ""
    return f" ({seen.done_bytes * 100 // seen.total_bytes} % of {output.size(seen.total_bytes)})"


def _lock(options: argparse.Namespace, client: Any) -> int:
    engine = wanted(client, options.engine)
    if options.text:
        path = paths.fill(paths.ENGINE_LOCK, engine=engine.name, version=engine.version, platform=options.text)
        output.write(client.request("GET", path).body.decode("ascii").rstrip("\n"))
        return 0
    path = paths.fill(paths.ENGINE_LOCKS, engine=engine.name, version=engine.version)
    data = client.json("DELETE" if options.what == "relock" else "GET", path)
    if options.json:
        output.write_json(data)
        return 0
    found = [wire.LOCK_VIEW.decode(item, "list of packages") for item in data["items"]]
    if options.what == "relock":
        output.say(f"{engine.name} {engine.version}: {len(found)} lists forgotten; the next node makes a new one. "
                   "Nodes install it beside the old packages, then what runs of those is replaced")
        return 0
    output.write_table(LOCK_TITLES, [_lock_row(view) for view in found],
                       empty=f"{engine.name} {engine.version}: no list yet, the first node that installs it makes one")
    return 0


def _lock_row(view: LockView) -> output.Row:
    if not view.sha256:
        return output.Row((view.engine, view.version, view.platform, view.as_of, "", "", ""),
                          ("a new list is made by the next node",))
    return output.Row((view.engine, view.version, view.platform, view.as_of, str(view.packages), view.source,
                       view.sha256[:12]))


def wanted(client: Any, name: str) -> EngineView:
    if not name:
        raise UsageError("which engine?", hint="llmgw.pyz ctl engines lock vllm")
    for engine in client.items(paths.ENGINES, wire.ENGINE_VIEW):
        if engine.name == name:
            return engine
    raise NotFound(f"{name:.60} is not among the wanted engines", hint="engines: in server.yaml names them")
