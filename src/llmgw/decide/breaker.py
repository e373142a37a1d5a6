"""Whether a replica is left out for a moment because requests to it fail.

A short local override of what the control plane says. Few bad requests cannot
open it: answers that say 5xx to one and the same request count once.
"""
from __future__ import annotations

import enum
from collections import deque
from typing import Deque, List, Optional, Set, Tuple

FAILURES = 5
SHARE = 0.5
WINDOW_SECONDS = 10.0
FIRST_OPEN_SECONDS = 5.0
MOST_OPEN_SECONDS = 60.0


class State(enum.Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half open"


class Event(enum.Enum):
    TOO_MANY_FAILURES = "too many failures"
    TIME_PASSED = "time passed"
    PROBE_SUCCEEDED = "probe succeeded"
    PROBE_FAILED = "probe failed"


TRANSITIONS = {
    State.CLOSED: {Event.TOO_MANY_FAILURES: State.OPEN},
    State.OPEN: {Event.TIME_PASSED: State.HALF_OPEN},
    State.HALF_OPEN: {Event.PROBE_SUCCEEDED: State.CLOSED, Event.PROBE_FAILED: State.OPEN},
}


class Breaker:
    """One replica's. The time comes in as a number; ``state`` is for metrics."""

    __slots__ = ("state", "_failures", "_successes", "_opened_at", "_open_seconds", "_probes")

    def __init__(self) -> None:
        self.state = State.CLOSED
        self._failures: Deque[Tuple[float, Optional[int]]] = deque(maxlen=64)
        self._successes: Deque[List[int]] = deque(maxlen=int(WINDOW_SECONDS) + 1)   # [second, count]
        self._opened_at = 0.0
        self._open_seconds = FIRST_OPEN_SECONDS
        self._probes = 0

    def allows(self, now: float) -> bool:
        """Return whether a request may go there; while half open, one at a time."""
        if self.state is State.CLOSED:
            return True
        if self.state is State.OPEN and now - self._opened_at >= self._open_seconds:
            self._move(Event.TIME_PASSED)
            self._probes = 0
        return self.state is State.HALF_OPEN and not self._probes

    def started(self) -> None:
        """A request goes there."""
        if self.state is State.HALF_OPEN:
            self._probes += 1

    def succeeded(self, now: float) -> None:
        """A request was answered with 2xx, to the end."""
        if self.state is State.HALF_OPEN:
            self._failures.clear()
            self._successes.clear()
            self._open_seconds = FIRST_OPEN_SECONDS
            self._move(Event.PROBE_SUCCEEDED)
        second = int(now)
        if self._successes and self._successes[-1][0] == second:
            self._successes[-1][1] += 1
        else:
            self._successes.append([second, 1])

    def neutral(self) -> None:
        """A request ended in a way that says nothing of the replica: 4xx, the client left."""
        if self._probes:
            self._probes -= 1

    def failed(self, now: float, request: Optional[int] = None) -> None:
        """A request failed; ``request`` tells apart those that were answered, None: there was no answer."""
        self._failures.append((now, request))
        if self.state is State.HALF_OPEN:
            self._open_seconds = min(self._open_seconds * 2, MOST_OPEN_SECONDS)
            self._opened_at = now
            self._move(Event.PROBE_FAILED)
        elif self.state is State.CLOSED and self._is_failing(now):
            self._opened_at = now
            self._move(Event.TOO_MANY_FAILURES)

    def _is_failing(self, now: float) -> bool:
        since = now - WINDOW_SECONDS
        answered: Set[int] = set()
        failures = 0
        for at, request in self._failures:
            if at < since:
                continue
            if request is None:
                failures += 1
            else:
                answered.add(request)
        failures += len(answered)
        successes = sum(count for second, count in self._successes if second >= since)
        return failures >= FAILURES and failures >= SHARE * (failures + successes)

    def _move(self, event: Event) -> None:
        self.state = TRANSITIONS[self.state][event]
