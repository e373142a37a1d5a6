"""A file that is still being written, read from its start as far as it has come."""
from __future__ import annotations

import os
import threading
from typing import BinaryIO, Optional

from llmgw.system.files import storing

WAIT_SECONDS = 600.0              # for the writer's next sign of life; it has shorter deadlines of its own


class Abandoned(Exception):
    """The writer gave up; what was read so far is worth nothing."""


class Growing:
    """One thread writes the file at ``path`` and says how far it is, another one reads."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: Optional[BinaryIO] = None
        self._at, self._have = 0, 0
        self._whole = self._given_up = False
        self._news = threading.Condition()

    def reaches(self, count: int) -> None:
        """Note that the first ``count`` bytes are on disk."""
        with self._news:
            if self._file is None and count:     # open it now: at the end it is renamed
                with storing("open", self._path):
                    self._file = open(self._path, "rb", buffering=0)
            self._have = max(self._have, count)
            self._news.notify_all()

    def ends(self, whole: bool) -> None:
        """Note that nothing more comes."""
        with self._news:
            self._whole, self._given_up = whole, not whole
            self._news.notify_all()

    def read(self, size: int) -> bytes:
        """Return what comes next, up to ``size`` bytes, waiting for it; b"" at the end of a whole file."""
        with self._news:
            while self._at >= self._have and not self._whole and not self._given_up:
                if not self._news.wait(WAIT_SECONDS):
                    raise Abandoned
            if self._given_up:
                raise Abandoned
            count = min(size, self._have - self._at)
        if count <= 0 or self._file is None:
            return b""
        data = os.pread(self._file.fileno(), count, self._at)
        self._at += len(data)
        return data

    def tell(self) -> int:
        return self._at

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
