"""The gate as a process: ``llmgw.pyz gate --table FILE``. Child of no one; it outlives the agent."""
from __future__ import annotations

import argparse
import asyncio
import hashlib
import logging
import os
import signal
import time
from typing import Any, List, Optional, Tuple

from llmgw.agent.gate import Gate
from llmgw.api import wire
from llmgw.domain.errors import ConfigError, LlmgwError
from llmgw.domain.gate import GateTable
from llmgw.parse.address import is_loopback
from llmgw.relay.listener import Listener
from llmgw.system import files, logs, tls
from llmgw.system.open_files import raise_open_files
from llmgw.system.ports import cannot_listen

log = logging.getLogger(__name__)

POLL_SECONDS = 0.2
GRACE_SECONDS = 180.0


def run(argv: List[str], debug: bool) -> int:
    """Relay until told to stop; 0 after an orderly end."""
    parser = argparse.ArgumentParser(prog="llmgw.pyz gate", description="the door of a node")
    parser.add_argument("--table", required=True, help="the file that the agent writes")
    args = parser.parse_args(argv)
    logs.configure(debug)
    asyncio.run(_serve(os.path.abspath(args.table)))
    return 0


class _TableFile:
    """The agent's file, read again when it changes."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._seen: Optional[tuple] = None
        self.sha256 = ""

    def changed(self) -> Optional[GateTable]:
        """Return the table when the file is another than the one last read, else None."""
        try:
            stat = os.stat(self.path)
        except OSError:
            return None                       # the agent replaces it whole; keep what we have
        seen = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        if seen == self._seen:
            return None
        data = files.read_bytes(self.path)
        if data is None:
            return None
        self._seen = seen
        self.sha256 = hashlib.sha256(data).hexdigest()
        return wire.loads(wire.GATE_TABLE, data, self.path)


class _Doorway:
    """Where the gate listens now."""

    def __init__(self, gate: Gate, connections: int) -> None:
        self._listener = Listener(gate, max_connections=connections)
        self._address: Tuple[str, int, bool] = ("", 0, False)
        self._context: Any = None
        self._certificate = ""

    @property
    def active(self) -> int:
        return self._listener.active

    async def listen(self, table: GateTable) -> None:
        """Listen where the table says, with its certificate; PortTaken when another does, plain only on loopback."""
        host, port, certificate = table.host, table.port, table.certificate
        if certificate and certificate != self._certificate:
            if self._context is None:
                self._context = tls.server_context(certificate)
            else:
                tls.load(self._context, certificate)
            self._certificate = certificate
        if (host, port, bool(certificate)) == self._address:
            return
        if not certificate and not is_loopback(host):
            raise ConfigError(f"the gate does not listen on {host}: off loopback it needs TLS, and this node has no "
                              "certificate", hint="let the node join (llmgw.pyz ctl token create --role node), "
                              "or use 127.0.0.1")
        self._listener.stop_accepting()
        try:
            await self._listener.listen(host, port, self._context if certificate else None)
        except OSError as error:
            raise cannot_listen("the gate", host, port, error,
                                "stop it, or give the agent another --gate-port") from error
        self._address = (host, port, bool(certificate))
        log.info("listening host=%s port=%d tls=%s", host, port, bool(certificate))

    def drain(self) -> None:
        self._listener.draining = True
        self._listener.stop_accepting()
        self._listener.close_idle()

    async def close(self) -> None:
        await self._listener.close()


async def _serve(path: str) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    gate, table_file = Gate(), _TableFile(path)
    door = _Doorway(gate, raise_open_files() // 2 - 32)
    table = table_file.changed()
    if table is None:
        raise ConfigError(f"there is no gate table at {path}", hint="the agent writes it")
    gate.swap(table, table_file.sha256)
    await door.listen(table)
    while not stop.is_set():
        await _pause(stop, POLL_SECONDS)
        gate.sweep(time.monotonic())
        await _follow(gate, door, table_file)
    door.drain()
    until = time.monotonic() + GRACE_SECONDS
    stop.clear()                              # a second signal ends the grace
    while door.active and time.monotonic() < until and not stop.is_set():
        await _pause(stop, POLL_SECONDS)
    await door.close()
    gate.blobs.close()


async def _follow(gate: Gate, door: _Doorway, table_file: _TableFile) -> None:
    """Take the agent's table when it has changed; one that cannot be used changes nothing."""
    try:
        table = table_file.changed()
        if table is not None:
            gate.swap(table, table_file.sha256)
            log.info("table taken doors=%d", len(table.entries))
            await door.listen(table)
    except LlmgwError as error:
        log.error("the table was not taken reason=%s: %s", error.reason, error.message)


async def _pause(stop: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(stop.wait(), seconds)
    except asyncio.TimeoutError:
        pass
