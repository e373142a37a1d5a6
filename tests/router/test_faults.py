"""Rows of docs/faults.md that no other test of the router covers."""
from __future__ import annotations

import contextlib
import json
import socket
import time

import pytest

from tests.fakes.router_process import chat
from tests.fakes.tcp_proxy import TcpProxy
from tests.fakes.upstream import wait_for


@pytest.fixture
def black_hole():
    """A port where a connect gets no answer at all: its queue of connections is full."""
    with contextlib.ExitStack() as held:
        full = held.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            sock = held.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(full.getsockname())
        yield full.getsockname()[1]


def test_a_node_that_is_cut_off_costs_no_request_and_is_left_out_at_once(router, upstream, black_hole, nothing_in_flight):
    engine = upstream()
    started = router(black_hole, engine.port)
    asked, until = 0, time.monotonic() + 8            # longer than it is left out for the failure alone
    while time.monotonic() < until or asked < 30:
        assert started.ask(body=chat(f"question {asked}")).status == 200
        asked += 1
    tried = started.metrics().get('llmgw_router_retries_total{reason="refused"}', 0)
    assert tried <= 2, f"{tried} of {asked} requests waited for it first"
    nothing_in_flight(started)


def test_a_node_that_is_back_is_asked_again(router, upstream):
    """Found by the reading of its gauges, not by a request that dares."""
    first, second = upstream(), upstream()
    with TcpProxy(first.port) as way:
        started = router(way.port, second.port)
        wait_for(lambda: first.scrapes)
        way.refused = True
        way.drop()
        assert {started.ask(body=chat(f"question {turn}")).status for turn in range(20)} == {200}
        way.refused = False
        seen = len(first.requests)

        def asked():
            assert started.ask(body=chat(f"again {time.monotonic()}")).status == 200
            return len(first.requests) > seen
        wait_for(asked)


def test_an_extension_that_we_do_not_know_passes_as_it_is(router, upstream):
    """Such as a tool without parameters, which strict schemas refuse."""
    engine = upstream()
    body = chat(tools=[{"type": "function", "function": {"name": "now"}}], chat_template_kwargs={"x": [1, {"y": None}]})
    assert router(engine.port).ask(body=body).status == 200
    wait_for(lambda: engine.requests)
    assert engine.requests[0].body == body and json.loads(body)["tools"]
