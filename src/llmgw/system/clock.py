"""The time. Deciders never ask for it; they are told."""
from __future__ import annotations

import time

_BOOT = getattr(time, "CLOCK_BOOTTIME", None)


class Clock:
    """``monotonic`` never jumps and counts suspended time where the system can; ``wall`` is for people."""

    def monotonic(self) -> float:
        return time.clock_gettime(_BOOT) if _BOOT is not None else time.monotonic()

    def wall(self) -> float:
        return time.time()
