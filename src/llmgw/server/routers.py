"""What the routers report: who answers, and who has no request left."""
from __future__ import annotations

import threading
from typing import Dict, FrozenSet, Mapping, Optional, Set, Tuple

from llmgw.domain.replica import Replica, ReplicaWish
from llmgw.domain.route import Gauges, RouterReport
from llmgw.system.clock import Clock

FRESH_SECONDS = 15.0


class Routers:
    """The last report of each router, and when each drain began."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._reports: Dict[str, Tuple[float, RouterReport]] = {}
        self._drains: Dict[str, Tuple[float, int]] = {}     # replica: (since, revision that says so)
        self.highest_revision = 0     # of a table that any router serves from

    def hear(self, report: RouterReport) -> None:
        with self._lock:
            self._reports[report.router] = (self._clock.monotonic(), report)
            self.highest_revision = max(self.highest_revision, report.table_revision)

    def fresh(self) -> Mapping[str, RouterReport]:
        """Return the reports of routers that still speak."""
        now = self._clock.monotonic()
        with self._lock:
            self._reports = {name: (at, report) for name, (at, report) in self._reports.items()
                             if now - at < FRESH_SECONDS}
            return {name: report for name, (_, report) in self._reports.items()}

    def answering(self) -> FrozenSet[str]:
        """Return the replicas that some router just heard."""
        return frozenset(replica for report in self.fresh().values() for replica in report.answering)

    def note_drains(self, replicas: Mapping[str, Replica], revision: int) -> None:
        """Remember when each drain began, and from which revision of the table on routers know of it."""
        now = self._clock.monotonic()
        with self._lock:
            self._drains = {replica: self._drains.get(replica, (now, revision))
                            for replica, row in replicas.items() if row.wish is ReplicaWish.DRAIN}

    def draining_seconds(self) -> Dict[str, float]:
        now = self._clock.monotonic()
        with self._lock:
            return {replica: now - since for replica, (since, _) in self._drains.items()}

    def idle(self) -> FrozenSet[str]:
        """Return the draining replicas that every router knows to drain and has no request on."""
        reports = self.fresh()
        with self._lock:
            drains = dict(self._drains)
        busy: Set[str] = set()
        for report in reports.values():
            for replica, (_, revision) in drains.items():
                gauges = report.replicas.get(replica)
                if report.table_revision < revision or (gauges is not None and _is_busy(gauges)):
                    busy.add(replica)
        return frozenset(set(drains) - busy)

    def gauges(self, replica: str) -> Optional[Gauges]:
        """Return the engine's numbers as a router last read them; requests of all routers are summed."""
        found = [report.replicas[replica] for report in self.fresh().values() if replica in report.replicas]
        if not found:
            return None
        last = found[-1]
        return Gauges(last.running, last.waiting, last.kv_used, last.generated_tokens,
                      sum(gauges.in_flight for gauges in found))


def _is_busy(gauges: Gauges) -> bool:
    return bool(gauges.in_flight or gauges.running or gauges.waiting)
