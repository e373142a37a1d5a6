"""The ends of log files, and their size."""
from __future__ import annotations

import contextlib
import os

KEPT_BYTES = 1 << 20


def read(path: str, limit: int) -> str:
    """Return the last whole lines of a file, at most ``limit`` bytes; empty when there is none."""
    try:
        with open(path, "rb") as source:
            size = os.fstat(source.fileno()).st_size
            source.seek(max(0, size - limit))
            data = source.read(limit)
    except OSError:
        return ""
    if size > limit:
        data = data.partition(b"\n")[2] or data
    return data.decode("utf-8", "replace")


def rotate(path: str) -> None:
    """Keep the log of the run before as ``.1``, so that a restart does not lose why it was needed."""
    with contextlib.suppress(OSError):       # none yet; or a disk that takes no change: the log goes on in it
        os.replace(path, path + ".1")


def bound(path: str, limit: int) -> None:
    """Cut a log over ``limit`` bytes; its end goes to ``.1``. Its writer appends, so it goes on at 0."""
    try:
        if os.stat(path).st_size <= limit:
            return
        end = read(path, KEPT_BYTES).encode("utf-8", "replace")
        with open(path + ".1", "wb") as kept:
            kept.write(end)
        os.truncate(path, 0)
    except OSError:
        pass                              # a full disk must not end the watching
