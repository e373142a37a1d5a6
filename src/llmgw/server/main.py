"""The control plane's process: put the parts together, listen, take turns, stop in order."""
from __future__ import annotations

import argparse
import logging
import os
import signal
import threading
import time
from typing import Callable, List, Optional, Sequence, Tuple

from llmgw import __version__
from llmgw.domain.cluster import ClusterConfig
from llmgw.domain.errors import UsageError
from llmgw.parse.address import is_loopback
from llmgw.server import page, records
from llmgw.server.admissions import Admissions
from llmgw.server.authority import CHECK_SECONDS, Authority, GivenTls
from llmgw.server.config import ConfigFile, ConfigWatch, Loaded
from llmgw.server.engine_assets import EngineAssets
from llmgw.server.engine_locks import EngineLocks
from llmgw.server.events import Events
from llmgw.server.handlers_admin import AdminHandlers
from llmgw.server.handlers_fleet import FleetHandlers
from llmgw.server.handlers_join import JoinHandlers
from llmgw.server.handlers_views import ViewHandlers
from llmgw.server.handlers_mirror import MirrorHandlers
from llmgw.server.http_numbers import HttpNumbers
from llmgw.server.loop import EVERY_SECONDS, Parts, Reconciler
from llmgw.server.mirror import Mirror
from llmgw.server.nodes import Nodes
from llmgw.server.pulls import Pulls
from llmgw.server.restore import restore
from llmgw.server.routers import Routers
from llmgw.server.routes_feed import RoutesFeed
from llmgw.server.sources import Sources, optional_part
from llmgw.server.store_sqlite import SqliteStore
from llmgw.server.tokens import Tokens
from llmgw.system import data_dir, files, logs, loop, notify, open_files
from llmgw.system.clock import Clock
from llmgw.system.http_server import HttpServer
from llmgw.system.routes import Route, RouteTable

log = logging.getLogger(__name__)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="llmgw.pyz server", description="The control plane.")
    parser.add_argument("--config", metavar="FILE", default="server.yaml", help="default: ./server.yaml")
    parser.add_argument("--data-dir", metavar="DIR", default="", help="default: under the user's data folder")
    parser.add_argument("--listen", metavar="HOST:PORT", default="", help="instead of the file's listen:; port 0: any")
    parser.add_argument("--restore", metavar="BACKUP", default="",
                        help="put a backup of `ctl backup` back, then end; the server must not run")
    return parser


def run(argv: List[str], debug: bool = False) -> int:
    """Serve until SIGTERM or SIGINT; the exit code of the process."""
    options = arguments().parse_args(argv)
    logs.configure(debug)
    folder = files.make_dir(data_dir.role_dir("server", options.data_dir))
    if options.restore:
        lock = files.FolderLock(folder, "server")
        epoch = restore(folder, os.path.abspath(options.restore), Clock())
        lock.release()
        log.info("restored from=%s epoch=%d; the next start hears every node before it acts", options.restore, epoch)
        return 0
    config = ConfigFile(options.config)
    loaded = config.load()
    host, port = _address(options.listen) if options.listen else (loaded.config.host, loaded.config.port)
    stop = threading.Event()
    poke = threading.Event()

    def end(*unused: object) -> None:
        stop.set()
        poke.set()

    open_files.raise_open_files()
    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    lock = files.FolderLock(folder, "server")
    try:
        files.sweep_scratch(folder)
        Server(folder, config, loaded, host, port, poke).serve(stop)
    finally:
        lock.release()
    return 0


def _address(text: str) -> Tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise UsageError(f"--listen {text}: expected HOST:PORT", hint="such as --listen 127.0.0.1:7800")
    return host.strip("[]"), int(port)

FIRST_TURN_SECONDS = 5.0
HUNG_SECONDS = 60.0
PULLS_SECONDS = 5.0


def _authority(folder: str, clock: Clock, config: ClusterConfig, names: Callable[[], Sequence[str]]) -> Authority:
    given = GivenTls(config.tls_certificate, config.tls_key, config.tls_ca) if config.tls_certificate else None
    return Authority(folder, clock, given, names)


class Server:
    """All parts of one control plane, in the order in which they need each other."""

    def __init__(self, folder: str, config: ConfigFile, loaded: Loaded, host: str, port: int,
                 poke: threading.Event) -> None:
        clock = Clock()
        self._folder = folder
        self._store = SqliteStore(folder)
        self._nodes = Nodes(self._store, clock, poke)
        events = self._events = Events(self._store, clock)
        self._first_names, self._is_whole = loaded.config.names, False
        authority = self._authority = _authority(folder, clock, loaded.config, self._names)
        if loaded.config.tls_certificate or not is_loopback(host):
            authority.open()
        mirror = Mirror(os.path.join(folder, "mirror"), self._store, clock)
        rows = records.Replicas(self._store)
        self._releases = optional_part("llmgw.server.releases", "Releases", mirror.folder)
        self._hub = optional_part("llmgw.server.hub", "Hub", mirror.folder)
        self._feed = RoutesFeed(self._store, loaded.config.cluster)
        parts = self.parts = Parts(
            store=self._store, clock=clock, config=ConfigWatch(config, loaded, self._store, events, rows),
            nodes=self._nodes, routers=Routers(clock), events=events,
            sources=Sources(self._store, mirror, self._hub, poke),
            engines=EngineAssets(mirror, self._releases, EngineLocks(self._store, clock, events, self._releases)),
            tokens=Tokens(self._store, folder, clock), feed=self._feed, rows=rows,
            admissions=Admissions(self._store, self._authority, clock))
        self._is_whole = True
        self._turned_at = time.monotonic()
        self._reconciler = Reconciler(parts)
        self._pulls = Pulls(self._store, mirror, self._hub)
        numbers = HttpNumbers()
        routes: List[Route] = [*page.routes(), *FleetHandlers(parts, self._reconciler, mirror).routes(),
                               *JoinHandlers(parts, authority, numbers).routes(),
                               *ViewHandlers(parts, self._reconciler, numbers).routes(),
                               *MirrorHandlers(parts, self._reconciler, mirror, self._pulls).routes(),
                               *AdminHandlers(parts, self._reconciler, folder).routes()]
        self.table = RouteTable(routes, parts.tokens.caller)
        self._http = numbers.server = HttpServer(host, port, self.table, allowed_hosts=self._host_names(),
                                                 context=authority.context)

    def _names(self) -> Sequence[str]:
        return self.parts.config.state.current.names if self._is_whole else self._first_names

    def _host_names(self) -> Sequence[str]:
        return self._authority.host_names if self._authority.context is not None else ()

    def _look_after_certificates(self) -> float:
        pause = self._authority.refresh()
        self._http.allow_hosts(self._host_names())
        return pause

    def serve(self, stop: threading.Event) -> None:
        """Answer and take turns until ``stop``."""
        turns = loop.start("reconcile", self._turn, every=EVERY_SECONDS, stop=stop, poke=self._nodes.poke)
        self._reconciler.turned.wait(FIRST_TURN_SECONDS)   # an empty list means "has none": look before answering
        self._http.start()
        loop.start("certificates", self._look_after_certificates, every=CHECK_SECONDS, stop=stop)
        files.write_json(data_dir.endpoint_file(self._folder), {
            "url": self._http.url, "pid": os.getpid(), "ca_file": self._authority.ca_file(),
            "admin_token_file": data_dir.token_file(self._folder, "admin")})
        log.info("serving url=%s version=%s epoch=%d data_dir=%s", self._http.url, __version__,
                 self._reconciler.epoch, self._folder)
        loop.start("pulls", self._pulls.turn, every=PULLS_SECONDS, stop=stop)
        notify.ready(lambda: time.monotonic() - self._turned_at < HUNG_SECONDS, stop)
        stop.wait()
        self._nodes.poke.set()
        turns.join(5.0)
        self.close()
        log.info("stopped")

    def _turn(self) -> Optional[float]:
        try:
            return self._reconciler.turn()
        finally:                      # a turn that fails is tried again; one that never ends is what hangs
            self._turned_at = time.monotonic()

    def close(self) -> None:
        """Let waiting calls go, finish the running ones, write what is to be written."""
        self._feed.close()
        self._events.wake()
        self._http.stop()
        for part in (self._releases, self._hub):
            if part is not None:
                part.close()
        self._events.flush()
        self._store.close()
