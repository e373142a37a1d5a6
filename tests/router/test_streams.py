"""Streams of stand-in engines: every byte as it came, and an end that says the truth."""
from __future__ import annotations

import json
import threading

import pytest

from llmgw.parse.sse import MAX_EVENT_BYTES
from tests.fakes.raw_client import RawClient, request
from tests.fakes.router_process import KEY, REPLICA_KEY, chat
from tests.fakes.upstream import DONE, delta, event, wait_for

STREAM = chat(stream=True)
ERROR = b'data: {"error":'


def error_of(body):
    """Return the error object in the last event of ``body``."""
    last = body[body.rindex(ERROR):]
    assert last.endswith(b"\n\n")
    return json.loads(last[len(b"data: "):])["error"]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"], ids=["LF", "CRLF", "CR"])
def test_a_stream_cut_anywhere_arrives_byte_for_byte_from_the_stand_in(router, upstream, size, newline):
    data = (b": ping\n\n" + delta("北京").replace(b"\\u5317", "北".encode()) + b'data: {"choices":[]}\n\n' + DONE).replace(
        b"\n", newline)

    def answer(exchange):
        exchange.begin_stream()
        for at in range(0, len(data), size):
            exchange.chunk(data[at:at + size])
        exchange.end_stream()

    answered = router(upstream(answer).port).ask(body=STREAM)
    assert answered.whole and answered.body == data
    assert answered.headers["content-type"] == "text/event-stream"
    assert answered.headers["cache-control"] == "no-cache" and answered.headers["x-accel-buffering"] == "no"


def test_one_event_in_one_chunk_in_many_reads_of_the_stand_in(router, upstream):
    framed = b"%x\r\n%b\r\n" % (len(delta("a")), delta("a"))

    def answer(exchange):
        exchange.begin_stream()
        for byte in framed:
            exchange.send(bytes([byte]))
        exchange.send(framed + framed, b"%x\r\n%b\r\n0\r\n\r\n" % (len(DONE), DONE))

    answered = router(upstream(answer).port).ask(body=STREAM)
    assert answered.whole and answered.body == delta("a") * 3 + DONE


def test_a_stand_in_with_neither_length_nor_chunks_ends_by_closing(router, upstream):
    def answer(exchange):
        exchange.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n", delta("a"), DONE)
        exchange.close()

    answered = router(upstream(answer).port).ask(body=STREAM)
    assert answered.whole and answered.body == delta("a") + DONE


def test_events_arrive_one_by_one_and_not_at_the_end(router, upstream):
    step = threading.Event()

    def answer(exchange):
        exchange.begin_stream()
        exchange.chunk(delta("a"))
        assert step.wait(40)
        exchange.chunk(DONE)
        exchange.end_stream()

    with router(upstream(answer).port).open(STREAM) as client:
        client.until(delta("a"))
        step.set()
        client.until(DONE)


@pytest.mark.parametrize("ending", ["close", "reset"])
def test_a_stand_in_that_dies_in_the_middle_ends_with_an_error_event_and_a_cut_connection(router, upstream, ending):
    def answer(exchange):
        exchange.begin_stream()
        exchange.chunk(delta("a"))
        first.wait(40)
        getattr(exchange, ending)()

    first = threading.Event()
    started = router(upstream(answer).port)
    with started.open(STREAM) as client:
        head = client.until(b"\r\n\r\n")
        client.until(b"\n\n\r\n")
        first.set()
        rest = client.rest()
    assert head.startswith(b"HTTP/1.1 200")
    assert error_of(rest.split(b"\r\n")[1])["code"] == "upstream_disconnected"
    assert b"[DONE]" not in rest and not rest.endswith(b"0\r\n\r\n")


def test_the_error_event_does_not_melt_into_half_an_event(router, upstream):
    def answer(exchange):
        exchange.begin_stream()
        exchange.chunk(delta("a") + b'data: {"choi')
        exchange.close()

    answered = router(upstream(answer).port).ask(body=STREAM)
    assert not answered.whole
    assert answered.body.startswith(delta("a") + b'data: {"choi\n\n' + ERROR)


def test_a_clean_end_without_done_is_truncated(router, upstream):
    def answer(exchange):
        exchange.begin_stream()
        exchange.chunk(delta("a"))
        exchange.end_stream()

    started = router(upstream(answer).port)
    answered = started.ask(body=STREAM)
    assert not answered.whole and error_of(answered.body)["code"] == "stream_truncated"
    assert b"[DONE]" not in answered.body
    assert started.metrics()["llmgw_router_streams_truncated_total"] == 1


def test_a_clean_end_in_the_middle_of_an_event_is_truncated_and_the_error_stands_apart(router, upstream):
    def answer(exchange):
        exchange.begin_stream()
        exchange.chunk(delta("a") + b'data: {"choi')
        exchange.end_stream()

    answered = router(upstream(answer).port).ask(body=STREAM)
    assert not answered.whole and answered.body.startswith(delta("a") + b'data: {"choi\n\n' + ERROR)


def test_an_error_event_of_the_stand_in_passes_and_gets_no_second_one(router, upstream):
    failed = event({"error": {"message": "out of memory"}})

    def answer(exchange):
        exchange.begin_stream()
        exchange.chunk(failed)
        exchange.end_stream()

    answered = router(upstream(answer).port).ask(body=STREAM)
    assert answered.whole and answered.body == failed


def test_a_stand_in_that_dies_before_the_first_event_gives_a_real_status(router, upstream):
    def answer(exchange):
        exchange.begin_stream()
        exchange.close()

    answered = router(upstream(answer).port).ask(body=STREAM)
    assert answered.status == 502 and answered.headers["content-type"] == "application/json"
    assert answered.error["code"] == "upstream_disconnected"


def test_an_empty_stream_gives_a_real_status(router, upstream):
    def answer(exchange):
        exchange.begin_stream()
        exchange.end_stream()

    assert router(upstream(answer).port).ask(body=STREAM).status == 502


def test_after_the_first_byte_nothing_is_asked_of_another_replica(router, upstream):
    def answer(exchange):
        exchange.begin_stream()
        exchange.chunk(delta('{"tool": "x", "argum'))
        exchange.reset()

    first, second = upstream(answer), upstream(answer)
    answered = router(first.port, second.port).ask(body=STREAM)
    assert not answered.whole and len(first.requests) + len(second.requests) == 1


def test_an_error_for_a_stream_request_keeps_its_status_and_type(router, upstream):
    body = b'{"error":{"message":"too long","type":"invalid_request_error","code":400}}'
    answered = router(upstream(lambda exchange: exchange.answer(400, body, "application/json; charset=utf-8")).port).ask(
        body=STREAM)
    assert answered.status == 400 and answered.body == body
    assert answered.headers["content-type"] == "application/json; charset=utf-8"


def test_a_stream_without_a_newline_flows_on_in_bounded_memory(router, upstream):
    piece = b"x" * 65536
    count = 3 * MAX_EVENT_BYTES // len(piece)

    def answer(exchange):
        exchange.begin_stream()
        for _ in range(count):
            exchange.chunk(piece)
        exchange.end_stream()

    answered = router(upstream(answer).port).ask(body=STREAM)
    assert answered.whole and answered.body == piece * count


def test_a_stale_length_beside_chunks_does_not_cut_the_stream(router, upstream):
    def answer(exchange):
        exchange.begin_stream(["Content-Length: 5"])
        exchange.chunk(delta("a"))
        exchange.chunk(DONE)
        exchange.end_stream()

    answered = router(upstream(answer).port).ask(body=STREAM)
    assert answered.whole and answered.body == delta("a") + DONE and "content-length" not in answered.headers


def test_a_slow_reader_holds_the_stand_in_back_and_loses_nothing(router, upstream):
    sent, total = [0], 32 << 20
    piece = event(b"x" * 65000)

    def answer(exchange):
        exchange.begin_stream()
        while sent[0] < total:
            exchange.chunk(piece)
            sent[0] += len(piece)
        exchange.chunk(DONE)
        exchange.end_stream()

    started = router(upstream(answer).port)
    with started.open(STREAM) as client:
        client.until(b"\r\n\r\n")
        held = [0, 0]

        def is_held():
            held[:] = [held[1], sent[0]]
            threading.Event().wait(0.3)
            return 0 < sent[0] == held[1] == held[0]

        wait_for(is_held, what="the stand-in held back")
        assert sent[0] < total / 2            # socket buffers hold some; the router does not hold the rest
        body, whole = client._chunks()
    assert whole and len(body) == sent[0] + len(DONE) and body.endswith(DONE)


def test_usage_beside_done_in_one_read_is_counted_and_passes_unchanged(router, upstream):
    usage = event({"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 5, "total_tokens": 16}})

    def answer(exchange):
        exchange.begin_stream()
        exchange.send(b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (delta("a"), usage, DONE))
                      + b"0\r\n\r\n")

    started = router(upstream(answer).port)
    answered = started.ask(body=chat(stream=True, stream_options={"include_usage": True}))
    assert answered.body == delta("a") + usage + DONE
    assert started.metrics()['llmgw_router_tokens_total{model="m",kind="completion"}'] == 5


@pytest.mark.parametrize("more", [{"stream_options": None}, {"stream_options": {"include_usage": False}}, {"stream": None},
                                  {"stream": False, "stream_options": {"include_usage": True}}])
def test_stream_options_pass_as_they_are(router, upstream, more):
    engine = upstream(lambda exchange: exchange.answer())
    body = chat(**more)
    assert router(engine.port).ask(body=body).status == 200
    assert engine.requests[0].body == body


def test_response_headers_are_let_through_by_name_and_never_with_the_key(router, upstream):
    fields = ["Server: engine", "Date: yesterday", "X-Dup: 1", "X-Dup: 2", "Set-Cookie: a=b", f"X-Leak: {REPLICA_KEY}",
              "Access-Control-Allow-Origin: *", "X-Request-Id: engine-id", "OpenAI-Processing-Ms: 3", "Keep-Alive: timeout=5",
              "Connection: keep-alive, x-private", "Retry-After: 3", f"Authorization: Bearer {REPLICA_KEY}", "X-Api-Key: k"]
    started = router(upstream(lambda exchange: exchange.answer(fields=fields)).port)
    answered = started.ask(fields=["X-Request-Id: mine"])
    names = [name.lower() for name, _ in answered.fields]
    assert [value for name, value in answered.fields if name == "X-Dup"] == ["1", "2"]
    assert sorted(names) == sorted(["date", "server", "content-type", "content-length", "x-dup", "x-dup", "retry-after",
                                    "openai-processing-ms", "x-request-id"])
    assert answered.headers["server"] == "llmgw" and answered.headers["x-request-id"] == "mine"
    assert REPLICA_KEY not in answered.head.decode()


def test_a_second_request_on_the_same_connections_gets_its_own_answer(router, upstream):
    def answer(exchange):
        exchange.answer(body=json.dumps({"n": exchange.json["messages"][0]["content"]}).encode())

    started = router(upstream(answer).port)
    with RawClient(started.port) as client:
        for turn in ("a", "bb" * 500, "c", "", "d" * 99):
            client.send(request("POST", "/v1/chat/completions", chat(turn), KEY))
            assert client.answer().json == {"n": turn}
