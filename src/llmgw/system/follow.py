"""Run a long program to its end, line by line: what it says is passed on while it works, and it can be told to stop."""
from __future__ import annotations

import os
import selectors
import subprocess
import time
from typing import Callable, Dict, List, Tuple

from llmgw.domain.command import Command, Outcome
from llmgw.domain.errors import CommandFailed
from llmgw.system import spawn
from llmgw.system.process import cannot_run, identity

KEPT_LINES = 400                  # of its output, the last ones
LINE_BYTES = 16 << 10
TURN_SECONDS = 0.2
GRACE_SECONDS = 5.0


class Stopped(CommandFailed):
    """It was ended because this process is about to stop."""

    reason = "Stopped"


def follow(command: Command, marker: spawn.Marker, *, seconds: float, line: Callable[[str], None],
           stopping: Callable[[], bool]) -> Outcome:
    """Return what ``command`` said at the end; ``line`` gets every line as it comes.

    CommandFailed when it cannot start or is not done after ``seconds``; Stopped when
    ``stopping`` says so. Then it is ended, with all it started. The marker is in its
    environment: should we die meanwhile, the next start finds and ends it by that.
    """
    try:
        child = subprocess.Popen(
            command.argv, env={**command.env, **command.secret_env, marker[0]: marker[1]}, cwd=command.cwd,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
            close_fds=True, **identity(command.run_as))
    except (OSError, ValueError) as error:
        raise cannot_run(command, error) from error
    assert child.stdout is not None and child.stderr is not None
    said: Dict[int, List[str]] = {child.stdout.fileno(): [], child.stderr.fileno(): []}
    out, err = child.stdout.fileno(), child.stderr.fileno()
    try:
        _listen(said, time.monotonic() + seconds, line, stopping, lambda: child.poll() is not None)
    except TimeoutError:
        raise CommandFailed(f"{command.argv[0]}: no end after {seconds:g} seconds, killed") from None
    except InterruptedError:
        raise Stopped(f"{command.argv[0]}: ended, because llmgw stops") from None
    finally:
        spawn.stop(marker, grace_seconds=GRACE_SECONDS)      # leave nothing of it running
        child.wait()
        child.stdout.close()
        child.stderr.close()
    return Outcome(child.returncode, "\n".join(said[out]), "\n".join(said[err]))


def _listen(said: Dict[int, List[str]], deadline: float, line: Callable[[str], None],
            stopping: Callable[[], bool], ended: Callable[[], bool]) -> None:
    rests: Dict[int, bytes] = dict.fromkeys(said, b"")
    with selectors.DefaultSelector() as waiting:
        for handle in said:
            os.set_blocking(handle, False)
            waiting.register(handle, selectors.EVENT_READ)
        while waiting.get_map():
            if stopping():
                raise InterruptedError
            if time.monotonic() > deadline:
                raise TimeoutError
            ready = waiting.select(TURN_SECONDS)
            for key, _ in ready:
                piece = os.read(key.fd, 1 << 16)
                lines, rests[key.fd] = _split(rests[key.fd] + piece, not piece)
                for text in lines:
                    line(text)
                said[key.fd] = (said[key.fd] + lines)[-KEPT_LINES:]
                if not piece:
                    waiting.unregister(key.fd)
            if not ready and ended():             # what it left behind may hold the pipes open
                return


def _split(data: bytes, whole: bool) -> Tuple[List[str], bytes]:
    """Return the lines of ``data`` and its unfinished rest. A line may end in CR: that is how bars are drawn."""
    parts = data.replace(b"\r", b"\n").split(b"\n")
    rest = b"" if whole else parts[-1][-LINE_BYTES:]
    lines = parts if whole else parts[:-1]
    return [part[:LINE_BYTES].decode("utf-8", "replace") for part in lines if part.strip()], rest
