"""Let a held-back change of server.yaml go ahead: one that stops more than half of a model's replicas."""
from __future__ import annotations

import argparse

from llmgw.api import paths
from llmgw.ctl import output
from llmgw.ctl.connection import connect
from llmgw.domain.errors import ApiError, ConfigError


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--confirm", action="store_true", help="yes, stop what the edit stops")


def action(options: argparse.Namespace) -> int:
    """0: in force; 3: it still waits for a confirmation; 78: the file cannot be used."""
    try:
        answer = connect(options).json("POST", paths.APPLY, {"confirm": options.confirm})
    except ApiError as error:
        if error.status != 400:
            raise
        raise ConfigError(error.message, hint=error.hint) from None
    if answer["applied"]:
        output.say("server.yaml is in force as it is on the server's disk")
        return 0
    for reason in answer["needs_confirm"]:
        output.say(f"waits: {reason}")
    output.say("  try: llmgw.pyz ctl apply --confirm")
    return 3
