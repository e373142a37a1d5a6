"""Each engine that the cluster wants, on each node, in the node's own words."""
from __future__ import annotations

import argparse
from typing import List

from llmgw.api import paths, wire
from llmgw.ctl import output, watch
from llmgw.ctl.connection import connect
from llmgw.domain.engine import EngineObserved
from llmgw.domain.view import EngineView

TITLES = ("ENGINE", "VERSION", "NODE", "STATE", "FROM", "DEVICES")


def arguments(parser: argparse.ArgumentParser) -> None:
    watch.arguments(parser)


def action(options: argparse.Namespace) -> int:
    client = connect(options)

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
    notes = [] if seen.usable else [seen.message + _percent(seen)]
    if seen.hint and not seen.usable:
        notes.append(f"try: {seen.hint}")
    return output.Row((engine.name, engine.version, node, seen.phase.value, seen.source,
                       ", ".join(seen.devices)), tuple(note for note in notes if note))


def _percent(seen: EngineObserved) -> str:
    if not seen.message or not seen.total_bytes or seen.done_bytes is None or "%" in seen.message:
        return ""
    return f" ({seen.done_bytes * 100 // seen.total_bytes} % of {output.size(seen.total_bytes)})"
