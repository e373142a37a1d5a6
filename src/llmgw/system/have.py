"""Which chunks of a file that still comes are proven: told beside it, so that others can be given those already.

The size in sixteen digits and a line's end, then one byte for each chunk: shares.NOTHING, HERE or COMING.
"""
from __future__ import annotations

import os
import re
from typing import Optional, Sequence, Tuple

from llmgw.domain.model import chunk_count
from llmgw.system.files import read_bytes, remove, storing, write_at
from llmgw.system.shares import HERE

SUFFIX = ".have"
_HEAD = 17
_TEXT = re.compile(rb"[0-9]{16}\n[012]*")


class Have:
    """Written by who fetches. It begins empty: what lies here from before counts once it was read again."""

    def __init__(self, partial: str, size: int) -> None:
        self._path = partial + SUFFIX
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        with storing("open", self._path):
            self._file = os.open(self._path, flags, 0o644)
        with storing("write", self._path):
            write_at(self._file, b"%016d\n" % size + b"0" * chunk_count(size), 0)

    def mark(self, run: Sequence[int], state: str = HERE) -> None:
        """Say how it is with chunks."""
        with storing("write", self._path):
            for index in run:
                os.pwrite(self._file, state.encode("ascii"), _HEAD + index)

    def close(self) -> None:
        os.close(self._file)


def read(partial: str) -> Optional[Tuple[int, str]]:
    """Return (size, one letter for each chunk) of a file that still comes; None when nothing of it is known."""
    data = read_bytes(partial + SUFFIX)
    if data is None or _TEXT.fullmatch(data) is None:
        return None
    size = int(data[:_HEAD])
    return (size, data[_HEAD:].decode("ascii")) if len(data) - _HEAD == chunk_count(size) else None


def forget(partial: str) -> None:
    """Remove what stands beside a file that has come."""
    remove(partial + SUFFIX)
