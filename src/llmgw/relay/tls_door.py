"""Accepts connections for a listener with TLS: handshakes that stall, fail or come in crowds hinder nobody."""
from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Callable, Dict, Set

from llmgw.system import tls

log = logging.getLogger(__name__)

MAX_HANDSHAKES = 64           # unfinished ones, of one address
MAX_ALL = 4096
ACCEPTS = 100                 # of one turn of the loop
PAUSE_SECONDS = 0.1           # out of file descriptors: others may close theirs
_PLAIN = (b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n"
          b"Content-Length: 35\r\n\r\nthis port speaks TLS: use https://\n")


class TlsDoor:
    """Owns a listening socket; each connection whose handshake is over gets a protocol of ``factory``."""

    def __init__(self, listening: Any, context: Any, factory: Callable[[], asyncio.Protocol]) -> None:
        self._listening, self._context, self._factory = listening, context, factory
        self._shaking: Dict[str, int] = {}
        self._tasks: Set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(listening, self._accept)

    def close(self) -> None:
        """Accept nothing more; handshakes under way go on."""
        self._loop.remove_reader(self._listening)
        self._listening.close()

    def _accept(self) -> None:
        """Take what waits, a bounded number at once."""
        for _ in range(ACCEPTS):
            try:
                sock, peer = self._listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                log.warning("cannot accept a connection: %s", error.strerror or error)
                self._loop.remove_reader(self._listening)
                self._loop.call_later(PAUSE_SECONDS, self._resume)
                return
            address = str(peer[0])
            if self._shaking.get(address, 0) >= MAX_HANDSHAKES or len(self._tasks) >= MAX_ALL:
                sock.close()
                continue
            self._shaking[address] = self._shaking.get(address, 0) + 1
            task = self._loop.create_task(self._greet(sock, address))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _resume(self) -> None:
        if self._listening.fileno() >= 0:
            self._loop.add_reader(self._listening, self._accept)

    async def _greet(self, sock: Any, address: str) -> None:
        deadline = time.monotonic() + tls.HANDSHAKE_SECONDS
        try:
            sock.setblocking(False)
            first = await asyncio.wait_for(self._first_byte(sock), tls.HANDSHAKE_SECONDS)
            if not first or not tls.is_handshake(first):
                if first:
                    await asyncio.wait_for(_say_https(sock), 1.0)
                sock.close()
                return
            await self._loop.connect_accepted_socket(self._factory, sock, ssl=self._context,
                                                     ssl_handshake_timeout=max(0.1, deadline - time.monotonic()))
        except (OSError, asyncio.TimeoutError):
            sock.close()
        except Exception:                         # a loop border: one connection's bug is not the others'
            log.exception("a connection could not be taken")
            sock.close()
        finally:
            left = self._shaking.pop(address) - 1
            if left:
                self._shaking[address] = left

    async def _first_byte(self, sock: Any) -> bytes:
        """Return the first byte without taking it; empty when the peer has gone."""
        there: asyncio.Future[None] = self._loop.create_future()

        def come() -> None:
            if not there.done():
                there.set_result(None)
        self._loop.add_reader(sock, come)
        try:
            await there
            return tls.first_byte(sock)
        finally:
            self._loop.remove_reader(sock)


async def _say_https(sock: Any) -> None:
    """Answer a peer that speaks plain HTTP, and let it read that before the close."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(sock, _PLAIN)
    tls.end_writing(sock)
    while await loop.sock_recv(sock, 1 << 16):
        pass
