"""Long work shows that it goes on: a bar on a terminal, one line per 10 % elsewhere."""
from __future__ import annotations

import sys
import time
from typing import Optional, TextIO

from llmgw.ctl.output import clean, cut, size, width_of


class Progress:
    """Counts bytes of one task up to a known total; ``done`` ends the line."""

    def __init__(self, what: str, total_bytes: int, stream: Optional[TextIO] = None, *,
                 quiet_seconds: float = 1.0) -> None:
        self._quiet_seconds = quiet_seconds
        self._what, self._total = clean(what), total_bytes
        self._stream = sys.stderr if stream is None else stream
        self._bar = self._stream.isatty()
        self._bytes, self._said, self._drawn = 0, 0, 0.0
        self._open = False

    def __call__(self, more_bytes: int) -> None:
        """Count ``more_bytes`` and show it when there is something new to see."""
        self.at(self._bytes + more_bytes)

    def at(self, done_bytes: int) -> None:
        """Show that ``done_bytes`` are done."""
        self._bytes = done_bytes
        if self._bar:
            now = time.monotonic()
            if now - self._drawn >= 0.1:
                self._drawn = now
                self._draw()
        elif self._percent() // 10 > self._said:
            now = time.monotonic()
            if self._said and self._percent() < 100 and now - self._drawn < self._quiet_seconds:
                return                       # so fast that nobody waits for it
            self._said, self._drawn = self._percent() // 10, now
            self._print(f"{self._what}: {self._said * 10} % of {size(self._total)}\n")

    def done(self) -> None:
        """Leave the final state on its own line."""
        if self._bar and self._open:
            self._draw()
            self._print("\n")
            self._open = False

    def _percent(self) -> int:
        return 100 if self._total <= 0 else min(100, self._bytes * 100 // self._total)

    def _draw(self) -> None:
        self._open = True
        percent = self._percent()
        tail = f" {percent:3d} % of {size(self._total)}"
        room = max(10, width_of(self._stream) - len(tail) - 3)
        cells = max(0, min(30, room - len(self._what) - 3))
        filled = "#" * (cells * percent // 100)
        bar = f" [{filled:<{cells}}]" if cells >= 5 else ""
        self._print(f"\r{cut(self._what, room - len(bar))}{bar}{tail}")

    def _print(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
