"""A client's connection: one request at a time, from its head to the end of its answer."""
from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, List, Optional

from llmgw.parse.http1 import (LAST_CHUNK, MAX_HEAD_BYTES, ChunkDecoder, MalformedHttp, RequestHead,
                               RequestReader, chunk, head_end)
from llmgw.relay.reply import Fields, Reply, error_reply, no_room, reply_bytes, too_large

if TYPE_CHECKING:
    from llmgw.relay.listener import Listener

HEAD_SECONDS = 10.0           # absolute, from the head's first byte
BODY_SECONDS = 60.0           # between two pieces of a body
WHOLE_BODY_SECONDS = 600.0    # absolute
IDLE_SECONDS = 75.0
LINGER_SECONDS = 2.0
FLUSH_SECONDS = 30.0          # for what is still to be sent when we have closed
STALL_SECONDS = 120.0         # a client that takes nothing of its answer
MAX_BODY_BYTES = 64 << 20
HIGH_WATER_BYTES = 256 << 10
READ_BYTES = 64 << 10

_WAITING, _BODY, _ANSWERING, _LINGERING = range(4)
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Application:
    """What a Listener serves."""

    def check(self, request: "Request") -> Optional[Reply]:
        """Return an answer to give before the body is read, or None to go on."""
        raise NotImplementedError

    def serve(self, request: "Request") -> None:
        """Answer ``request``, now or later; its body is there."""
        raise NotImplementedError


class Request:
    """One request, from its head to the end of its answer. ``owner`` is told when the client goes."""

    # Defaults stand in the class: setting a dozen attributes per request would be felt.
    body = b""
    id = b""
    owner: Any = None
    chunked = False
    answered = False                  # a byte of the answer was sent
    answered_at = 0.0
    _held = b""

    def __init__(self, connection: "ServerConnection", head: RequestHead, started: float) -> None:
        self.connection = connection
        self.head = head
        self.started = started
        self.close = not head.keep_alive or connection.listener.draining

    def reply(self, reply: Reply) -> None:
        """Give the whole answer and end the request."""
        more: Fields = ((b"X-Request-Id", self.id),) if self.id else ()
        data = reply_bytes(reply, self.connection.listener.stamp.lines, close=self.close,
                           without_body=self.head.method == b"HEAD", more=more)
        self.answered = True
        self.connection.transport.write(data)
        self.connection.request_done(self.close)

    def begin(self, head: bytes, chunked: bool) -> None:
        """Hold the answer's head until the first byte of its body is there."""
        self._held, self.chunked = head, chunked

    def send(self, payload: bytes) -> None:
        """Send a piece of the body, framed as the head said."""
        self.send_framed(chunk(payload) if self.chunked else payload)

    def send_framed(self, data: bytes) -> None:
        if self._held:
            data, self._held, self.answered = self._held + data, b"", True
            self.answered_at = time.monotonic()
        self.connection.transport.write(data)

    def finish(self, payload: bytes = b"") -> None:
        """Send the last piece and end the request."""
        if self.chunked:
            payload = chunk(payload) + LAST_CHUNK if payload else LAST_CHUNK
        if payload or self._held:
            self.send_framed(payload)
        self.connection.request_done(self.close)

    def abort(self) -> None:
        """End the answer so that the client sees it is not whole: no last chunk, the connection closes."""
        self.connection.cut()


class ServerConnection(asyncio.Protocol):
    """One client's connection."""

    __slots__ = ("listener", "transport", "request", "deadline", "_application", "_reader", "_state", "_buffer",
                 "_scanned", "_pieces", "_left", "_decoder", "_paused", "stalled",
                 "_served", "_body_until")

    transport: asyncio.Transport

    def __init__(self, listener: "Listener") -> None:
        self.listener = listener
        self.request: Optional[Request] = None
        self.deadline = 0.0
        self._application = listener.application
        self._reader = RequestReader()
        self._state = _WAITING
        self._buffer = b""
        self._scanned = 0
        self._pieces: List[bytes] = []
        self._left = 0
        self._decoder: Optional[ChunkDecoder] = None
        self._paused = False
        self.stalled = False
        self._served = False          # it has had a request
        self._body_until = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]  # less to allocate at each read
        self.deadline = time.monotonic() + HEAD_SECONDS
        self.listener.opened(self)

    def connection_lost(self, error: Optional[Exception]) -> None:
        self.listener.connections.discard(self)
        self.transport.close()        # of TLS on Python 3.9: it does not know yet
        self._gone()

    def eof_received(self) -> Optional[bool]:
        self._gone()                  # a half-closed client is gone: nobody waits for tokens
        if self._state != _LINGERING and not self.transport.is_closing():
            self.transport.abort()
        return None

    def _gone(self) -> None:
        request, self.request = self.request, None
        if request is not None:
            self.listener.body_bytes -= len(request.body)
            if request.owner is not None:
                request.owner.client_gone()
        if self._pieces:
            self.listener.body_bytes -= sum(map(len, self._pieces))
            self._pieces = []

    def data_received(self, data: bytes) -> None:
        if self._state == _WAITING:
            self._take_head(self._buffer + data if self._buffer else data)
        elif self._state == _BODY:
            self._take_body(data)
        elif self._state == _ANSWERING:
            self._buffer += data      # a pipelined request waits its turn
            if len(self._buffer) > MAX_HEAD_BYTES and not self._paused:
                self._paused = True
                self.transport.pause_reading()

    def _take_head(self, data: bytes) -> None:
        now = time.monotonic()
        try:
            end = head_end(data, self._scanned)
            if end < 0:
                if not self._buffer:
                    self.deadline = now + HEAD_SECONDS
                self._buffer, self._scanned = data, max(0, len(data) - 3)
                return
            head = self._reader.read(data[:end + 2])
        except MalformedHttp as error:
            self._refuse(error_reply(error.status, error.message, "bad_request"))
            return
        self._buffer, self._scanned, self._served = b"", 0, True
        request = self.request = Request(self, head, now)
        self._state = _ANSWERING
        reply = self._application.check(request)
        has_body = head.length or head.chunked
        if reply is not None:
            request.close = request.close or bool(has_body)
            if has_body:
                self.request = None
                self._refuse(reply, request)
            else:
                self._buffer = data[end + 4:]
                request.reply(reply)
            return
        rest = data[end + 4:]
        if not has_body:
            self._buffer = rest
            self._application.serve(request)
        elif not head.chunked and len(rest) == head.length:      # all of it came with the head
            request.body = rest
            self.listener.body_bytes += head.length
            self._application.serve(request)
        else:
            self._await_body(head, rest, now)

    def _await_body(self, head: RequestHead, rest: bytes, now: float) -> None:
        self._state = _BODY
        self._left = head.length
        self._decoder = ChunkDecoder() if head.chunked else None
        self.deadline = now + BODY_SECONDS
        self._body_until = now + WHOLE_BODY_SECONDS
        if head.expects and not rest:
            self.transport.write(_CONTINUE)
        if rest:
            self._take_body(rest)

    def _take_body(self, data: bytes) -> None:
        request = self.request
        assert request is not None
        self.deadline = min(time.monotonic() + BODY_SECONDS, self._body_until)
        rest = b""
        if self._decoder is not None:
            try:
                data = self._decoder.feed(data)
            except MalformedHttp as error:
                self._refuse(error_reply(error.status, error.message, "bad_request"), request)
                return
            self._left += len(data)
            done, rest = self._decoder.done, self._decoder.rest
            if self._left > MAX_BODY_BYTES:
                self._refuse(too_large(MAX_BODY_BYTES), request)
                return
        else:
            data, rest = data[:self._left], data[self._left:]
            self._left -= len(data)
            done = not self._left
        self._pieces.append(data)
        self.listener.body_bytes += len(data)
        if self.listener.body_bytes > self.listener.max_body_bytes and not done:
            self._refuse(no_room(), request)
            return
        if done:
            request.body = b"".join(self._pieces)
            self._pieces, self._decoder = [], None
            self._buffer, self._state = rest, _ANSWERING
            self._application.serve(request)

    def _refuse(self, reply: Reply, request: Optional[Request] = None) -> None:
        """Answer what cannot be read to its end, then close: what follows is never a request."""
        self._gone()
        more: Fields = ((b"X-Request-Id", request.id),) if request is not None and request.id else ()
        self.transport.write(reply_bytes(reply, self.listener.stamp.lines, close=True, more=more,
                                         without_body=request is not None and request.head.method == b"HEAD"))
        self._linger()

    def _linger(self) -> None:
        # Closing with unread bytes would reset the connection and may take our answer with it.
        self._state = _LINGERING
        self._buffer = b""
        self.deadline = time.monotonic() + LINGER_SECONDS
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def request_done(self, close: bool) -> None:
        """The answer of the current request is sent; go on with the next, or close."""
        request, self.request = self.request, None
        if request is not None:
            self.listener.body_bytes -= len(request.body)
        if close:
            if self._buffer:
                self._linger()
            else:
                self._close()
            return
        self._state = _WAITING
        self.deadline = time.monotonic() + IDLE_SECONDS
        if self._buffer or self._paused:
            asyncio.get_running_loop().call_soon(self._take_pipelined)

    def _take_pipelined(self) -> None:
        if self._paused:
            self._paused = False
            self.transport.resume_reading()
        if self._state == _WAITING and self._buffer and not self.transport.is_closing():
            data, self._buffer = self._buffer, b""
            self._take_head(data)

    def cut(self) -> None:
        """Close after what is written, without what would make it look whole."""
        request, self.request = self.request, None
        if request is not None:
            self.listener.body_bytes -= len(request.body)
        self._close()

    def _close(self) -> None:
        self._state = _LINGERING
        self.deadline = time.monotonic() + FLUSH_SECONDS
        self.transport.close()

    def pause_writing(self) -> None:
        self.stalled = True
        self.deadline = time.monotonic() + STALL_SECONDS
        if self.request is not None and self.request.owner is not None:
            self.request.owner.pause()

    def resume_writing(self) -> None:
        self.stalled = False
        if self.request is not None and self.request.owner is not None:
            self.request.owner.resume()

    def sweep(self, now: float) -> None:
        """Act on a deadline that has passed."""
        if self._state == _ANSWERING:
            if self.stalled and now > self.deadline:
                self.transport.abort()
            elif self.request is not None and self.request.owner is not None:
                self.request.owner.sweep(now)
        elif now <= self.deadline:
            return
        elif self._state == _LINGERING or (self._state == _WAITING and not self._buffer):
            self.transport.abort()
        else:
            self._refuse(error_reply(408, "the request did not arrive in time", "request_timeout"))

    @property
    def is_idle(self) -> bool:
        """Whether it waits for another request. One that waits for its first may have it on its way."""
        return self._state == _WAITING and self._served and not self._buffer
