"""Requests that are malformed, hostile, slow or large: each is refused, and what follows it is never a request."""
from __future__ import annotations

import socket
import threading
import time

import pytest

from tests.fakes.raw_client import RawClient, ask, request
from tests.fakes.router_process import KEY, chat
from tests.fakes.upstream import wait_for

POST = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\n".encode()
SMUGGLED = request("POST", "/v1/chat/completions", chat("smuggled"), KEY)


@pytest.mark.parametrize("head, status", [
    (POST + b"Content-Length: 3\r\nContent-Length: 3\r\n", 400), (POST + b"Content-Length: 3\r\nContent-Length: 4\r\n", 400),
    (POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n", 400), (POST + b"Content-Length: +3\r\n", 400),
    (POST + b"Transfer-Encoding: gzip\r\n", 501), (POST + b"Content-Length : 3\r\n", 400),
    (POST + b"A: b\r\n c\r\nContent-Length: 3\r\n", 400), (POST + b"Host: b\r\nContent-Length: 3\r\n", 400),
    (POST.replace(b"Host: a\r\n", b"") + b"Content-Length: 3\r\n", 400),
    (POST.replace(b"\r\n", b"\n") + b"Content-Length: 3\n", 400),
    (POST.replace(b"1.1", b"1.0") + b"Transfer-Encoding: chunked\r\n", 400),
    (POST.replace(b"HTTP/1.1", b"HTTP/2.0"), 505), (POST + b"A: b\r\n" * 100, 431), (POST + b"A: " + b"x" * 70000 + b"\r\n", 431),
    (b"\x16\x03\x01\x00\xf4\x01\x00\x00\xf0\x03\x03\r\n", 400), (POST + b"Expect: something\r\nContent-Length: 3\r\n", 417),
], ids=lambda value: repr(value)[-40:])
def test_a_malformed_head_is_refused_and_the_connection_ends(shared, head, status):
    engine, started = shared
    with RawClient(started.port) as client:
        client.send(head + b"\r\nabc" + SMUGGLED)
        answer = client.answer()
        assert answer.status == status and answer.headers["connection"] == "close"
        assert answer.error["type"] == "invalid_request_error"
        assert client.closed()
    assert not engine.requests


@pytest.mark.parametrize("chunks", [b"1these\r\n", b"0x1\r\na\r\n", b"1_0\r\n", b"+1\r\na\r\n", b" 1\r\na\r\n", b"1\na\r\n",
                                    b"1\r\nab\r\n", b"0\r\nbad\r\n\r\n"])
def test_a_broken_chunk_is_refused_and_the_connection_ends(shared, chunks):
    engine, started = shared
    with RawClient(started.port) as client:
        client.send(POST + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + SMUGGLED)
        assert client.answer().status == 400
        assert client.closed()
    assert not engine.requests


def test_a_chunked_body_is_taken_whole_and_sent_on_with_its_length(shared):
    engine, started = shared
    body = chat("chunks")
    with RawClient(started.port) as client:
        client.send(POST + b"Transfer-Encoding: chunked\r\n\r\n")
        for at in range(0, len(body), 7):
            client.send(b"%x;ext=1\r\n%b\r\n" % (len(body[at:at + 7]), body[at:at + 7]))
        client.send(b"0\r\nTrailer: x\r\n\r\n")
        assert client.answer().status == 200
    (seen,) = engine.requests
    assert seen.body == body and "transfer-encoding" not in seen.headers and "trailer" not in seen.headers


def test_a_request_cut_into_single_bytes_is_taken(shared):
    engine, started = shared
    with RawClient(started.port) as client:
        for byte in request("POST", "/v1/chat/completions", chat("bytes"), KEY):
            client.send(bytes([byte]))
        assert client.answer().status == 200
    assert engine.requests[0].json["messages"][0]["content"] == "bytes"


def test_pipelined_requests_are_answered_in_order_one_after_the_other(shared):
    engine, started = shared
    with RawClient(started.port) as client:
        client.send(b"".join(request("POST", "/v1/chat/completions", chat(str(turn)), KEY) for turn in range(5))
                    + request("GET", "/healthz"))
        assert [client.answer().status for _ in range(6)] == [200] * 6
    assert [seen.json["messages"][0]["content"] for seen in engine.requests] == list("01234")


def test_a_flood_of_pipelined_requests_is_answered_with_bounded_memory(shared):
    engine, started = shared
    wave = request("GET", "/healthz") * 20000
    with RawClient(started.port) as client:
        sender = threading.Thread(target=client.send, args=(wave,))
        sender.start()
        for _ in range(20000):
            assert client.answer().status == 200
        sender.join(40)


def test_keep_alive_and_close_are_kept(shared):
    _, started = shared
    with RawClient(started.port) as client:
        for _ in range(3):
            client.send(request("POST", "/v1/chat/completions", chat(), KEY))
            assert "connection" not in client.answer().headers
        client.send(request("POST", "/v1/chat/completions", chat(), KEY, ["Connection: close"]))
        assert client.answer().headers["connection"] == "close"
        assert client.closed()


def test_http_1_0_gets_the_body_to_the_end_of_the_connection(shared):
    _, started = shared
    with RawClient(started.port) as client:
        client.send(request("POST", "/v1/chat/completions", chat(stream=True), KEY, version="1.0"))
        answer = client.answer()
        assert "transfer-encoding" not in answer.headers and answer.headers["connection"] == "close"
        assert answer.body.endswith(b"data: [DONE]\n\n")


def test_a_continue_comes_only_after_key_and_size_are_right(shared):
    engine, started = shared
    body = chat("expected")
    with RawClient(started.port) as client:
        client.send(POST + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body))
        assert client.answer().status == 100
        client.send(body)
        assert client.answer().status == 200
    assert "expect" not in engine.requests[0].headers
    for head, status in ((POST.replace(KEY.encode(), b"wrong") + b"Content-Length: 5\r\n", 401),
                         (POST + b"Content-Length: %d\r\n" % (65 << 20), 413)):
        with RawClient(started.port) as client:
            client.send(head + b"Expect: 100-continue\r\n\r\n")
            assert client.answer().status == status


def test_a_body_over_the_cap_is_refused_before_it_is_read(shared):
    engine, started = shared
    with RawClient(started.port) as client:
        client.send(POST + b"Content-Length: 100000000\r\n\r\n")
        answer = client.answer()
        assert answer.status == 413 and answer.error["code"] == "body_too_large"


def test_a_chunked_body_over_the_cap_is_refused_on_the_way(shared):
    _, started = shared
    piece = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
    with RawClient(started.port) as client:
        client.send(POST + b"Transfer-Encoding: chunked\r\n\r\n")
        with pytest.raises(OSError):
            for _ in range(80):
                client.send(piece)
            client.until(b"HTTP/1.1 413")
            raise BrokenPipeError
    assert started.ask().status == 200


def test_a_wrong_key_with_a_body_still_hears_its_401(shared):
    _, started = shared
    for _ in range(20):
        with RawClient(started.port) as client:
            client.send(POST.replace(KEY.encode(), b"wrong") + b"Content-Length: 300000\r\n\r\n")
            try:
                client.send(b"x" * 300000)
            except OSError:
                pass
            assert client.answer().status == 401


def test_a_silent_client_is_let_go_and_others_are_served_meanwhile(shared):
    _, started = shared
    silent = [RawClient(started.port) for _ in range(200)]
    begun = [RawClient(started.port) for _ in range(5)]
    for client in begun:
        client.send(POST[:30])
    assert started.ask().status == 200
    since = time.monotonic()
    for client in begun:
        assert client.answer().status == 408
    for client in silent:
        with client:
            assert client.closed()
    for client in begun:
        client.sock.close()
    assert time.monotonic() - since < 40


def test_a_head_that_drips_is_ended_by_its_absolute_deadline(shared):
    _, started = shared
    with RawClient(started.port) as client:
        stop = threading.Event()

        def drip():
            try:
                while not stop.wait(0.2):
                    client.send(b"A: b\r\n")
            except OSError:
                pass

        client.send(POST)
        thread = threading.Thread(target=drip)
        thread.start()
        try:
            assert client.answer().status == 408
        finally:
            stop.set()
            thread.join(20)


def test_a_half_closed_client_is_gone(router, upstream, nothing_in_flight):
    gone = []

    def answer(exchange):
        gone.append(exchange.wait_gone())
        exchange.close()

    engine = upstream(answer)
    started = router(engine.port)
    with started.open() as client:
        wait_for(lambda: engine.requests)
        client.sock.shutdown(socket.SHUT_WR)
        wait_for(lambda: gone)
        assert gone == [True] and client.closed()
    nothing_in_flight(started)


def test_five_hundred_silent_connections_do_not_slow_the_others(shared):
    _, started = shared
    silent = [RawClient(started.port) for _ in range(500)]
    since = time.monotonic()
    assert ask(started.port, "GET", "/healthz").status == 200
    assert time.monotonic() - since < 10
    for client in silent:
        client.sock.close()
