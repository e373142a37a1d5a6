"""Run a program to its end. Long-running programs: see spawn.py."""
from __future__ import annotations

import os
import signal
import subprocess
from typing import Optional

from llmgw.domain.command import Command, Outcome
from llmgw.domain.errors import CommandFailed

MAX_OUTPUT_BYTES = 4 << 20


class Processes:
    """Runs commands with a deadline; a fake of it needs only ``run``."""

    def run(self, command: Command, *, timeout: float, user: Optional[int] = None,
            group: Optional[int] = None) -> Outcome:
        """Return what ``command`` said. CommandFailed when it cannot start or does not end in time.

        The whole process group is killed at the deadline. ``user`` and ``group``
        are numeric ids to run as, when this process is root.
        """
        try:
            child = subprocess.Popen(
                command.argv, env={**command.env, **command.secret_env}, cwd=command.cwd,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                start_new_session=True, close_fds=True, user=user, group=group,
                extra_groups=[] if user is not None else None)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise CommandFailed(f"cannot run {command.argv[0]}: {why}") from error
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


def _text(data: bytes) -> str:
    return data[:MAX_OUTPUT_BYTES].decode("utf-8", "replace")
