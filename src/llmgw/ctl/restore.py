"""Put a backup in place of the database, on the server's machine, while the server does not run."""
from __future__ import annotations

import argparse
import os
import sys

from llmgw.ctl import output
from llmgw.domain.command import Command
from llmgw.domain.errors import UsageError
from llmgw.system import data_dir
from llmgw.system.own_program import own_command, own_environment
from llmgw.system.process import Processes

RESTORE_SECONDS = 600.0


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="as `ctl backup` wrote it")
    parser.add_argument("--data-dir", metavar="FOLDER", default="",
                        help="the server's (without: the one of this machine, or that of `up`)")
    parser.set_defaults(offline=True)


def action(options: argparse.Namespace) -> int:
    folder = _folder(options.data_dir)
    if not os.path.isfile(options.file):
        raise UsageError(f"there is no file {options.file}")
    done = Processes().run(Command(
        (*own_command(), "server", "--restore", os.path.abspath(options.file), "--data-dir", folder),
        env={**os.environ, **own_environment()}), timeout=RESTORE_SECONDS)
    if done.code:
        sys.stderr.write("\n".join(output.lines(done.err.rstrip())) + "\n")
        return done.code
    output.say(f"{folder}: restored; at its next start the server hears every node before it acts")
    return 0


def _folder(given: str) -> str:
    for folder in (given, data_dir.role_dir("server"), os.path.join(data_dir.role_dir("up"), "server")):
        if folder and os.path.isdir(folder):
            return os.path.abspath(folder)
    raise UsageError("there is no server's data folder on this machine", hint="name it with --data-dir FOLDER")
