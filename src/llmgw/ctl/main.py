"""``ctl``: the table of commands.

Each command is a module with ``arguments(parser)`` and ``action(options)``; one with
commands of its own sets ``action`` per command instead.
"""
from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any, List

from llmgw.ctl import connection
from llmgw.domain.errors import ApiError, UsageError

# name: (module, one line of help)
COMMANDS = {
    "nodes": ("nodes", "the machines, what they are and whether they answer; forget one"),
    "models": ("models", "what is served, and why something is not"),
    "replicas": ("replicas", "each served copy and where it runs"),
    "engines": ("engines", "each engine on each node"),
    "events": ("events", "what changed, when and why"),
    "logs": ("logs", "the end of a replica's engine log"),
    "keys": ("keys", "users' keys: create, list, revoke"),
    "token": ("token", "let machines and people in: create, list, revoke"),
    "mirror": ("mirror", "weights and engine archives: import, import-ollama, pull, list, verify ..."),
    "engine-check": ("engine_check", "whether an engine here takes every flag llmgw would give it"),
    "console": ("console.main", "the cluster on one screen: nodes, mirror"),
    "support-bundle": ("support_bundle", "one file with states, first failures, events and logs, for who helps"),
    "plan": ("plan", "what a server.yaml would start, stop and move"),
    "apply": ("apply", "let a held-back change of server.yaml go ahead"),
    "drain": ("drain", "let a node finish what it does and take nothing new"),
    "undrain": ("undrain", "let a node take work again"),
    "backup": ("backup", "write the whole database to a file"),
    "restore": ("restore", "put a backup in place of the database"),
}
_EXIT_CODES = {"InvalidConfig": 78, "TryAgain": 75}   # by the server's own word


def run(argv: List[str], debug: bool = False) -> int:
    """Run one ctl command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="llmgw.pyz ctl", description="Look at the cluster and change it.",
        formatter_class=argparse.RawDescriptionHelpFormatter, epilog=_list(), usage="%(prog)s COMMAND ...")
    parser.add_argument("command", metavar="COMMAND", nargs="?", help=argparse.SUPPRESS)
    if not argv or argv[0] in ("-h", "--help"):
        parser.print_help(sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    if argv[0] not in COMMANDS:
        raise _unknown(argv[0])
    module = importlib.import_module(f"llmgw.ctl.{COMMANDS[argv[0]][0]}")
    options = _options(module, argv[0], argv[1:])
    try:
        return int((getattr(options, "action", None) or module.action)(options) or 0)
    except ApiError as error:
        error.exit_code = _EXIT_CODES.get(error.reason, 75 if error.status == 503 else 1)
        raise
    finally:
        connection.close_all()


def _options(module: Any, name: str, words: List[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"llmgw.pyz ctl {name}", description=module.__doc__.split("\n")[0],
                                     allow_abbrev=False)
    module.arguments(parser)
    if hasattr(module, "action") and not parser.get_default("offline"):
        connection.add_options(parser)
    return parser.parse_args(words)


def _list() -> str:
    return "\n".join(["commands:"] + [f"  {name:<16}{text}" for name, (_, text) in COMMANDS.items()]
                     + ["", "llmgw.pyz ctl COMMAND --help tells more about each."])


def _unknown(name: str) -> UsageError:
    import difflib
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    return UsageError(f"ctl: unknown command {name!r:.60}",
                      hint=f"llmgw.pyz ctl {near[0]}" if near else "llmgw.pyz ctl --help lists them")
