"""A transfer that sends next to nothing is told from one that is slow."""
from __future__ import annotations

import time
from typing import Optional

from llmgw.domain.errors import Unreachable

STALLED_SECONDS = 60.0
STALLED_BYTES = 64 << 10          # less than this in STALLED_SECONDS is a stalled source


class Stall:
    """Raises Unreachable when next to nothing comes for ``seconds``, or no chunk in ``chunk_seconds``."""

    def __init__(self, seconds: float, chunk_seconds: Optional[float] = None) -> None:
        self._seconds, self._chunk_seconds = seconds, chunk_seconds
        self._since, self._bytes = time.monotonic(), 0
        self._began = self._since

    def begins(self) -> None:
        """Take note that the next chunk begins."""
        self._began = time.monotonic()

    def saw(self, count: int) -> None:
        """Take note of bytes that came."""
        self._bytes += count
        now = time.monotonic()
        if self._chunk_seconds is not None and now - self._began > self._chunk_seconds:
            raise Unreachable(f"it is too slow: a chunk has not come in {self._chunk_seconds:g} seconds")
        if self._bytes >= STALLED_BYTES:
            self._since, self._bytes = now, 0
        elif now - self._since > self._seconds:
            raise Unreachable(f"the transfer has stalled: {self._bytes} bytes in {now - self._since:.0f} seconds")
