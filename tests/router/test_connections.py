"""What a router holds for a request is given back exactly once, however the request ends."""
from __future__ import annotations

import os
import resource
import signal
import threading
import time

import pytest

from tests.fakes.raw_client import RawClient, ask, request
from tests.fakes.router_process import KEY, RouterProcess, chat, model, table
from tests.fakes.tcp_proxy import TcpProxy
from tests.fakes.upstream import DONE, Upstream, delta, wait_for, whole_answer


def hold(gone):
    """Return an answer that never comes; ``gone`` gets the time at which the other side closed."""
    def answer(exchange):
        assert exchange.wait_gone(60)
        gone.append(time.monotonic())
        exchange.close()
    return answer


def test_ten_clients_that_leave_before_the_stand_ins_head_leave_nothing(router, upstream, nothing_in_flight):
    gone = []
    engine = upstream(hold(gone))
    started = router(engine.port)
    clients = [started.open(chat(str(turn))) for turn in range(10)]
    wait_for(lambda: len(engine.requests) == 10)
    assert started.in_flight() == 10
    for client in clients:
        client.sock.close()
    wait_for(lambda: len(gone) == 10)
    nothing_in_flight(started)
    assert started.metrics()["llmgw_router_client_disconnects_total"] == 10


@pytest.mark.parametrize("stream", [False, True])
def test_the_stand_in_learns_at_once_that_the_client_has_left(router, upstream, stream):
    gone = []
    begun = threading.Event()

    def answer(exchange):
        if exchange.json.get("stream"):
            exchange.begin_stream()
            exchange.chunk(delta("a"))
        begun.set()
        hold(gone)(exchange)

    started = router(upstream(answer).port)
    with started.open(chat(stream=stream)) as client:
        assert begun.wait(40)
        if stream:
            client.until(delta("a"))
    left = time.monotonic()
    wait_for(lambda: gone)
    assert gone[0] - left < 5                 # at once; the machine may be busy


def test_a_stream_counts_as_in_flight_until_its_end(router, upstream, nothing_in_flight):
    finish = threading.Event()

    def answer(exchange):
        exchange.begin_stream()
        exchange.chunk(delta("a"))
        assert finish.wait(40)
        exchange.chunk(DONE)
        exchange.end_stream()

    started = router(upstream(answer).port)
    with started.open(chat(stream=True)) as client:
        client.until(delta("a"))
        assert started.in_flight() == 1
        finish.set()
        client.until(b"0\r\n\r\n")
    nothing_in_flight(started)


def test_any_mixture_of_endings_brings_every_count_back_to_zero(router, upstream, nothing_in_flight):
    endings = ["whole", "close", "reset", "head", "half", "truncate", "busy", "error", "hold"]

    def answer(exchange):
        how = exchange.json["messages"][0]["content"].split()[0]
        if how == "whole":
            whole_answer(exchange)
        elif how in ("close", "reset"):
            getattr(exchange, how)()
        elif how == "busy":
            exchange.answer(503, b"{}")
        elif how == "error":
            exchange.answer(500, b"oops")
        elif how == "hold":
            exchange.wait_gone(60)
            exchange.close()
        else:
            exchange.begin_stream()
            if how != "head":
                exchange.chunk(delta("a"))
            if how == "truncate":
                exchange.end_stream()
            else:
                exchange.reset()

    started = router(*(upstream(answer).port for _ in range(3)))
    clients = []
    for turn in range(90):
        clients.append(started.open(chat(f"{endings[turn % len(endings)]} {turn}", stream=True)))
    for turn, client in enumerate(clients):
        if endings[turn % len(endings)] != "hold":
            client.until(b"\r\n\r\n")
        client.sock.close()
    nothing_in_flight(started)
    assert started.metrics()["llmgw_router_body_bytes"] == 0
    assert "Traceback" not in started.log()


def test_idle_connections_are_closed_after_three_seconds(router, upstream):
    engine = upstream()
    started = router(engine.port)
    started.ask()
    wait_for(lambda: engine.scrapes > 0)
    before = len(engine._open)
    assert before >= 1
    clients = [started.open(chat(str(turn))) for turn in range(20)]
    for client in clients:
        client.answer()
        client.sock.close()
    wait_for(lambda: len(engine._open) <= 2, what="idle connections closed")


def test_the_same_connection_serves_one_request_after_the_other(router, upstream):
    engine = upstream()
    started = router(engine.port)
    wait_for(lambda: engine.scrapes > 0)
    for _ in range(30):
        started.ask()
    assert engine.connections <= 3


@pytest.mark.parametrize("cut", ["close", "reset", "half"])
@pytest.mark.parametrize("after", [0, 10, 120, 200])
def test_an_answer_cut_anywhere_on_the_way_is_an_error_or_a_cut_never_a_whole(router, upstream, nothing_in_flight, cut, after):
    engine = upstream()
    with TcpProxy(engine.port) as proxy:
        started = router(proxy.port)
        wait_for(lambda: engine.scrapes > 0)
        proxy.cut, proxy.cut_after = cut, after
        answer = started.ask()
        assert answer.status in (502, 503) or not answer.whole
        proxy.cut_after = None
        nothing_in_flight(started)
        assert started.ask().status == 200


def test_a_slow_way_to_the_engine_changes_no_byte(router, upstream):
    engine = upstream()
    with TcpProxy(engine.port) as proxy:
        proxy.delay_seconds = 0.05
        answer = router(proxy.port).ask(body=chat(stream=True))
        assert answer.whole and answer.body.endswith(DONE)


def test_a_way_that_is_blocked_does_not_hold_up_other_models(router, upstream):
    engine, other = upstream(), upstream()
    with TcpProxy(engine.port) as proxy:
        proxy.blocked = True
        started = router(table(model(proxy.port), model(other.port, name="other")))
        with started.open():
            for _ in range(5):
                assert started.ask(body=chat().replace(b'"m"', b'"other"')).status == 200
        proxy.blocked = False


def test_more_connections_than_open_files_allow_are_told_and_the_others_go_on(tmp_path, ends, upstream):
    finish = threading.Event()

    def answer(exchange):
        exchange.begin_stream()
        exchange.chunk(delta("a"))
        assert finish.wait(60)
        exchange.chunk(DONE)
        exchange.end_stream()

    engine = upstream(answer)
    started = RouterProcess(tmp_path, table(model(engine.port)), through=["/bin/sh", "-c", 'ulimit -n 160; exec "$@"', "sh"])
    ends.callback(started.stop)
    streams = [started.open(chat(str(turn), stream=True)) for turn in range(30)]
    for client in streams:
        client.until(delta("a"))
    others = [RawClient(started.port) for _ in range(150)]
    refused = 0
    for client in others:
        try:
            client.send(request("GET", "/healthz"))
            refused += client.answer().status == 503
        except (OSError, AssertionError):
            refused += 1
    assert refused
    finish.set()
    for client in streams:
        client.until(b"0\r\n\r\n")
    for client in streams + others:
        client.sock.close()
    wait_for(lambda: started.ask("GET", "/healthz").status == 200)


def test_sigterm_lets_streams_finish_says_so_and_ends_with_zero(router, upstream):
    finish = threading.Event()

    def answer(exchange):
        exchange.begin_stream()
        exchange.chunk(delta("a"))
        assert finish.wait(40)
        exchange.chunk(DONE)
        exchange.end_stream()

    started = router(upstream(answer).port)
    with started.open(chat(stream=True)) as client, RawClient(started.port) as idle:
        client.until(delta("a"))
        idle.send(request("GET", "/ready"))
        assert idle.answer().status == 200
        started.terminate()
        assert idle.closed()
        ready = ask(started.port, "GET", "/ready")
        assert ready.status == 503 and ready.error["code"] == "draining"
        refused = started.ask()
        assert refused.status == 503 and refused.headers["connection"] == "close"
        finish.set()
        client.until(b"0\r\n\r\n")
    assert started.process.wait(40) == 0
    assert not os.path.exists(os.path.join(started.folder, "endpoint.json"))


@pytest.mark.parametrize("how", ["grace", "second signal"])
def test_a_stream_that_does_not_end_is_ended_with_an_error_event(router, upstream, how):
    def answer(exchange):
        exchange.begin_stream()
        exchange.chunk(delta("a"))
        exchange.wait_gone(60)
        exchange.close()

    started = router(table(model(upstream(answer).port)), options=["--grace-seconds", "1" if how == "grace" else "100"])
    with started.open(chat(stream=True)) as client:
        client.until(delta("a"))
        started.terminate()
        if how == "second signal":
            wait_for(lambda: ask(started.port, "GET", "/ready").status == 503)
            started.process.send_signal(signal.SIGINT)
        rest = client.rest()
    assert b'"code": "draining"' in rest and b"[DONE]" not in rest and not rest.endswith(b"0\r\n\r\n")
    assert started.process.wait(40) == 0


def test_a_thousand_streams_at_once_are_whole(router, upstream, nothing_in_flight):
    count = 1000
    together = threading.Barrier(count)

    def answer(exchange):
        exchange.begin_stream()
        exchange.chunk(delta("a"))
        together.wait(120)
        whole = delta(exchange.json["messages"][0]["content"]) + DONE
        exchange.chunk(whole)
        exchange.end_stream()

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with Upstream(answer) as engine:
            started = router(engine.port)
            clients = [started.open(chat(f"stream {turn}", stream=True)) for turn in range(count)]
            for turn, client in enumerate(clients):
                answered = client.answer()
                assert answered.whole and answered.body == delta("a") + delta(f"stream {turn}") + DONE
                client.sock.close()
            nothing_in_flight(started)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_keep_alive_client_gets_each_answer_in_turn_under_load(shared):
    _, started = shared
    failures = []

    def many(number):
        with RawClient(started.port) as client:
            for turn in range(50):
                client.send(request("POST", "/v1/chat/completions", chat(f"{number} {turn}"), KEY))
                if client.answer().status != 200:
                    failures.append((number, turn))

    threads = [threading.Thread(target=many, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures
