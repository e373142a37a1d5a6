"""Read each replica's gauges through its gate, every two seconds, one reading at a time per replica."""
from __future__ import annotations

import asyncio
import logging
import random
import time
from typing import Dict, Optional

from llmgw.parse.http1 import ResponseHead
from llmgw.parse.prometheus import MAX_PAGE_BYTES
from llmgw.relay.forward import request_bytes
from llmgw.relay.lease import Lease, Outcome, Owner
from llmgw.router.app import Router
from llmgw.router.table import Replica

log = logging.getLogger(__name__)

EVERY_SECONDS = 2.0
TIMEOUT_SECONDS = 1.0
SLOWEST_SECONDS = 10.0
TICK_SECONDS = 0.1


class Reading(Owner):
    """The readings of one replica, one after the other."""

    def __init__(self, router: Router, replica: Replica) -> None:
        self._router, self._replica = router, replica
        self._lease: Optional[Lease] = None
        self._begun_at = 0.0
        self._due_at = 0.0
        self._misses = 0
        self._cut_off = False                     # not even a connection: its node is away, not only busy

    def turn(self, now: float) -> None:
        """Begin a reading that is due, end one that takes too long."""
        if self._lease is not None:
            if now - self._begun_at > TIMEOUT_SECONDS:
                connects = self._lease.connection is None
                self.stop()
                self._missed(cut_off=connects)
        elif now >= self._due_at and self._replica.engine is not None:
            self._begun_at = now
            self._due_at = now + self._pause()
            self._lease = Lease(self, self._replica, None, TIMEOUT_SECONDS)
            self._lease.start(request_bytes(b"GET", self._replica.engine.metrics_path.encode("ascii"),
                                            self._replica.lines, None, b"", b""))

    def stop(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release(Outcome.GIVEN_UP)

    def head_arrived(self, lease: Lease, head: ResponseHead) -> None:
        if head.status == 200:
            lease.collect(MAX_PAGE_BYTES + 1)
        else:
            self.stop()
            self._missed()

    def collected(self, lease: Lease, body: bytes) -> None:
        self._lease = None
        self._misses = 0
        replica = self._replica
        assert replica.engine is not None
        if self._cut_off:
            self._cut_off, replica.busy_until = False, 0.0
        gauges = replica.engine.gauges(body)
        replica.gauges = gauges
        replica.scraped_at = time.monotonic()
        replica.kv_used = gauges.kv_used
        replica.in_flight_then = replica.in_flight
        if gauges.running is None or gauges.waiting is None:
            replica.queue = None
        else:
            replica.queue = gauges.running + gauges.waiting

    def failed(self, lease: Lease, outcome: Outcome, why: str) -> None:
        self._lease = None
        self._missed(cut_off=outcome is Outcome.REFUSED)

    def _missed(self, cut_off: bool = False) -> None:
        """Look again later. A node that is away is looked for often, and left alone by requests until then:

        each would wait for a connection, and come too seldom to open a breaker.
        """
        now = time.monotonic()
        self._misses = 1 if cut_off else self._misses + 1
        self._due_at = now + self._pause()
        self._cut_off = cut_off
        if cut_off:
            self._replica.busy_until = max(self._replica.busy_until, self._due_at + 2 * TIMEOUT_SECONDS)
            self._router.troubled = True

    def _pause(self) -> float:
        pause = min(EVERY_SECONDS * 2 ** min(self._misses, 8), SLOWEST_SECONDS)
        return pause * random.uniform(0.8, 1.2)


async def scrape_for_ever(router: Router) -> None:
    """Keep the gauges of the current table's replicas fresh."""
    readings: Dict[int, Reading] = {}
    while True:
        now = time.monotonic()
        try:
            replicas = router.table.replicas if router.table is not None else []
            current = {id(replica): readings.get(id(replica)) or Reading(router, replica) for replica in replicas}
            for gone in set(readings) - set(current):
                readings[gone].stop()
            readings = current
            for reading in readings.values():
                reading.turn(now)
            router.sweep(now)
        except Exception:                         # a loop border: a bug here must not end the readings
            log.exception("scrape turn failed")
        await asyncio.sleep(TICK_SECONDS)
