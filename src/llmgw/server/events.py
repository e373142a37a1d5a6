"""What changed, when and why: a bounded ring, in memory for readers and in the store for restarts."""
from __future__ import annotations

import logging
import threading
from collections import deque
from typing import Deque, List

from llmgw.api import wire
from llmgw.domain.errors import LlmgwError
from llmgw.domain.view import EventView
from llmgw.server import records
from llmgw.server.store import Delete, Operation, Put, Store
from llmgw.system.clock import Clock
from llmgw.system.logs import Said

log = logging.getLogger(__name__)

KEPT = 1000


class Events:
    """Any thread may ``add``; one thread calls ``flush``, which is what makes them last."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store, self._clock = store, clock
        self._kept: Deque[EventView] = deque(maxlen=KEPT)
        for entry in store.range(records.EVENTS):
            self._kept.append(wire.EVENT_VIEW.decode(entry.value, entry.key))
        self._next = self._kept[-1].id + 1 if self._kept else 1
        self._unwritten: List[EventView] = []
        self._said = Said()
        self._added = threading.Condition()

    def add(self, subject: str, reason: str, message: str, level: int = logging.INFO) -> None:
        """Tell of one change; it is logged too."""
        log.log(level, "%s reason=%s: %s", subject, reason, message)
        with self._added:
            event = EventView(self._next, self._clock.wall(), subject, reason, message)
            self._next += 1
            self._kept.append(event)
            self._unwritten.append(event)
            self._added.notify_all()

    def after(self, number: int, wait_seconds: float) -> List[EventView]:
        """Return the events younger than ``number``, oldest first; waits for a first one."""
        with self._added:
            self._added.wait_for(lambda: self._next > number + 1, wait_seconds)
            return [event for event in self._kept if event.id > number]

    def flush(self) -> None:
        """Write what is new. A store that is in trouble costs events their restart, nothing else."""
        with self._added:
            new, self._unwritten = self._unwritten, []
            oldest = self._kept[0].id if self._kept else 0
        if not new:
            return
        operations: List[Operation] = [Put(_key(event.id), wire.EVENT_VIEW.encode(event)) for event in new
                                       if event.id >= oldest]
        operations += [Delete(entry.key) for entry in self._store.range(records.EVENTS)
                       if entry.key < _key(oldest)]
        try:
            self._store.txn((), operations)
            if self._said.is_over("flush"):
                log.info("events are written again")
        except LlmgwError as error:
            if self._said.is_new("flush", error.message):
                log.warning("events are not written, a restart would forget them: %s", error.message)

    def wake(self) -> None:
        """Let waiting readers go; the server stops."""
        with self._added:
            self._next += 1
            self._added.notify_all()


def _key(number: int) -> str:
    return f"{records.EVENTS}{number:012d}"
