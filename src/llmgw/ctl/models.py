"""The models of server.yaml: how many replicas are ready, and each node's words where one is not."""
from __future__ import annotations

import argparse
from typing import List

from llmgw.api import paths, wire
from llmgw.ctl import output, watch
from llmgw.ctl.connection import connect
from llmgw.domain.view import ModelView, WeightsOnNode

TITLES = ("MODEL", "READY", "ENGINE", "TASK", "CONTEXT", "SIZE", "WEIGHTS")


def arguments(parser: argparse.ArgumentParser) -> None:
    watch.arguments(parser)


def action(options: argparse.Namespace) -> int:
    client = connect(options)

    def once() -> None:
        data = client.json("GET", paths.MODELS)
        if options.json:
            return output.write_json(data)
        models = [wire.MODEL_VIEW.decode(item, "model") for item in data["items"]]
        output.write_table(TITLES, [_row(model) for model in models],
                           empty="no model is wanted: name one under models: in server.yaml")
        if data.get("config_problem"):
            output.say(f"server.yaml is not used as it is now: {data['config_problem']}")
        for reason in data.get("held") or ():
            output.say(f"an edit waits for llmgw.pyz ctl apply --confirm: {reason}")

    return watch.show(options, once)


def _row(model: ModelView) -> output.Row:
    notes = [f"also called: {', '.join(model.aliases)}"] if model.aliases else []
    if model.ready < model.wanted:
        notes += model.why_not
    notes += ["vision: yes"] if model.vision else []
    notes += [f"weights on {where}" for where in weights_lines(model)]
    return output.Row((
        model.name, f"{model.ready}/{model.wanted}", f"{model.engine} {model.engine_version}".strip(),
        model.task, output.count(model.context_length), output.size(model.size_bytes), model.weights),
        tuple(notes))


def weights_lines(model: ModelView) -> List[str]:
    """Return where the weights are, one line per node: absent, 43 % (2m left), whole, damaged."""
    return [f"{on.node}: {weights_word(on)}" for on in model.nodes]


def weights_word(on: WeightsOnNode) -> str:
    """Return where one node stands with weights."""
    if on.phase == "fetching":
        return f"{on.percent} %" + (f" ({output.age(on.seconds_left)} left)" if on.seconds_left is not None else "")
    return on.phase + (f": {on.message}" if on.message else "")
