"""How fast bytes may leave: one measure for all who send."""
from __future__ import annotations

import threading
import time

WAIT_SECONDS = 0.25               # the longest wait for a single piece, so that many senders take turns
SMALLEST_BYTES = 64 << 10


class Pace:
    """Counts what is sent, and holds it to ``bytes_per_second``; 0 is as fast as it goes."""

    def __init__(self, bytes_per_second: int = 0) -> None:
        self.bytes_per_second = bytes_per_second
        self.sent_bytes = 0
        self._lock = threading.Lock()
        self._free_at = 0.0           # when what was let go so far will have been sent

    def take(self, wanted: int) -> int:
        """Wait for this sender's turn, and return how many of ``wanted`` bytes it may send now."""
        rate = self.bytes_per_second
        with self._lock:
            if rate > 0:
                wanted = min(wanted, max(SMALLEST_BYTES, int(rate * WAIT_SECONDS)))
            self.sent_bytes += wanted
            now = time.monotonic()
            wait = self._free_at - now if rate > 0 else 0.0
            self._free_at = max(now, self._free_at) + wanted / rate if rate > 0 else now
        if wait > 0:
            time.sleep(wait)
        return wanted
