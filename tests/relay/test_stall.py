"""A client that takes nothing of its answer is held in bounded memory, and in the end let go."""
from __future__ import annotations

import asyncio
import socket
import time

from llmgw.relay.listener import Listener
from llmgw.relay.server import HIGH_WATER_BYTES, STALL_SECONDS, Application

PIECE = b"x" * 65536


class Flood(Application):
    """Stands in for a router: sends until it is told to pause, and is then told that the client has gone."""

    def __init__(self):
        self.sent, self.paused, self.gone = 0, asyncio.Event(), asyncio.Event()

    def check(self, request):
        return None

    def serve(self, request):
        request.owner = self
        request.begin(b"HTTP/1.1 200 OK\r\n\r\n", False)
        while not self.paused.is_set():
            request.send(PIECE)
            self.sent += len(PIECE)

    def pause(self):
        self.paused.set()

    def sweep(self, now):
        pass

    def client_gone(self):
        self.gone.set()


def test_a_client_that_takes_nothing_for_two_minutes_is_let_go():
    async def scenario():
        flood = Flood()
        listener = Listener(flood)
        port = await listener.listen("127.0.0.1", 0)
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            await asyncio.wait_for(flood.paused.wait(), 40)
            connection, = listener.connections
            waiting = connection.transport.get_write_buffer_size()
            assert waiting <= HIGH_WATER_BYTES + len(PIECE) < flood.sent + 1
            connection.sweep(time.monotonic() + STALL_SECONDS - 5)
            assert not connection.transport.is_closing()
            connection.sweep(time.monotonic() + STALL_SECONDS + 5)
            await asyncio.wait_for(flood.gone.wait(), 40)
            assert listener.connections == set()
        await listener.close()
    asyncio.run(scenario())
