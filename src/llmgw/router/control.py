"""What the router says to, and hears from, the control plane: in threads, so that serving never waits for it."""
from __future__ import annotations

import logging
import os
import random
import threading
from typing import Callable, List, Optional, Tuple
from urllib.parse import urlencode

from llmgw.api import paths, wire
from llmgw.api.client import ControlClient
from llmgw.domain.errors import LlmgwError, ParseError, Unauthorized
from llmgw.domain.route import RouterReport, RouteTable
from llmgw.system import files, loop

log = logging.getLogger(__name__)

WAIT_SECONDS = 25
REPORT_SECONDS = 3.0
PAUSE_SECONDS = 1.0
MOST_PAUSE_SECONDS = 10.0
TOKEN_HINT = ("copy the server's tokens/router into this router's token file, and start it again; one that had joined "
              "joins anew with the line of llmgw.pyz ctl token create --role router")
BEHIND_HINT = "one that was set up anew takes a later epoch by itself; else name the right one with --server"


def table_path(data_dir: str) -> str:
    return os.path.join(data_dir, "table.json")


def kept_table(data_dir: str) -> Optional[RouteTable]:
    """Return the table that was kept on disk; None when there is none that can be read."""
    path = table_path(data_dir)
    data = files.read_bytes(path)
    if data is None:
        return None
    try:
        return wire.loads(wire.ROUTE_TABLE, data, path)
    except ParseError as error:
        log.error("the kept table cannot be used: %s", error.message)
        return None


def _age(table: RouteTable) -> Tuple[int, int]:
    """Return what only grows: a table that has less of it comes from a control plane that is no longer the one."""
    return table.epoch, table.revision


def _doors(table: RouteTable) -> Tuple[object, ...]:
    """Return what of a table a person wants to hear of: which models, replicas and keys there are."""
    return (tuple((model.name, model.aliases, tuple((replica.id, replica.incarnation, replica.draining)
                                                    for replica in model.replicas)) for model in table.models),
            tuple(key.id for key in table.keys))


class Follower:
    """Learns each new table by a long poll, keeps it on disk and hands it on."""

    def __init__(self, client: ControlClient, data_dir: str, first: Optional[RouteTable],
                 take: Callable[[Optional[RouteTable]], None]) -> None:
        self._client = client
        self._path = table_path(data_dir)
        self._table = first
        self._heard = False                   # from a control plane, since the start
        self._take = take
        self._misses = 0
        self._said = ""

    def turn(self) -> Optional[float]:
        """Ask once; return how long to wait before the next call."""
        asking = {"wait": 0 if not self._heard else WAIT_SECONDS}
        if self._table is not None and self._heard:
            asking["after"] = self._table.revision
        try:
            table = self._client.call("GET", f"{paths.ROUTES}?{urlencode(asking)}", receive=wire.ROUTE_TABLE,
                                      timeout=WAIT_SECONDS + 10.0)
        except LlmgwError as error:
            return self._missed(error.reason, error.message,
                                TOKEN_HINT if error.reason == Unauthorized.reason else error.hint)
        if table is not None and self._table is not None and _age(table) < _age(self._table):
            return self._missed("Behind", f"the control plane is behind: its table is of epoch {table.epoch}, "
                                f"revision {table.revision}; served from is {self._table.epoch}, "
                                f"{self._table.revision}", BEHIND_HINT)
        if self._said:
            log.info("the control plane answers again url=%s", self._client.url)
        self._misses, self._said, self._heard = 0, "", True
        if table is not None and table != self._table:
            self._keep(table)
        self._take(table)
        return 0.2 if table is None or self._table is table else PAUSE_SECONDS

    def _keep(self, table: RouteTable) -> None:
        news = self._table is None or _doors(table) != _doors(self._table)       # else only a sentence changed
        log.log(logging.INFO if news else logging.DEBUG, "table taken revision=%d models=%d replicas=%d keys=%d",
                table.revision, len(table.models), sum(len(model.replicas) for model in table.models), len(table.keys))
        self._table = table
        try:
            files.write_atomic(self._path, wire.dumps(wire.ROUTE_TABLE, table))
        except LlmgwError as error:           # serving goes on; a restart would serve the older one
            log.error("the table could not be kept reason=%s: %s", error.reason, error.message)

    def _missed(self, reason: str, message: str, hint: Optional[str]) -> float:
        self._misses += 1
        if message != self._said:             # once per change, not once per call
            self._said = message
            log.warning("no table from the control plane reason=%s: %s%s", reason, message,
                        f" (try: {hint})" if hint else "")
        pause = min(PAUSE_SECONDS * 2 ** min(self._misses - 1, 6), MOST_PAUSE_SECONDS)
        return pause * random.uniform(0.8, 1.2)


class Reporter:
    """Tells the control plane what the router sees."""

    def __init__(self, client: ControlClient, current: Callable[[], Optional[RouterReport]]) -> None:
        self._client = client
        self._current = current

    def turn(self) -> None:
        report = self._current()
        if report is None:
            return
        try:
            self._client.call("POST", paths.fill(paths.ROUTER_REPORT, router=report.router),
                              send=wire.ROUTER_REPORT, value=report, timeout=5.0)
        except LlmgwError as error:           # the follower says so aloud
            log.debug("report not taken: %s", error.message)


def start(follower: Follower, reporter: Reporter, stop: threading.Event) -> List[threading.Thread]:
    """Start both threads."""
    return [loop.start("follow the table", follower.turn, every=PAUSE_SECONDS, stop=stop),
            loop.start("report", reporter.turn, every=REPORT_SECONDS, stop=stop)]
