"""The router as a process: ``llmgw.pyz router``."""
from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import signal
import threading
import time
from typing import List, Optional

from llmgw.api.client import ControlClient
from llmgw.domain.errors import LlmgwError, UsageError
from llmgw.domain.route import RouterReport, RouteTable
from llmgw.parse.address import joined
from llmgw.router import control, trust
from llmgw.router.app import Router
from llmgw.router.flow import FIRST_BYTE_SECONDS
from llmgw.router.scraper import scrape_for_ever
from llmgw.system import data_dir, files, logs, notify
from llmgw.system.open_files import raise_open_files
from llmgw.system.ports import cannot_listen

log = logging.getLogger(__name__)

GRACE_SECONDS = 180.0
HUNG_SECONDS = 30.0


def run(argv: List[str], debug: bool) -> int:
    """Serve until told to stop; 0 after an orderly end."""
    args = _parser().parse_args(argv)
    logs.configure(debug)
    host, port = _address(args.listen)
    folder = files.make_dir(data_dir.role_dir("router", args.data_dir))
    lock = files.FolderLock(folder, "router")
    files.sweep_scratch(folder)
    try:
        door = trust.door(args, folder, host)
        client = trust.client(args, door.credential)
        with contextlib.closing(client) if client is not None else contextlib.nullcontext():
            asyncio.run(_Process(folder, host, port, client, args, door).serve())
    finally:
        lock.release()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="llmgw.pyz router", description="the OpenAI-compatible endpoint")
    parser.add_argument("--server", action="append", default=[], metavar="URL",
                        help="a control plane; without one the router serves the table in its data folder")
    parser.add_argument("--token-file", default="", help="holds the router's token")
    parser.add_argument("--listen", default="127.0.0.1:7801", metavar="HOST:PORT", help="port 0: any free one")
    parser.add_argument("--data-dir", default="", help="where the routing table is kept")
    parser.add_argument("--join-file", default="", metavar="F", help="holds a join string (or LLMGW_JOIN)")
    parser.add_argument("--ca-file", default="", metavar="F", help="the control plane's CA, where it did not join")
    parser.add_argument("--tls-certificate", default="", metavar="F",
                        help="to serve clients with, instead of one that the control plane makes")
    parser.add_argument("--tls-key", default="", metavar="F", help="its key")
    parser.add_argument("--tls-name", action="append", default=[], metavar="NAME",
                        help="a name or address by which clients call this router; may be repeated")
    parser.add_argument("--name", default="", help="the router's name in reports (default: host and port)")
    parser.add_argument("--first-byte-seconds", type=float, default=FIRST_BYTE_SECONDS, metavar="S",
                        help="how long an engine may take to begin its answer (default %(default)g)")
    parser.add_argument("--grace-seconds", type=float, default=GRACE_SECONDS, metavar="S",
                        help="how long running requests may take after SIGTERM (default %(default)g)")
    return parser


def _address(text: str) -> "tuple[str, int]":
    host, _, port = text.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"not an address: {text!r:.100}", hint="write it as HOST:PORT")
    return host, int(port)


class _Process:
    """The router with all that runs beside it."""

    def __init__(self, folder: str, host: str, port: int, client: Optional[ControlClient],
                 args: argparse.Namespace, door: trust.Door) -> None:
        self._folder, self._host, self._port = folder, host, port
        self._client, self._door = client, door
        self._name = door.credential.name if door.credential is not None else args.name
        self._grace_seconds = args.grace_seconds
        self.router = Router(args.name, args.first_byte_seconds)
        self._report: Optional[RouterReport] = None      # swapped whole; read by the reporter's thread
        self._stop = threading.Event()
        self._alive_at = time.monotonic()

    async def serve(self) -> None:
        """Listen, serve, drain."""
        stop = asyncio.Event()
        running = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            running.add_signal_handler(number, stop.set)
        self._limit_connections()
        table = control.kept_table(self._folder)
        if table is not None:
            self.router.swap(table)
            self.router.table_at = time.monotonic()
            log.info("serving the kept table revision=%d", table.revision)
        await self._listen()
        self._follow(table, running)
        notify.ready(lambda: time.monotonic() - self._alive_at < HUNG_SECONDS, self._stop)
        tasks = [running.create_task(scrape_for_ever(self.router)), running.create_task(self._refresh_report())]
        gc.collect()
        gc.freeze()
        gc.set_threshold(20000, 20, 20)      # requests make few cycles; a collection stops every stream
        await stop.wait()
        await self._drain(stop)
        self._stop.set()
        for task in tasks:
            task.cancel()
        await self.router.listener.close()
        try:
            files.remove(self._endpoint_file)
        except LlmgwError as error:              # all requests ended well: this is no failure
            log.warning("what says where this router listened stays behind: %s", error.message)

    def _limit_connections(self) -> None:
        limit = raise_open_files()
        # a connection of a client needs at most one to an engine; the rest is for everything else
        self.router.listener.max_connections = max(16, (limit - 64) // 2)
        if limit < 4096:
            log.warning("few open files are allowed limit=%d: raise it with ulimit -n", limit)

    async def _listen(self) -> None:
        try:
            port = await self.router.listener.listen(self._host, self._port, self._door.context)
        except OSError as error:
            raise cannot_listen("the router", self._host, self._port, error,
                                "stop it, or choose another port with --listen HOST:PORT") from error
        self.router.name = self._name or f"{os.uname().nodename}-{port}"
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._host, self._host)
        url = f"{'http' if self._door.context is None else 'https'}://{joined(host, port)}"
        files.write_json(self._endpoint_file, {"url": url, "pid": os.getpid(), "ca_file": self._door.ca_file})
        log.info("listening url=%s", url)

    @property
    def _endpoint_file(self) -> str:
        return os.path.join(self._folder, "endpoint.json")

    def _follow(self, table: Optional[RouteTable], running: asyncio.AbstractEventLoop) -> None:
        if self._client is None:
            return

        def take(new: Optional[RouteTable]) -> None:
            running.call_soon_threadsafe(self._take, new)

        control.start(control.Follower(self._client, self._folder, table, take),
                      control.Reporter(self._client, lambda: self._report), self._stop)
        self._door.look_after(self._client, self._stop)

    def _take(self, table: Optional[RouteTable]) -> None:
        self.router.table_at = time.monotonic()
        if table is not None and (self.router.table is None or self.router.table.routed != table):
            self.router.swap(table)

    async def _refresh_report(self) -> None:
        while True:
            self._alive_at = time.monotonic()
            self._report = self.router.report(self._alive_at)
            await asyncio.sleep(1.0)

    async def _drain(self, stop: asyncio.Event) -> None:
        """Let what runs come to its end; a second signal, or the grace's end, cuts it."""
        listener = self.router.listener
        listener.draining = True              # /ready says so; what is new is refused
        listener.close_idle()
        log.info("draining active=%d", self.router.active)
        until = time.monotonic() + self._grace_seconds
        stop.clear()
        while self.router.active and time.monotonic() < until and not stop.is_set():
            await asyncio.sleep(0.05)
        if self.router.active:
            log.warning("ending requests that still run active=%d", self.router.active)
        self.router.end_all()
        await asyncio.sleep(0)
