"""Heartbeat loops: one, and while the agent moves to the next control plane a second one beside it; never a third.

The old loop may still be in its call when the new one begins. It makes no further call, and what it
brings late is taken only where it is newer than what the new one brought (epoch, then generation).
"""
from __future__ import annotations

import logging
import random
import threading
import time
from typing import Callable, List, Optional

from llmgw.domain.errors import LlmgwError

log = logging.getLogger(__name__)

MOST_LOOPS = 2
MOVE_SECONDS = 3.0                # a call that takes longer: ask the next control plane as well
LOOK_SECONDS = 0.2
PAUSE_SECONDS = 5.0               # between two rounds through control planes that all fail

Beat = Callable[[int], float]     # one call to the control plane of that number; returns when to call again


class _Loop:
    """One thread that calls one control plane again and again, until it is left or fails."""

    def __init__(self, door: int, beat: Beat, stop: threading.Event, poke: threading.Event) -> None:
        self.door, self._beat, self._stop, self._poke = door, beat, stop, poke
        self.left = threading.Event()
        self.ended = threading.Event()
        self.error: Optional[LlmgwError] = None
        self.answered = False
        self.call_since: Optional[float] = time.monotonic()
        self.thread = threading.Thread(target=self._run, name=f"heartbeat-{door}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            while not self.left.is_set() and not self._stop.is_set():
                self.call_since = time.monotonic()
                wait = self._beat(self.door)
                self.call_since, self.answered = None, True
                if self.left.is_set():
                    break
                self._poke.wait(wait)             # only the newest loop waits here: no poke is lost to an old one
        except LlmgwError as error:
            self.error = error
        except Exception:
            log.exception("heartbeat loop failed")
            self.error = LlmgwError("the heartbeat failed inside the agent; see its log")
        finally:
            self.ended.set()

    def is_late(self, now: float) -> bool:
        since = self.call_since
        return since is not None and now - since > MOVE_SECONDS


class HeartbeatLoops:
    """Sees to it that some control plane hears this node; ``turn`` is called by one thread, often."""

    def __init__(self, beat: Beat, doors: int, stop: threading.Event, poke: threading.Event,
                 moved: Callable[[int], None], failed: Callable[[LlmgwError], object]) -> None:
        self._beat, self._doors, self._stop, self._poke = beat, doors, stop, poke
        self._moved, self._failed = moved, failed
        self._loops: List[_Loop] = []             # the newest is last
        self._tried = 0                           # control planes in a row that did not answer
        self._not_before = 0.0

    def turn(self) -> Optional[float]:
        """Look at the loops; start another where the newest has ended, failed, or hangs in a call."""
        self._loops = [one for one in self._loops[:-1] if not one.ended.is_set()] + self._loops[-1:]
        newest = self._loops[-1] if self._loops else None
        if newest is None:
            self._start(0)
            return LOOK_SECONDS
        if newest.answered and newest.error is None:
            self._tried = 0
        now = time.monotonic()
        if newest.ended.is_set() and not self._stop.is_set():
            self._after_failure(newest, now)
        elif newest.is_late(now) and sum(not one.ended.is_set() for one in self._loops) < MOST_LOOPS:
            newest.left.set()
            log.warning("no answer from a control plane within %.0f s, the next one is asked too", MOVE_SECONDS)
            self._start(newest.door + 1)
        return LOOK_SECONDS

    def _after_failure(self, newest: _Loop, now: float) -> None:
        if newest.error is not None:
            error, newest.error = newest.error, None
            self._failed(error)
            self._tried += 1
            if self._tried >= self._doors:        # all of them: no hurry
                self._not_before = now + PAUSE_SECONDS * (0.5 + random.random() / 2)
        if now >= self._not_before:
            self._start(newest.door + 1)

    def _start(self, door: int) -> None:
        door %= self._doors
        self._moved(door)
        self._loops = [one for one in self._loops if not one.ended.is_set()]
        self._loops.append(_Loop(door, self._beat, self._stop, self._poke))
