"""Long-running programs: started in a session of their own, found again, and ended with all they started.

A program outlives whoever started it. It is known by (boot, pid, start time,
marker): the marker is in its environment and in that of everything below it.
"""
from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from typing import Callable, Dict, List, Optional, Set, Tuple

from llmgw.domain.command import Command
from llmgw.system import failpoint, proc
from llmgw.system.files import storing
from llmgw.system.process import cannot_run, identity

Marker = Tuple[str, str]          # (name, value) of an environment variable
SHOWN_SECONDS = 10.0
ENDING_SECONDS = 2.0              # from the end of a program's first thread to that of its last


@dataclass(frozen=True)
class Identity:
    """Which process; written down, and compared as a whole before it is touched."""

    boot_id: str
    pid: int
    start: int
    marker_name: str
    marker_value: str

    @property
    def marker(self) -> Marker:
        return (self.marker_name, self.marker_value)


_children: Dict[int, subprocess.Popen] = {}      # ours to reap
_lock = threading.Lock()


def start(command: Command, marker: Marker, log_path: str) -> Identity:
    """Start ``command`` with the marker, its output appended to ``log_path``; return who it is.

    The caller has written down that it is about to start this marker: should we
    die before the identity is stored, ``find`` finds the program again.
    """
    environment = {**command.env, **command.secret_env, marker[0]: marker[1]}
    with storing("open", log_path):
        log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        child = subprocess.Popen(command.argv, env=environment, cwd=command.cwd,
                                 stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                 start_new_session=True, close_fds=True, **identity(command.run_as))
    except (OSError, ValueError) as error:
        raise cannot_run(command, error) from error
    finally:
        os.close(log)
    with _lock:
        _children[child.pid] = child
    failpoint.reach("spawn-after-exec")
    _wait_until_shown(child, marker)
    seen = proc.stat(child.pid)
    return Identity(proc.boot_id(), child.pid, seen.start if seen else 0, *marker)


def _wait_until_shown(child: subprocess.Popen, marker: Marker) -> None:
    """Popen returns when the exec can no longer fail, a little before the kernel shows the new environment."""
    deadline = time.monotonic() + SHOWN_SECONDS
    while (proc.environ(child.pid).get(marker[0]) != marker[1] and child.poll() is None
           and time.monotonic() < deadline):
        time.sleep(0.001)


def find(marker: Marker) -> Optional[Identity]:
    """Return the program that was started with ``marker``, by whomever; None when it does not run."""
    for process in sorted(proc.marked(*marker), key=lambda process: process.start):
        if process.session == process.pid:
            return Identity(proc.boot_id(), process.pid, process.start, *marker)
    return None


def alive(identity: Identity) -> bool:
    """True while exactly this process runs; not for a zombie, and not for a later user of its pid."""
    reap(identity.pid)
    seen = proc.stat(identity.pid)
    if seen is None or not seen.lives or seen.start != identity.start or identity.boot_id != proc.boot_id():
        return False
    return proc.environ(identity.pid).get(identity.marker_name) == identity.marker_value


def reap(pid: int) -> Optional[int]:
    """Return the exit code (negative: a signal) of a program this process started, None while unknown."""
    with _lock:
        child = _children.get(pid)
        return child.poll() if child is not None else None


def exit_code(pid: int) -> Optional[int]:
    """Return as ``reap`` does, after a short wait: a program's first thread may end long before its last."""
    with _lock:
        child = _children.get(pid)
    try:
        return child.wait(ENDING_SECONDS) if child is not None else None
    except subprocess.TimeoutExpired:
        return None


def forget(pid: int) -> None:
    """Stop keeping the exit code of an ended program; one that still runs is left to itself."""
    with _lock:
        child = _children.pop(pid, None)
        if child is not None and child.poll() is None:
            child.returncode = 0        # else Popen warns that it still runs, as it should


def leave_all() -> None:
    """Give up all children: they run on, and whoever adopts them sees to them."""
    with _lock:
        known = list(_children)
    for pid in known:
        forget(pid)


def tree(marker: Marker) -> List[proc.Stat]:
    """Return all that runs with the marker, and all in the sessions of those."""
    found = {process.pid: process for process in proc.marked(*marker)}
    owned = {process.session for process in found.values() if process.session in found}
    found.update((process.pid, process) for process in proc.sessions(owned))
    return list(found.values())


def stop(marker: Marker, *, grace_seconds: float, kill_seconds: float = 30.0,
         waiting: Callable[[float], None] = time.sleep) -> List[int]:
    """End everything with the marker: TERM, wait, KILL, until nothing is left.

    Returns the pids that are still there ``kill_seconds`` after the KILL: stuck in
    the kernel, and a reason not to use what they hold.
    """
    known: Dict[int, int] = {}
    deadline = time.monotonic() + grace_seconds
    hard = deadline + kill_seconds
    told: Set[int] = set()
    while True:
        left = _left(marker, known)
        if not left:
            return []
        now = time.monotonic()
        if now >= hard:
            return sorted(process.pid for process in left)
        for process in left:
            if now >= deadline:
                _send(process, signal.SIGKILL)
            elif process.pid not in told:
                _send(process, signal.SIGTERM)
                told.add(process.pid)
        waiting(0.02 if now < deadline else 0.05)


def _left(marker: Marker, known: Dict[int, int]) -> List[proc.Stat]:
    """All of the tree, and those seen in it before that cleared their environment since."""
    with _lock:
        children = list(_children.values())
    for child in children:
        child.poll()
    found = {process.pid: process for process in tree(marker)}
    for pid, start_ticks in known.items():
        seen = proc.stat(pid)
        if seen is not None and seen.lives and seen.start == start_ticks:
            found[pid] = seen
    known.update((process.pid, process.start) for process in found.values())
    return list(found.values())


def _send(process: proc.Stat, number: int) -> None:
    """Signal exactly this process: the pidfd is opened first, then its start time is compared."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):           # a kernel before 5.3
        _send_by_pid(process, number)
        return
    try:
        seen = proc.stat(process.pid)
        if seen is not None and seen.start == process.start:
            signal.pidfd_send_signal(handle, number)
    except (ProcessLookupError, PermissionError):
        pass
    finally:
        os.close(handle)


def _send_by_pid(process: proc.Stat, number: int) -> None:
    seen = proc.stat(process.pid)
    if seen is None or seen.start != process.start:
        return
    try:
        os.kill(process.pid, number)
    except (ProcessLookupError, PermissionError):
        pass
