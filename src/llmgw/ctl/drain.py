"""Let a node finish what it does and take nothing new; undrain ends that."""
from __future__ import annotations

import argparse

from llmgw.api import paths
from llmgw.ctl import output
from llmgw.ctl.connection import connect


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("node", metavar="NODE", help="as `ctl nodes` shows it")


def action(options: argparse.Namespace) -> int:
    connect(options).json("POST", paths.fill(paths.DRAIN_NODE, node=options.node))
    output.say(f"node {options.node} is draining: its replicas move where there is room, running requests finish")
    return 0
