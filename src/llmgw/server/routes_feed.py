"""The routing table as routers get it: one value, swapped whole, awaited by long polls."""
from __future__ import annotations

import logging
import threading
from dataclasses import replace
from typing import Optional, Sequence, Tuple

from llmgw.api import wire
from llmgw.decide import routes_table
from llmgw.domain.errors import LlmgwError
from llmgw.domain.route import RoutedKey, RoutedModel, RouteTable
from llmgw.server import records
from llmgw.server.store import Store, put

log = logging.getLogger(__name__)

EPOCH_BITS = 24               # revisions of one epoch; a later epoch's are always higher


def epoch_of(revision: int) -> int:
    """Return the epoch in which this revision of the table was made."""
    return revision >> EPOCH_BITS


class RoutesFeed:
    """The loop publishes, handlers wait. What routers must serve from survives a restart."""

    def __init__(self, store: Store, cluster: str) -> None:
        self._store = store
        self._changed = threading.Condition()
        entry = store.get(records.LAST_ROUTES)
        self.table = wire.ROUTE_TABLE.decode(entry.value, entry.key) if entry is not None \
            else RouteTable(cluster, 0, 0)
        self._published = False
        self._closed = False
        self._kept: object = None

    def publish(self, cluster: str, epoch: int, models: Tuple[RoutedModel, ...],
                keys: Sequence[RoutedKey], ca: str = "") -> None:
        """Make this the table; its revision grows when anything in it changed."""
        made = routes_table.table(cluster, epoch, self.table.revision, models, keys, ca)
        if made == self.table and self._published:
            return
        revision = max(self.table.revision, epoch << EPOCH_BITS) + 1
        made = replace(made, revision=revision)
        self._keep(made)
        with self._changed:
            self.table, self._published = made, True
            self._changed.notify_all()

    def _keep(self, table: RouteTable) -> None:
        """Write what matters after a restart: not the sentences, which change all the time."""
        lasting = replace(table, revision=0, models=tuple(replace(model, why_not="") for model in table.models))
        if lasting == self._kept:
            return
        try:
            put(self._store, records.LAST_ROUTES, wire.ROUTE_TABLE.encode(table))
            self._kept = lasting
        except LlmgwError as error:
            log.warning("the routing table was not kept, will be tried again: %s", error.message)

    def after(self, revision: int, wait_seconds: float) -> Optional[RouteTable]:
        """Return the table when it is not at ``revision``, None when it stays there for the whole wait.

        Until the first turn of this server there is none: what it knows from before may be wrong.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or (self._published and self.table.revision != revision),
                                   wait_seconds)
            is_new = self._published and self.table.revision != revision
            return self.table if is_new else None

    def close(self) -> None:
        """Let every waiting router go."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
