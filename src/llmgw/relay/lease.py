"""One attempt of one request on one Target: holds what it counts, and gives it back exactly once."""
from __future__ import annotations

import asyncio
import enum
from typing import Any, Optional

from llmgw.parse.http1 import ResponseHead
from llmgw.parse.sse import SseScanner
from llmgw.relay.reply import error_event
from llmgw.relay.server import Request
from llmgw.relay.upstream import Target, UpstreamConnection


class Outcome(enum.Enum):
    """How an attempt ended."""

    WHOLE = "whole"               # the whole response was passed on
    REFUSED = "refused"           # connect failed: no byte of the request was sent
    RESET = "reset"               # no byte of a response came
    LATE = "late"                 # no byte of a response came in time
    BROKEN = "broken"             # the response began and did not end as it must
    TRUNCATED = "truncated"       # a stream that ended cleanly, but without its [DONE]
    GIVEN_UP = "given up"         # we, or the client, wanted it no more


class Owner:
    """Who started a lease and decides what its response means."""

    def head_arrived(self, lease: "Lease", head: ResponseHead) -> None:
        """The response's head is there: call ``lease.relay`` or ``lease.collect``, or release the lease."""
        raise NotImplementedError

    def collected(self, lease: "Lease", body: bytes) -> None:
        """The whole body of a response that was to be collected; the lease is released."""
        raise NotImplementedError

    def failed(self, lease: "Lease", outcome: Outcome, why: str) -> None:
        """The attempt ended and the client has not got a byte; the lease is released."""
        raise NotImplementedError

    def ended(self, lease: "Lease", outcome: Outcome) -> None:
        """The lease is released, for whatever reason; called once, first of all."""


class Lease:
    """Counts in ``target.in_flight`` from start to ``release``, which may be called any number of times."""

    # Defaults stand in the class: setting a dozen attributes per request would be felt.
    connection: Optional[UpstreamConnection] = None
    scanner: Optional[SseScanner] = None
    head: Optional[ResponseHead] = None
    alive = True                      # bytes came since the last sweep
    quiet_since = 0.0
    relayed = False                   # the response is passed on to the client
    last = b""                        # its last piece, once it is whole
    _released = False
    _wire = b""
    _opening: Optional[asyncio.Task[None]] = None
    _kept = False                     # runs on a connection of the pool
    _collected: Any = None
    _size = 0
    _limit = 0

    def __init__(self, owner: Owner, target: Target, request: Optional[Request], limit_seconds: float) -> None:
        self.owner = owner
        self.target = target
        self.request = request
        self.limit_seconds = limit_seconds     # of silence; the owner shortens it when the head is there

    def start(self, wire: bytes) -> None:
        """Send the request, whose bytes are ``wire``."""
        if self.request is not None:           # what we ask for ourselves is no load
            self.target.in_flight += 1
        self._wire = wire
        connection = self.target.take()
        if connection is not None:
            self._kept = True
            self.connection = connection
            connection.send(self, wire)
        else:
            self._open()

    def _open(self) -> None:
        self._kept = False
        self._opening = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        try:
            connection = await self.target.connect()
        except (OSError, asyncio.TimeoutError, UnicodeError) as error:
            self._opening = None
            self._fail(Outcome.REFUSED, str(error) or "no connection in time")
            return
        self._opening = None
        if self._released:
            connection.transport.abort()
            return
        if connection.lost:           # a write would be dropped in silence, and nobody would tell us
            self._fail(Outcome.REFUSED, "closed its connection at once")
            return
        self.connection = connection
        connection.send(self, self._wire)

    # What the connection tells.

    def head_arrived(self, head: ResponseHead) -> None:
        self._wire = b""
        self.head = head
        self.owner.head_arrived(self, head)

    def relay(self, head: bytes, *, chunked: bool, scan: bool) -> None:
        """Pass the response on, behind ``head``; ``scan`` its events."""
        assert self.request is not None
        self.relayed = True
        if self.request.connection.stalled:
            self.pause()
        self.scanner = SseScanner() if scan else None
        self.request.begin(head, chunked)

    def collect(self, limit: int) -> None:
        """Keep the body, up to ``limit`` bytes of it, and tell the owner when it is whole."""
        self._collected, self._limit = [], limit

    def whole_chunk(self, framed: bytes, payload: bytes) -> None:
        """Pass on one chunk that is framed already."""
        if self.relayed and self.request is not None and self.request.chunked:
            if self.scanner is not None:
                self.scanner.feed(payload)
            self.request.send_framed(framed)
        else:
            self.payload(payload)

    def payload(self, payload: bytes) -> None:
        if self.relayed and self.request is not None:
            if self.scanner is not None:
                self.scanner.feed(payload)
            self.request.send(payload)
        elif self._collected is not None:
            self._size += len(payload)
            if self._size <= self._limit:
                self._collected.append(payload)

    def complete(self, payload: bytes) -> None:
        """The response ended as its framing says; ``payload`` is its last piece."""
        request = self.request
        if self._collected is not None:
            self.payload(payload)
            self.release(Outcome.WHOLE)
            self.owner.collected(self, b"".join(self._collected))
        elif self.relayed and request is not None:
            scanner = self.scanner
            if scanner is not None:
                scanner.feed(payload)
                scanner.end()
                if not (scanner.done or scanner.failed or scanner.blind):
                    if not payload and not request.answered:
                        self._fail(Outcome.BROKEN, "an empty stream")
                        return
                    self._end_stream_badly(payload, Outcome.TRUNCATED,
                                           "the engine ended the stream before it was complete", "stream_truncated")
                    return
            self.last = payload
            self.release(Outcome.WHOLE)
            request.finish(payload)
        else:
            self.release(Outcome.GIVEN_UP)

    def broken(self, why: str, began: bool = True) -> None:
        """The response is not whole and will not be; ``began``: some byte of it came."""
        self.connection = None
        if self.head is None:
            if self._kept and not self._released and not began:
                self._open()              # a kept connection that the other side had closed: not its fault
            else:
                self._fail(Outcome.RESET, why)
        elif self.request is not None and self.request.answered:
            self._end_stream_badly(b"", Outcome.BROKEN, "the engine ended the connection in the middle of its answer",
                                   "upstream_disconnected")
        else:
            self._fail(Outcome.BROKEN, why)

    def _end_stream_badly(self, payload: bytes, outcome: Outcome, message: str, code: str) -> None:
        request, scanner = self.request, self.scanner
        assert request is not None
        if scanner is not None:
            gap = b"" if scanner.between_events else b"\n\n"
            request.send(payload + gap + error_event(message, code))
        self.release(outcome)
        request.abort()

    def _fail(self, outcome: Outcome, why: str) -> None:
        if self._released:
            return
        self.release(outcome)
        self.owner.failed(self, outcome, why)

    # What the owner tells.

    def release(self, outcome: Outcome) -> None:
        """Give back everything; a connection that is still in use is closed."""
        if self._released:
            return
        self._released = True
        if self.request is not None:
            self.target.in_flight -= 1
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.give_up()
        if self._opening is not None:
            self._opening.cancel()
            self._opening = None
        self.owner.ended(self, outcome)

    def pause(self) -> None:
        """The client takes no more for now."""
        if self.connection is not None:
            self.connection.transport.pause_reading()

    def resume(self) -> None:
        if self.connection is not None:
            self.alive = True
            self.connection.transport.resume_reading()

    def sweep(self, now: float, paused: bool) -> None:
        """End the attempt when nothing came for ``limit_seconds``."""
        if self.alive or paused:
            self.alive = False
            self.quiet_since = now
        elif now - self.quiet_since > self.limit_seconds:
            self._time_out()

    def fail_now(self, why: str) -> None:
        """End an attempt that has no byte of a response yet, and never will."""
        if self.head is None:
            self._fail(Outcome.RESET, why)

    def end_now(self, why: str) -> None:
        """End an attempt because we are told to; an answer that has begun ends with its error event."""
        if self._released:
            return
        if self.request is not None and self.request.answered:
            self._end_stream_badly(b"", Outcome.GIVEN_UP, why, "draining")
        else:
            self.release(Outcome.GIVEN_UP)

    def _time_out(self) -> None:
        if self.request is not None and self.request.answered:
            self._end_stream_badly(b"", Outcome.BROKEN, "the engine sent nothing for too long", "upstream_timeout")
        else:
            self._fail(Outcome.LATE, f"no answer in {self.limit_seconds:g} seconds")
