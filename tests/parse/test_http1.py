"""Heads and framing: what we accept, h11 accepts with the same framing; the rest is refused by name."""
from __future__ import annotations

import h11
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llmgw.parse.http1 import (MAX_FIELDS, MAX_HEAD_BYTES, ChunkDecoder, MalformedHttp, RequestReader, ResponseReader,
                               chunk, head_end, parse_request, parse_response)

POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n"


def accepted(data):
    """Return the head in ``data`` and what follows it, or None."""
    try:
        end = head_end(data)
        return None if end < 0 else (parse_request(data[:end + 2]), data[end + 4:])
    except MalformedHttp:
        return None


def refused(head, reader=parse_request):
    with pytest.raises(MalformedHttp) as caught:
        end = head_end(head + b"\r\n")
        assert end >= 0
        reader(head[:end + 2])
    assert len(caught.value.message) <= 500
    return caught.value


@pytest.mark.parametrize("lines, status", [
    (b"Content-Length: 3\r\nContent-Length: 3\r\n", 400), (b"Content-Length: 3\r\nContent-Length: 4\r\n", 400),
    (b"Content-Length: 3, 3\r\n", 400), (b"Content-Length: +3\r\n", 400), (b"Content-Length: -3\r\n", 400),
    (b"Content-Length: 0x3\r\n", 400), (b"Content-Length: 3 3\r\n", 400), (b"Content-Length: \r\n", 400),
    (b"Content-Length: 1_0\r\n", 400), (b"Content-Length: " + b"1" * 16 + b"\r\n", 400),
    (b"Content-Length: \xc2\xb2\r\n", 400),
    (b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n", 400),
    (b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n", 400),
    (b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", 400),
    (b"Transfer-Encoding: gzip, chunked\r\n", 501), (b"Transfer-Encoding: identity\r\n", 501),
    (b"Transfer-Encoding: xchunked\r\n", 501), (b"Transfer-Encoding: chunked, chunked\r\n", 501),
    (b"Transfer-Encoding: \x0bchunked\r\n", 400),
    (b"Content-Length : 3\r\n", 400), (b"X y: 3\r\n", 400), (b": 3\r\n", 400), (b"novalue\r\n", 400),
    (b"A: b\r\n folded\r\n", 400), (b"A: b\r\n\tfolded\r\n", 400), (b"A: b\x00c\r\n", 400), (b"A: b\rc\r\n", 400),
    (b"A: b\nC: d\r\n", 400), (b"Host: b\r\n", 400), (b"Authorization: a\r\nAuthorization: a\r\n", 400),
    (b"Expect: 200-ok\r\n", 417), (b"A: b\r\n" * MAX_FIELDS, 431)], ids=repr)
def test_a_head_that_could_be_read_in_two_ways_is_refused(lines, status):
    assert refused(POST + lines).status == status


@pytest.mark.parametrize("head, status", [
    (b"POST / HTTP/1.1\r\n", 400), (b"GET / HTTP/2.0\r\nHost: a\r\n", 505), (b"GET / HTTP/0.9\r\nHost: a\r\n", 505),
    (b"GET  / HTTP/1.1\r\nHost: a\r\n", 400), (b"GET /\r\nHost: a\r\n", 400), (b"GET / http/1.1\r\nHost: a\r\n", 400),
    (b"get / HTTP/1.1\r\nHost: a\r\n", 400), (b" GET / HTTP/1.1\r\nHost: a\r\n", 400),
    (b"\r\nGET / HTTP/1.1\r\nHost: a\r\n", 400), (b"GET /\xff HTTP/1.1\r\nHost: a\r\n", 400),
    (b"GET /" + b"a" * 20000 + b" HTTP/1.1\r\nHost: a\r\n", 414), (b"GET / HTTP/1.1\r\nHost: a/b\r\n", 400),
    (b"GET / HTTP/1.1\r\nHost: a b\r\n", 400), (b"GET / HTTP/1.1\r\nHost: a?x\r\n", 400),
    (b"\x16\x03\x01\x02\x00\x01\x00\r\n", 400),
    (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n", 400)], ids=lambda value: repr(value)[:60])
def test_a_request_line_or_host_that_is_none_is_refused(head, status):
    assert refused(head).status == status


def test_a_head_over_the_limit_is_refused_before_it_ends():
    with pytest.raises(MalformedHttp) as caught:
        head_end(b"GET / HTTP/1.1\r\nA: " + b"x" * MAX_HEAD_BYTES)
    assert caught.value.status == 431


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\nHost: a\n\n", b"\n", b"GET / HTTP/1.1\r\nHost: a\n"])
def test_a_line_that_ends_by_lf_alone_is_refused_without_waiting_for_more(data):
    with pytest.raises(MalformedHttp):
        head_end(data)


def test_the_good_ones_are_read():
    head = parse_request(POST + b"content-length:90\r\nConnection: Keep-Alive, close\r\nX-A:  b \r\nx-a: c\r\n"
                         b"Expect: 100-Continue\r\n")
    assert (head.method, head.path, head.length, head.chunked) == (b"POST", b"/v1/chat/completions", 90, False)
    assert not head.keep_alive and head.expects and head.headers[b"x-a"] == b"b, c"
    old = parse_request(b"GET /a?b HTTP/1.0\r\n")
    assert old.path == b"/a" and old.target == b"/a?b" and not old.keep_alive
    assert parse_request(POST + b"Transfer-Encoding: Chunked\r\n").chunked


FIELDS = st.sampled_from([
    b"Host: a", b"host: b:80", b"Content-Length: 5", b"content-length: 0", b"Content-Length: 05", b"Content-Length: +5",
    b"Content-Length: 5, 5", b"Transfer-Encoding: chunked", b"transfer-encoding: CHUNKED", b"Transfer-Encoding: gzip",
    b"Connection: close", b"Connection: keep-alive", b"A: b", b"A : b", b" A: b", b"A:b", b"A:", b": b", b"A", b"",
    b"Expect: 100-continue", b"A: \x80", b"A: \x00", b"A: \x0b", b"A: b\t ", b"Host:", b"A: b\rc", b"Upgrade: x"])
LINES = st.sampled_from([b"GET / HTTP/1.1", b"POST /a HTTP/1.1", b"POST /a HTTP/1.0", b"GET / HTTP/1.2", b"GET /",
                         b"GET  / HTTP/1.1", b"G(T / HTTP/1.1", b"GET /\x7f HTTP/1.1", b"OPTIONS * HTTP/1.1"])
ENDS = st.sampled_from([b"\r\n", b"\r\n", b"\r\n", b"\r\n", b"\n", b"\r\r\n"])
BODIES = st.sampled_from([b"", b"hello", b"hellomore", b"5\r\nhello\r\n0\r\n\r\n", b"5\r\nhello\r\n0\r\n\r\nGET /x HTTP/1.1",
                          b"5;a=b\r\nhello\r\n0\r\nA: b\r\n\r\n", b"0x5\r\nhello\r\n0\r\n\r\n", b"5\nhello\r\n0\r\n\r\n",
                          b"1these\r\nx", b"+5\r\nhello\r\n0\r\n\r\n", b" 5\r\nhello\r\n0\r\n\r\n", b"5_0\r\n", b"hel"])


@st.composite
def messages(draw):
    parts = [draw(LINES), draw(ENDS)]
    for field in draw(st.lists(FIELDS, max_size=6)):
        parts += [field, draw(ENDS)]
    return b"".join(parts) + b"\r\n" + draw(BODIES)


def read_body(head, rest):
    """Return (body, rest) when the body is whole, else None; MalformedHttp when it is broken."""
    if head.chunked:
        decoder = ChunkDecoder()
        body = decoder.feed(rest)
        return (body, decoder.rest) if decoder.done else None
    return (rest[:head.length], rest[head.length:]) if len(rest) >= head.length else None


def h11_body(data):
    """Return (method, target, body, rest) as h11 reads it; None when it is not whole."""
    peer = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    peer.receive_data(data)
    event = peer.next_event()
    assert isinstance(event, h11.Request), event
    body = b""
    while True:
        part = peer.next_event()
        if isinstance(part, h11.Data):
            body += bytes(part.data)
        elif isinstance(part, h11.EndOfMessage):
            return event.method, event.target, body, bytes(peer.trailing_data[0])
        else:
            return event.method, event.target, None, None


@given(messages())
@example(b"POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhellomore")
@example(b"POST /a HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\nGET /x HTTP/1.1")
def test_what_we_accept_h11_accepts_with_the_same_framing(data):
    found = accepted(data)
    if found is None:
        return
    head, rest = found
    try:
        body = read_body(head, rest)
    except MalformedHttp:
        return
    method, target, h11_read, h11_rest = h11_body(data)
    assert (head.method, head.target) == (method, target)
    if body is None:
        assert h11_read is None
    else:
        assert (h11_read, h11_rest) == body


@given(st.binary(max_size=400))
def test_no_bytes_make_the_readers_fail_otherwise(data):
    for read in (parse_request, parse_response):
        try:
            read(data)
        except MalformedHttp:
            pass
    try:
        head_end(data)
        ChunkDecoder().feed(data)
    except MalformedHttp:
        pass


@given(st.lists(messages(), min_size=1, max_size=4), st.lists(st.integers(0, 10 ** 6), min_size=1, max_size=3))
def test_a_reader_that_remembers_reads_like_one_that_does_not(heads, lengths):
    reader = RequestReader()
    for data in heads + [POST + b"Content-Length: %d\r\nA: b\r\n\r\n" % length for length in lengths] + heads:
        found = data.find(b"\r\n\r\n")
        head = data[:found + 2]
        try:
            wanted = parse_request(head)
        except MalformedHttp as error:
            with pytest.raises(MalformedHttp) as caught:
                reader.read(head)
            assert caught.value.message == error.message
            continue
        got = reader.read(head)
        for name in ("method", "target", "minor", "length", "chunked", "keep_alive", "expects"):
            assert getattr(got, name) == getattr(wanted, name)


@pytest.mark.parametrize("second", [b"Content-Length: 5\r\nContent-Length: 6\r\n", b"Content-Length: 5x\r\n",
                                    b"Content-Length: \r\n", b"Content-Length: 5\r\nX: \n\r\n",
                                    b"Content-Length: 1111111111111111\r\n"])
def test_a_remembered_head_does_not_let_a_bad_one_through(second):
    reader = RequestReader()
    reader.read(POST + b"Content-Length: 5\r\n")
    with pytest.raises(MalformedHttp):
        reader.read(POST + second)


def test_a_remembered_response_has_its_new_length():
    reader = ResponseReader()
    first = reader.read(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nA: b\r\n")
    assert first.length == 5
    assert reader.read(b"HTTP/1.1 200 OK\r\nContent-Length: 17\r\nA: b\r\n").length == 17
    assert reader.read(b"HTTP/1.1 400 OK\r\nContent-Length: 17\r\nA: b\r\n").status == 400


@pytest.mark.parametrize("fields, chunked, length, keep_alive", [
    (b"Content-Length: 7\r\n", False, 7, True), (b"Transfer-Encoding: chunked\r\n", True, None, True),
    (b"Transfer-Encoding: chunked\r\nContent-Length: 7\r\n", True, None, False), (b"", False, None, False),
    (b"Content-Length: 7\r\nConnection: close\r\n", False, 7, False)])
def test_a_responses_framing(fields, chunked, length, keep_alive):
    head = parse_response(b"HTTP/1.1 200 OK\r\n" + fields)
    assert (head.chunked, head.length, head.keep_alive) == (chunked, length, keep_alive)


@pytest.mark.parametrize("head", [b"HTTP/1.1 204 No\r\nContent-Length: 7\r\n", b"HTTP/1.1 304\r\n", b"HTTP/1.1 100 C\r\n"])
def test_a_response_that_never_has_a_body(head):
    assert parse_response(head).length == 0


@pytest.mark.parametrize("head", [
    b"HTTP/1.1 20 OK\r\n", b"HTTP/1.1 2000 OK\r\n", b"HTTP/1.1  200 OK\r\n", b"HTTP/2 200 OK\r\n", b"ICY 200 OK\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n",
    b"HTTP/1.1 200 OK\r\n folded\r\n", b"HTTP/1.1 200 O\x00K\r\n"])
def test_a_response_that_cannot_be_framed_is_refused(head):
    refused(head, parse_response)


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=8), st.lists(st.integers(1, 30), min_size=1, max_size=40))
def test_chunks_cut_anywhere_give_the_same_payload(payloads, cuts):
    data = b"".join(map(chunk, payloads)) + b"0\r\n\r\nREST"
    decoder, found, at, turn = ChunkDecoder(), b"", 0, 0
    while at < len(data) and not decoder.done:
        size = cuts[turn % len(cuts)]
        found += decoder.feed(data[at:at + size])
        at, turn = at + size, turn + 1
    assert decoder.done and found == b"".join(payloads)
    assert decoder.rest + data[at:] == b"REST"


@pytest.mark.parametrize("data", [b"1these\r\n", b"0x1\r\nx\r\n", b"1_0\r\n", b"+1\r\n", b" 1\r\n", b"1 \r\n", b"\r\n", b"1\nx",
                                  b"1\r\nxy\r\n", b"1\r\nx\n", b"1" * 17 + b"\r\n", b"1;\x00\r\n", b"0\r\nbad trailer\r\n",
                                  b"a" * 5000])
def test_a_broken_chunk_is_refused(data):
    for size in (1, len(data)):
        decoder = ChunkDecoder()
        with pytest.raises(MalformedHttp):
            for at in range(0, len(data), size):
                decoder.feed(data[at:at + size])


def test_endless_trailers_are_refused():
    decoder = ChunkDecoder()
    decoder.feed(b"0\r\n")
    with pytest.raises(MalformedHttp):
        for _ in range(MAX_HEAD_BYTES):
            decoder.feed(b"A: " + b"b" * 100 + b"\r\n")
