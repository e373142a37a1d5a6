"""A process that must not outlive its owner: a pipe that only the owner holds open tells it.

The kernel closes the owner's end however the owner dies, kill -9 included, and
on every Unix; PR_SET_PDEATHSIG would follow the owner's *thread* and Linux only.
"""
from __future__ import annotations

import os
import threading
from typing import Optional, Protocol

OWNER_FD = "LLMGW_OWNER_FD"       # names the read end in the child's environment
GRACE_SECONDS = 90.0              # an orderly stop that takes longer has hung


class Settable(Protocol):
    """An event, or whatever stands for one."""

    def set(self) -> None: ...


def watch(stop: Settable, *, grace_seconds: float = GRACE_SECONDS) -> Optional[threading.Thread]:
    """Set ``stop`` when the owner is gone; None, and nothing to watch, without an owner.

    A process that has not ended ``grace_seconds`` later is ended here: nobody
    is left who could.
    """
    named = os.environ.pop(OWNER_FD, "")     # popped: what we start has another owner
    if not named.isdigit():
        return None
    handle = int(named)
    os.set_inheritable(handle, False)
    thread = threading.Thread(target=_wait, args=(handle, stop, grace_seconds), name="owner", daemon=True)
    thread.start()
    return thread


def _wait(handle: int, stop: Settable, grace_seconds: float) -> None:
    try:
        while os.read(handle, 64):           # the owner may write; only the end counts
            pass
    except OSError:
        pass
    stop.set()
    threading.Event().wait(grace_seconds)
    os._exit(1)
