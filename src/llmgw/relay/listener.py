"""A listening address: what it serves, its connections, their limits and deadlines.

Deadlines are kept by a sweep twice a second rather than by a timer per request:
arming and cancelling timers costs more than parsing the request.
"""
from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Optional, Set

from llmgw.relay.reply import Reply, Stamp, error_reply, reply_bytes
from llmgw.relay.server import Application, Request, ServerConnection
from llmgw.relay.tls_door import TlsDoor
from llmgw.system.attempts import EACH_SECONDS, FailedAttempts
from llmgw.system.ports import listening

log = logging.getLogger(__name__)

SWEEP_SECONDS = 0.5
BACKLOG = 1024


class Listener:
    """A listening address: its connections, their limits, its clock."""

    def __init__(self, application: Application, *, max_connections: int = 65536,
                 max_body_bytes: int = 1 << 30) -> None:
        self.application = application
        self.connections: Set[ServerConnection] = set()
        self.stamp = Stamp()
        self.draining = False
        self.body_bytes = 0                   # of all requests that are held in memory
        self.max_body_bytes = max_body_bytes
        self.max_connections = max_connections
        self._server: Optional[asyncio.AbstractServer] = None
        self._door: Optional[TlsDoor] = None
        self._sweeper: Optional[asyncio.Task[None]] = None
        self._failed = FailedAttempts()

    async def listen(self, host: str, port: int, context: Any = None) -> int:
        """Start to listen, with TLS if there is a context; return the port. OSError when the address cannot be had."""
        self.stamp.refresh(time.time())
        loop = asyncio.get_running_loop()
        if self._sweeper is None:
            self._sweeper = loop.create_task(self._sweep_for_ever())
        if context is not None:
            sock = listening(host, port, BACKLOG)
            sock.setblocking(False)
            self._door = TlsDoor(sock, context, lambda: ServerConnection(self))
            return int(sock.getsockname()[1])
        self._server = await loop.create_server(lambda: ServerConnection(self), host, port, backlog=BACKLOG)
        return int(self._server.sockets[0].getsockname()[1])

    def opened(self, connection: ServerConnection) -> None:
        """Count a new connection; one too many is told so and closed."""
        if len(self.connections) >= self.max_connections:
            connection.transport.write(reply_bytes(
                error_reply(503, "too many connections", "overloaded", retry_after=1),
                self.stamp.lines, close=True))
            connection.transport.close()
            return
        self.connections.add(connection)

    def wrong_key(self, request: Request, reply: Reply, wait_seconds: int = int(EACH_SECONDS)) -> Reply:
        """Return ``reply`` to a wrong key; after too many of one network, that it is to wait; then it ends.

        Only wrong keys come here: whoever else is behind the same address is served as before.
        """
        peer = request.connection.transport.get_extra_info("peername")
        address = str(peer[0]) if isinstance(peer, tuple) else ""
        over = self._failed.count(address)
        if not over:
            return reply
        if over == 1:
            log.warning("many wrong keys from=%s", address)
        request.close = True
        return error_reply(429, "too many wrong keys from this network: wait a minute, and check the key",
                           "too_many_wrong_keys", retry_after=wait_seconds)

    def stop_accepting(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._door is not None:
            self._door.close()
            self._door = None

    def close_idle(self) -> None:
        for connection in [item for item in self.connections if item.is_idle]:
            connection.transport.close()

    @property
    def active(self) -> int:
        """How many connections are in the middle of a request."""
        return sum(1 for connection in self.connections if connection.request is not None)

    async def close(self) -> None:
        self.stop_accepting()
        for connection in list(self.connections):
            connection.transport.abort()
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None

    async def _sweep_for_ever(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.stamp.refresh(time.time())
            now = time.monotonic()
            for connection in list(self.connections):
                try:
                    connection.sweep(now)
                except Exception:             # a loop border: one connection's bug is not the others'
                    log.exception("sweep failed")
                    connection.transport.abort()
