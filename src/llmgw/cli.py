"""Subcommand to role; the one place that turns an LlmgwError into text and an exit code.

Imports only the chosen role, so that ``--version`` and ``ctl`` start fast; not even ``typing`` and ``signal``,
which cost as much as all the rest (tests/bench/bench_start.py).
"""
from __future__ import annotations

import os
import sys

from llmgw import __version__

# name: (module with run(argv) -> exit code, what it does); hidden ones have no text
COMMANDS = {
    "up": ("llmgw.up", "serve from this one machine: server, agent and router together"),
    "server": ("llmgw.server.main", "the control plane"),
    "agent": ("llmgw.agent.main", "the node daemon: installs engines, runs replicas"),
    "router": ("llmgw.router.main", "the OpenAI-compatible endpoint"),
    "ctl": ("llmgw.ctl.main", "look at the cluster and change it"),
    "doctor": ("llmgw.ctl.doctor", "what this machine has, and lacks, for each engine"),
    "gate": ("llmgw.agent.gate_main", ""),
}
_SEE_TO_IT_THEMSELVES = ("agent", "gate")   # owned.watch; the gate belongs to no one


def usage() -> str:
    lines = ["usage: llmgw.pyz [--version] [--debug] COMMAND ...", ""]
    lines += [f"  {name:<8}{text}" for name, (_, text) in COMMANDS.items() if text]
    lines += ["", "llmgw.pyz COMMAND --help tells more about each."]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Run the command line and exit with its code (README: exit codes)."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words[:1]
    if debug:
        words = words[1:]
    if words and words[0] == "--version":
        print(f"llmgw {__version__}")
        sys.exit(0)
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage(), file=sys.stdout if words else sys.stderr)
        sys.exit(0 if words else 2)
    if words[0] not in COMMANDS:
        print(f"llmgw: unknown command {words[0]!r}\n\n{usage()}", file=sys.stderr)
        sys.exit(2)
    sys.exit(_run(words[0], words[1:], debug))


class _Terminate:
    """Stands for a stop event: the owner's end is a TERM, which every role takes in order."""

    def set(self) -> None:
        import signal
        os.kill(os.getpid(), signal.SIGTERM)


def _run(command: str, words: list[str], debug: bool) -> int:
    import importlib

    from llmgw.domain.errors import LlmgwError
    from llmgw.system import owned
    if command not in _SEE_TO_IT_THEMSELVES:
        owned.watch(_Terminate())
    try:
        code = int(importlib.import_module(COMMANDS[command][0]).run(words, debug=debug) or 0)
        sys.stdout.flush()
        return code
    except LlmgwError as error:
        if debug:
            raise
        print(f"llmgw: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"  try: {error.hint}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:           # `... | head`: whoever read has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)      # or the flush at exit complains once more
        return 1
