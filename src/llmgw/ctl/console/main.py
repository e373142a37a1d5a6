"""The cluster on one screen, kept up to date; arrows, Enter, ? for help, q to leave."""
from __future__ import annotations

import argparse
import sys

from llmgw.ctl.connection import connect
from llmgw.domain.errors import UsageError


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ollama-dir", metavar="DIR", default="",
                        help="Ollama's folder of models on this machine (default: where Ollama looks)")


def action(options: argparse.Namespace) -> int:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("the console needs a terminal", hint="llmgw.pyz ctl nodes --watch shows the same to a pipe")
    try:
        from llmgw.ctl.console import terminal
    except ImportError:
        raise UsageError("this Python was built without curses",
                         hint="install it (python3-curses), or use llmgw.pyz ctl nodes --watch") from None
    from llmgw.ctl.console.feed import Feed
    from llmgw.ctl.console.state import State
    client = connect(options)
    feed = Feed(client, options.ollama_dir)
    feed.start()
    try:
        terminal.run(feed, State(url=client.url))
    finally:
        feed.close()
    return 0
