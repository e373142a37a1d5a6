"""When a request is sent once more, when not, and how few bad requests leave healthy replicas alone."""
from __future__ import annotations

import socket
import threading

import pytest

from tests.fakes.raw_client import RawClient, request
from tests.fakes.router_process import KEY, chat, model, replica, table
from tests.fakes.upstream import wait_for, whole_answer


def closed_port():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


def status(code, body=b'{"error":{"message":"no"}}', fields=()):
    return lambda exchange: exchange.answer(code, body, fields=fields)


def home_first(started, first):
    """Return a body that goes to ``first`` when all is idle."""
    for turn in range(200):
        body = chat(f"try {turn}")
        seen = len(first.requests)
        started.ask(body=body)
        if len(first.requests) > seen:
            return body
    raise AssertionError("no body goes there")


def test_a_refused_connection_is_tried_on_another_replica(router, upstream):
    engine = upstream()
    started = router(closed_port(), engine.port)
    assert [started.ask(body=chat(str(turn))).status for turn in range(10)] == [200] * 10


def test_three_refused_connections_do_not_use_up_the_attempts(router, upstream):
    engine = upstream()
    started = router(closed_port(), closed_port(), closed_port(), engine.port)
    assert [started.ask(body=chat(str(turn))).status for turn in range(10)] == [200] * 10


def test_with_every_connection_refused_the_answer_is_503(router):
    answer = router(closed_port(), closed_port()).ask()
    assert answer.status == 503 and answer.error["code"] == "upstream_unreachable" and "retry-after" in answer.headers
    assert "127.0.0.1" not in answer.error["message"]


@pytest.mark.parametrize("ending", ["close", "reset"])
def test_a_stand_in_that_dies_before_a_byte_is_replaced_by_another(router, upstream, ending):
    bad = upstream(lambda exchange: getattr(exchange, ending)())
    good = upstream()
    started = router(bad.port, good.port)
    assert [started.ask(body=chat(str(turn))).status for turn in range(10)] == [200] * 10
    retries = sum(value for name, value in started.metrics().items() if "retries_total" in name)
    # one for each that met silence; on a connection kept from a reading of gauges that is met with a fresh one first
    assert retries == sum(exchange.first for exchange in bad.requests) >= 1


def test_at_most_two_replicas_see_a_request(router, upstream):
    engines = [upstream(lambda exchange: exchange.close()) for _ in range(4)]
    answer = router(*(engine.port for engine in engines)).ask()
    assert answer.status == 502 and answer.error["code"] == "upstream_disconnected"
    assert sum(1 for engine in engines if engine.requests) == 2
    # a kept connection that ends without a byte is replaced by a fresh one, once
    assert max(len(engine.requests) for engine in engines) <= 2


@pytest.mark.parametrize("code", [429, 503])
def test_a_busy_stand_in_is_asked_once_and_another_answers(router, upstream, code):
    busy, good = upstream(status(code, fields=["Retry-After: 7"])), upstream()
    started = router(busy.port, good.port)
    assert [started.ask(body=chat(str(turn))).status for turn in range(10)] == [200] * 10
    assert len(busy.requests) <= 1            # left alone for its Retry-After


@pytest.mark.parametrize("code", [429, 503])
def test_when_all_are_busy_the_answer_of_the_last_passes_with_its_retry_after(router, upstream, code):
    engines = [upstream(status(code, fields=["Retry-After: 7"])) for _ in range(3)]
    answer = router(*(engine.port for engine in engines)).ask()
    assert answer.status == code and answer.headers["retry-after"] == "7"
    assert sum(len(engine.requests) for engine in engines) == 2


@pytest.mark.parametrize("code", [400, 404, 408, 413, 422, 500, 501, 502, 504])
def test_other_errors_are_never_sent_elsewhere(router, upstream, code):
    engines = [upstream(status(code)) for _ in range(2)]
    answer = router(*(engine.port for engine in engines)).ask()
    assert answer.status == code and answer.json == {"error": {"message": "no"}}
    assert sum(len(engine.requests) for engine in engines) == 1


@pytest.mark.parametrize("code, fields", [(401, ()), (403, ()), (429, ["X-Llmgw-Error-Code: too_many_wrong_keys"])])
def test_an_engine_that_refuses_our_key_is_our_fault_and_not_the_clients(router, upstream, code, fields):
    engine = upstream(status(code, b'{"error":"Unauthorized"}', fields=fields))
    answer = router(engine.port).ask()
    assert answer.status == 502 and answer.error["code"] == "replica_auth"


@pytest.mark.parametrize("body, words", [(b'{"error":"text"}', "text"), (b"<html>boom</html>", "status 500"),
                                         (b"", "status 500"), (b'{"message":"hm"}', "hm"), (b"[" * 100000, "status 500"),
                                         (b'{"error":{"message":3}}', "status 500")], ids=lambda value: repr(value)[:20])
def test_an_error_that_is_no_openai_object_becomes_one(router, upstream, body, words):
    answer = router(upstream(status(500, body)).port).ask()
    assert answer.status == 500 and words in answer.error["message"] and answer.error["type"] == "server_error"


def test_what_a_gate_says_of_its_engine_counts_as_the_engines_silence(router, upstream):
    gates = [upstream(status(502, fields=[f"X-Llmgw-Error-Code: {code}"])) for code in ("engine_refused", "engine_reset")]
    good = upstream()
    started = router(*(gate.port for gate in gates), good.port)
    assert [started.ask(body=chat(str(turn))).status for turn in range(10)] == [200] * 10


def test_a_kept_connection_that_was_closed_meanwhile_is_replaced_without_a_retry(router, upstream):
    hang_up = []

    def answer(exchange):
        whole_answer(exchange)
        hang_up.append(exchange)

    engine = upstream(answer)
    started = router(engine.port)
    for _ in range(20):
        assert started.ask().status == 200
        engine.drop()
        assert started.ask().status == 200
    assert not any("retries_total" in name for name in started.metrics())


def test_a_stand_in_that_closes_each_kept_connection_at_the_second_request_is_served(router, upstream):
    served = set()

    def answer(exchange):
        if id(exchange.sock) in served:
            exchange.close()              # without a byte: as if it had been idle too long
        else:
            served.add(id(exchange.sock))
            whole_answer(exchange)

    started = router(upstream(answer).port)
    with RawClient(started.port) as client:
        for _ in range(10):
            client.send(request("POST", "/v1/chat/completions", chat(), KEY))
            assert client.answer().status == 200


def test_bytes_on_an_idle_connection_never_become_an_answer(router, upstream):
    """Seen before the next request, they end the connection. Nothing tells those that come after it from its answer."""
    ended = []

    def answer(exchange):
        exchange.answer(body=b'{"right": 1}')
        exchange.send(b'HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n{"wrong": 1}')
        ended.append(exchange.wait_gone())
        exchange.close()

    started = router(upstream(answer).port)
    for turn in range(10):
        assert started.ask().json == {"right": 1}
        wait_for(lambda turn=turn: len(ended) > turn)
    assert all(ended)


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", b"garbage\r\n\r\n",
                                  b"HTTP/1.1 200 OK\nContent-Length: 2\n\n{}", b"SSH-2.0-x\r\n",
                                  b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
                                  b"HTTP/1.1 100 Continue\r\n\r\n" * 40])
def test_a_response_that_cannot_be_framed_is_a_502(router, upstream, head):
    def answer(exchange):
        exchange.send(head)
        exchange.close()

    assert router(upstream(answer).port).ask().status == 502


def test_interim_responses_are_passed_over(router, upstream):
    def answer(exchange):
        exchange.send(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n")
        whole_answer(exchange)

    answered = router(upstream(answer).port).ask()
    assert answered.status == 200 and "link" not in answered.headers


def test_bad_requests_never_take_healthy_replicas_out(router, upstream):
    def answer(exchange):
        if exchange.json["messages"][0]["content"] == "bad":
            exchange.answer(500, b'{"error":{"message":"the request broke it"}}')
        else:
            whole_answer(exchange)

    started = router(upstream(answer).port, upstream(answer).port)
    assert {started.ask(body=chat("bad")).status for _ in range(60)} == {500}
    assert started.ask(body=chat("good")).status == 200
    assert not any(value for name, value in started.metrics().items() if "breaker_state" in name)


def test_a_replica_that_fails_opens_its_breaker_and_closes_it_after_a_probe(router, upstream):
    broken = threading.Event()

    def answer(exchange):
        if broken.is_set():
            exchange.close()
        else:
            whole_answer(exchange)

    bad, good = upstream(answer), upstream()
    started = router(bad.port, good.port)
    body = home_first(started, bad)
    broken.set()

    def state():
        assert started.ask(body=body).status == 200
        return started.metrics()['llmgw_router_breaker_state{model="m",replica="m-0"}']

    wait_for(lambda: state() == 1, what="an open breaker")
    seen = len(bad.requests)
    assert [started.ask(body=body).status for _ in range(20)] == [200] * 20
    assert len(bad.requests) == seen
    broken.clear()
    wait_for(lambda: state() == 0, what="a closed breaker")


def test_with_every_breaker_open_all_are_asked_again(router, upstream):
    broken = threading.Event()
    broken.set()

    def answer(exchange):
        if broken.is_set():
            exchange.close()
        else:
            whole_answer(exchange)

    started = router(upstream(answer).port, upstream(answer).port)
    wait_for(lambda: started.ask().status == 502 and all(
        value == 1 for name, value in started.metrics().items() if "breaker_state" in name), what="open breakers")
    broken.clear()
    assert started.ask().status == 200
    assert started.metrics()["llmgw_router_panics_total"] > 0


def test_retries_have_a_budget(router, upstream):
    release, hold = threading.Event(), 12

    def slow(exchange):
        if exchange.json["messages"][0]["content"].startswith("first"):
            exchange.answer(503, b"{}", fields=["Retry-After: 0"])
        else:
            whole_answer(exchange)

    def second(exchange):
        release.wait(40)
        whole_answer(exchange)

    first_engine, second_engine = upstream(slow), upstream(second)
    started = router(table(model(replica(first_engine.port, "m-0", slots=1000), replica(second_engine.port, "m-1"))))
    clients = [started.open(chat(f"first {turn}")) for turn in range(hold)]
    try:
        wait_for(lambda: len(first_engine.requests) + len(second_engine.requests) >= hold)
        retries = started.metrics().get('llmgw_router_retries_total{reason="busy"}', 0)
        assert retries <= 3
    finally:
        release.set()
        for client in clients:
            client.answer()
            client.sock.close()


@pytest.mark.parametrize("end", ["engine_refused", "engine_reset", "reset"])
def test_all_that_a_dying_replica_leaves_behind_is_sent_to_another(router, upstream, end):
    """Not only as many as the budget for busy replicas has."""
    together, hold = threading.Event(), 12

    def dead(exchange):
        if len(first_engine.requests) >= hold:
            together.set()
        together.wait(40)
        if end == "reset":
            exchange.reset()
        else:                             # what a gate says of its engine
            exchange.answer(502, b"{}", fields=[f"X-Llmgw-Error-Code: {end}"])

    first_engine, second_engine = upstream(dead), upstream()
    started = router(table(model(replica(first_engine.port, "m-0", slots=1000), replica(second_engine.port, "m-1"))))
    clients = []
    while not together.is_set():
        clients.append(started.open(chat(f"held {len(clients)}")))
        wait_for(lambda: len(first_engine.requests) + len(second_engine.requests) >= len(clients))
    try:
        assert {client.answer().status for client in clients} == {200}
    finally:
        for client in clients:
            client.sock.close()


def test_an_answer_that_comes_too_late_is_a_504_and_is_not_retried(router, upstream, nothing_in_flight):
    gone = []

    def answer(exchange):
        gone.append(exchange.wait_gone())
        exchange.close()

    engines = [upstream(answer), upstream(answer)]
    started = router(table(model(*(engine.port for engine in engines))), options=["--first-byte-seconds", "1"])
    answered = started.ask()
    assert answered.status == 504 and answered.error["code"] == "upstream_timeout"
    wait_for(lambda: gone)
    assert gone == [True] and sum(len(engine.requests) for engine in engines) == 1
    nothing_in_flight(started)


def test_a_slow_first_byte_is_waited_for(router, upstream):
    def answer(exchange):
        threading.Event().wait(4)
        whole_answer(exchange)

    assert router(upstream(answer).port).ask().status == 200


def test_a_client_that_leaves_while_the_connect_hangs_leaves_nothing(router, nothing_in_flight):
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        held = []
        for _ in range(4):                    # the queue of connections is full: a connect hangs
            sock = socket.socket()
            sock.setblocking(False)
            sock.connect_ex(full.getsockname())
            held.append(sock)
        started = router(full.getsockname()[1])
        with started.open():
            wait_for(lambda: started.in_flight() == 1)
        nothing_in_flight(started)
        for sock in held:
            sock.close()


def test_the_last_piece_beyond_the_length_is_never_passed_on(router, upstream):
    def answer(exchange):
        exchange.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}EXTRA")
        exchange.close()

    answered = router(upstream(answer).port).ask()
    assert answered.body == b"{}"


def test_a_half_answer_of_a_plain_request_is_cut(router, upstream):
    def answer(exchange):
        exchange.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 200\r\n\r\n{")
        exchange.close()

    answered = router(upstream(answer).port).ask()
    assert answered.status == 200 and not answered.whole and answered.body == b"{"
