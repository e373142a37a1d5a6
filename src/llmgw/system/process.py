"""Run a program to its end. Long-running programs: see spawn.py."""
from __future__ import annotations

import dataclasses
import os
import signal
import stat
import subprocess
from typing import Any, Callable, Dict, Optional, Sequence

from llmgw.domain.command import Command, Outcome, RunAs
from llmgw.domain.errors import CommandFailed

MAX_OUTPUT_BYTES = 4 << 20


class Processes:
    """Runs commands with a deadline; a fake of it needs only ``run``.

    ``run_as`` says whom the commands run as that do not say so themselves; None: as we do.
    """

    def __init__(self, run_as: Callable[[], Optional[RunAs]] = lambda: None) -> None:
        self._run_as = run_as

    def run(self, command: Command, *, timeout: float) -> Outcome:
        """Return what ``command`` said. CommandFailed when it cannot start or does not end in time.

        The whole process group is killed at the deadline.
        """
        if command.run_as is None:
            command = dataclasses.replace(command, run_as=self._run_as())
        try:
            child = subprocess.Popen(
                command.argv, env={**command.env, **command.secret_env}, cwd=command.cwd,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                start_new_session=True, close_fds=True, **identity(command.run_as))
        except (OSError, ValueError) as error:
            raise cannot_run(command, error) from error
        try:
            out, err = child.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            try:
                os.killpg(child.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            child.communicate()
            raise CommandFailed(f"{command.argv[0]}: no end after {timeout:g} seconds, killed") from None
        return Outcome(child.returncode, _text(out), _text(err))


def identity(run_as: Optional[RunAs]) -> Dict[str, Any]:
    """Return what subprocess.Popen must be told to run a program as somebody else."""
    if run_as is None:
        return {}
    return {"user": run_as.uid, "group": run_as.gid, "extra_groups": list(run_as.groups)}


def cannot_run(command: Command, error: Exception) -> CommandFailed:
    """Return our error for a program that cannot be started; it names the folder that its user may not enter."""
    program = command.argv[0]
    if command.run_as is not None and isinstance(error, PermissionError):
        closed = barrier(program, command.run_as.uid, (command.run_as.gid, *command.run_as.groups))
        if closed:
            return CommandFailed(f"cannot run {program}: the user {command.run_as.name} may not enter {closed}",
                                 hint=f"put it where {command.run_as.name} can run it, such as /opt")
    return CommandFailed(f"cannot run {program}: {getattr(error, 'strerror', None) or error}")


def barrier(path: str, uid: int, groups: Sequence[int]) -> str:
    """Return the first folder above ``path`` that this user may not enter, as its mode tells; empty: none."""
    place, found = os.path.dirname(os.path.realpath(path)), ""
    while True:
        try:
            seen = os.stat(place)
        except OSError:
            return place
        bit = stat.S_IXUSR if seen.st_uid == uid else stat.S_IXGRP if seen.st_gid in groups else stat.S_IXOTH
        if not seen.st_mode & bit:
            found = place
        if place == os.path.dirname(place):
            return found
        place = os.path.dirname(place)


def _text(data: bytes) -> str:
    return data[:MAX_OUTPUT_BYTES].decode("utf-8", "replace")
