"""Places where a test may kill this process: ``LLMGW_FAILPOINT=NAME:kill@3`` dies at the third pass.

Nothing happens unless the variable names the place; it is read once, at import.
"""
from __future__ import annotations

import errno
import os
import signal
import threading

_spec = os.environ.get("LLMGW_FAILPOINT", "")
_name, _, _rest = _spec.partition(":")
_action, _, _count = _rest.partition("@")
_left = int(_count) if _count.isdigit() else 1
_lock = threading.Lock()


def reach(name: str) -> None:
    """Pass a named place; ``kill`` ends the process at once, ``eio`` and ``enospc`` raise OSError."""
    global _left
    if name != _name:
        return
    with _lock:
        _left -= 1
        if _left != 0:
            return
    if _action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if _action in ("eio", "enospc"):
        code = errno.EIO if _action == "eio" else errno.ENOSPC
        raise OSError(code, os.strerror(code))
