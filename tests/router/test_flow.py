"""One request in a router of this process: what follows when its engine says nothing for long, by a clock of ours."""
from __future__ import annotations

import asyncio
import json
import threading
import time

import pytest

from llmgw.router.app import Router
from llmgw.router.flow import SILENCE_SECONDS
from tests.fakes.raw_client import request
from tests.fakes.router_process import KEY, chat, model, table
from tests.fakes.upstream import Upstream, delta

PING = b": keep-alive\n\n"
DEADLINE = 60


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_falls_silent_is_ended_after_two_minutes_and_pings_are_no_silence(stream):
    go_on, gone = threading.Event(), []

    def engine_says(exchange):
        if stream:
            exchange.begin_stream()
            exchange.chunk(delta("Paris"))
            assert go_on.wait(DEADLINE)
            exchange.chunk(PING)
        else:
            exchange.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{")
            assert go_on.wait(DEADLINE)
            exchange.send(b" ")
        gone.append(exchange.wait_gone(DEADLINE))

    async def scenario():
        router = Router("r")
        router.swap(table(model(engine.port)))
        port = await router.listener.listen("127.0.0.1", 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request("POST", "/v1/chat/completions", chat(stream=stream), KEY))
        await asyncio.wait_for(reader.readuntil(b"Paris" if stream else b"\r\n\r\n{"), DEADLINE)
        connection, = router.listener.connections
        replica, = router.table.replicas
        start = time.monotonic()
        connection.sweep(start)                                      # from now on there is silence
        connection.sweep(start + SILENCE_SECONDS - 2)
        assert replica.in_flight == 1
        go_on.set()
        await asyncio.wait_for(reader.readuntil(PING if stream else b" "), DEADLINE)
        connection.sweep(start + 2 * SILENCE_SECONDS)                # bytes came: it begins anew
        connection.sweep(start + 3 * SILENCE_SECONDS - 1)
        assert replica.in_flight == 1
        connection.sweep(start + 3 * SILENCE_SECONDS + 1)
        assert replica.in_flight == 0 and router.active == 0
        rest = b""
        with pytest.raises((ConnectionError, EOFError)):             # aborted: never the end of its framing
            while True:
                rest += await asyncio.wait_for(reader.readexactly(1), DEADLINE)
        await router.listener.close()
        writer.close()
        return rest

    assert SILENCE_SECONDS == 120
    with Upstream(engine_says) as engine:
        rest = asyncio.run(scenario())
    assert gone == [True], "the engine learns that nobody wants its answer"
    assert b"[DONE]" not in rest and not rest.endswith(b"0\r\n\r\n")
    if stream:
        data, = [line for line in rest.split(b"\n") if line.startswith(b"data: ")]
        assert json.loads(data[6:])["error"]["code"] == "upstream_timeout"
