"""Connections to where requests are sent, and the pool that keeps them for the next."""
from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, List, Optional

from llmgw.parse.http1 import PLAIN_CHUNK, ChunkDecoder, MalformedHttp, ResponseHead, ResponseReader, head_end
from llmgw.relay.server import HIGH_WATER_BYTES, READ_BYTES

if TYPE_CHECKING:
    from llmgw.relay.lease import Lease

IDLE_SECONDS = 3.0            # engines close theirs after 5
CONNECT_SECONDS = 3.0
MAX_IDLE = 1024
MAX_INTERIM_HEADS = 16

_HEAD, _CHUNKED, _COUNTED, _TO_THE_END = range(4)


class Target:
    """One place to send to. A replica that came back is a new Target: an old socket is never its."""

    __slots__ = ("host", "port", "idle", "in_flight", "retired", "context", "tls_name")

    def __init__(self, host: str, port: int, context: Any = None, tls_name: str = "") -> None:
        self.host, self.port = host, port
        self.context, self.tls_name = context, tls_name      # TLS, to who has that name
        self.idle: List[UpstreamConnection] = []      # the last used is taken first
        self.in_flight = 0
        self.retired = False

    def take(self) -> Optional["UpstreamConnection"]:
        """Return a kept connection that is open and was idle for a short time only, or None."""
        while self.idle:
            connection = self.idle.pop()
            if not connection.transport.is_closing():
                return connection
        return None

    async def connect(self) -> "UpstreamConnection":
        """Return a new connection; OSError or TimeoutError when there is none in time."""
        loop = asyncio.get_running_loop()
        with_tls = {} if self.context is None else {
            "ssl": self.context, "server_hostname": self.tls_name, "ssl_handshake_timeout": CONNECT_SECONDS}
        _, connection = await asyncio.wait_for(
            loop.create_connection(lambda: UpstreamConnection(self), self.host, self.port, **with_tls), CONNECT_SECONDS)
        return connection

    def keep(self, connection: "UpstreamConnection") -> None:
        """Take back a connection whose exchange is over, or close it."""
        if self.retired or len(self.idle) >= MAX_IDLE or connection.transport.is_closing():
            connection.transport.abort()
            return
        connection.idle_since = time.monotonic()
        self.idle.append(connection)

    def sweep(self, now: float) -> None:
        """Close what was idle for too long; the longest idle stand first."""
        while self.idle and now - self.idle[0].idle_since > IDLE_SECONDS:
            self.idle.pop(0).transport.abort()

    def retire(self) -> None:
        """Keep no connection any more."""
        self.retired = True
        while self.idle:
            self.idle.pop().transport.abort()


class UpstreamConnection(asyncio.Protocol):
    """One connection to a Target; carries one request at a time, for the ``lease`` that holds it."""

    __slots__ = ("target", "transport", "lease", "lost", "idle_since", "_state", "_buffer", "_decoder", "_left",
                 "_keep_alive", "_interim", "_reader")

    transport: asyncio.Transport

    def __init__(self, target: Target) -> None:
        self.target = target
        self.lease: Optional[Lease] = None
        self.lost = False             # it ended, perhaps before anyone could send on it
        self.idle_since = 0.0
        self._state = _HEAD
        self._buffer = b""
        self._decoder: Optional[ChunkDecoder] = None
        self._left = 0
        self._keep_alive = False
        self._interim = 0
        self._reader = ResponseReader()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]

    def connection_lost(self, error: Optional[Exception]) -> None:
        lease, self.lease = self.lease, None
        self.lost = True
        self.transport.close()        # of TLS on Python 3.9: it does not know yet
        if lease is None:
            if self in self.target.idle:
                self.target.idle.remove(self)
        elif self._state == _TO_THE_END and error is None:
            lease.complete(b"")
        else:
            lease.broken("closed its connection", began=self._state != _HEAD or bool(self._buffer))

    def send(self, lease: "Lease", request: bytes) -> None:
        self.lease = lease
        self._state = _HEAD
        self._buffer = b""
        self._interim = 0
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        lease = self.lease
        if lease is None:             # nobody asked: whatever this is, the next request must not get it
            self.transport.abort()
            return
        lease.alive = True
        if self._state == _CHUNKED:
            match = PLAIN_CHUNK.match(data)
            if match is not None:     # one whole chunk in one read, as engines stream: pass it as it is
                start, size = match.end(), int(match.group(1), 16)
                if size and start + size + 2 == len(data) and data.endswith(b"\r\n") and (
                        self._decoder.between_chunks):  # type: ignore[union-attr]
                    lease.whole_chunk(data, data[start:-2])
                    return
            self._take_chunks(lease, data)
        elif self._state == _COUNTED:
            self._take_counted(lease, data)
        elif self._state == _HEAD:
            self._take_head(lease, data)
        else:
            lease.payload(data)

    def _take_head(self, lease: "Lease", data: bytes) -> None:
        data = self._buffer + data if self._buffer else data
        try:
            while True:
                end = head_end(data)
                if end < 0:
                    self._buffer = data
                    return
                head = self._reader.read(data[:end + 2])
                data = data[end + 4:]
                if head.status >= 200:
                    break
                self._interim += 1
                if head.status == 101 or self._interim > MAX_INTERIM_HEADS:
                    raise MalformedHttp("an interim response that nobody asked for", 502)
        except MalformedHttp as error:
            self._break(lease, error.message)
            return
        self._buffer = b""
        self._keep_alive = head.keep_alive
        lease.head_arrived(head)
        if self.lease is lease:       # it was not given up because of its head
            self._begin_body(lease, head, data)

    def _begin_body(self, lease: "Lease", head: ResponseHead, data: bytes) -> None:
        if head.chunked:
            self._state, self._decoder = _CHUNKED, ChunkDecoder()
            if data:
                self._take_chunks(lease, data)
        elif head.length is not None:
            self._state, self._left = _COUNTED, head.length
            if data or not head.length:
                self._take_counted(lease, data)
        else:
            self._state = _TO_THE_END
            if data:
                lease.payload(data)

    def _take_counted(self, lease: "Lease", data: bytes) -> None:
        size = len(data)
        if size < self._left:
            self._left -= size
            lease.payload(data)
        elif size == self._left:
            self._done(lease, data, b"")
        else:
            self._done(lease, data[:self._left], data[self._left:])

    def _take_chunks(self, lease: "Lease", data: bytes) -> None:
        decoder = self._decoder
        assert decoder is not None
        try:
            payload = decoder.feed(data)
        except MalformedHttp as error:
            self._break(lease, error.message)
            return
        if decoder.done:
            self._done(lease, payload, decoder.rest)
        elif payload:
            lease.payload(payload)

    def _done(self, lease: "Lease", payload: bytes, rest: bytes) -> None:
        self.lease = None
        reusable = self._keep_alive and not rest and not self.transport.get_write_buffer_size()
        lease.connection = None
        if reusable:
            self.target.keep(self)
        else:
            self.transport.abort()
        lease.complete(payload)

    def _break(self, lease: "Lease", why: str) -> None:
        self.lease = None
        self.transport.abort()
        lease.broken(f"sent what is not HTTP: {why}")

    def give_up(self) -> None:
        """Close at once: that is how an engine learns that nobody waits any more."""
        self.lease = None
        self.transport.abort()
