"""The strict reader of request heads, against h11: what we take, it takes with the same framing."""
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.domain.errors import ParseError
from llmgw.system import http_head

h11 = pytest.importorskip("h11")

NAMES = st.sampled_from(["Host", "Content-Length", "Transfer-Encoding", "Connection", "X-A", "Expect", "Content-Length ",
                         " X", "Range", "host"])
VALUES = st.sampled_from(["a", "127.0.0.1:1", "5", "0", "+5", "5_0", " 5 ", "chunked", "close", "keep-alive", "", "a, b",
                          "\x00", "é", "1, 1", "a/b", "00005", "5\t"])
ENDS = st.sampled_from(["\r\n", "\r\n", "\r\n", "\n", "\r", "\r\n "])


@st.composite
def heads(draw):
    line = draw(st.sampled_from(["GET / HTTP/1.1", "POST /x HTTP/1.1", "GET / HTTP/1.0", "get / HTTP/1.1", "GET  / HTTP/1.1",
                                 "GET /%zz HTTP/1.1", "GET x HTTP/1.1", "GET / HTTP/1.2", "GET /a b HTTP/1.1"]))
    pairs = draw(st.lists(st.tuples(NAMES, VALUES, ENDS), max_size=5))
    start = "Host: a\r\n" if draw(st.booleans()) else ""
    return (line + draw(ENDS) + start + "".join(f"{name}: {value}{end}" for name, value, end in pairs)).encode("latin-1") \
        + b"\r\n"


@given(heads() | st.binary(max_size=200))
def test_what_is_taken_h11_takes_with_the_same_framing(data):
    raw, rest = None, b""
    try:
        raw, rest = http_head.split(data)
        head = http_head.parse(raw) if raw is not None else None
    except ParseError as error:
        assert 0 < len(error.message) < 500
        return
    if head is None:
        return
    peer = h11.Connection(h11.SERVER)
    peer.receive_data(data[:len(data) - len(rest)])
    event = peer.next_event()
    assert isinstance(event, h11.Request)
    assert event.method.decode() == head.method and event.target.decode("latin-1") == head.target
    lengths = [value for name, value in event.headers if name == b"content-length"]
    assert (int(lengths[0]) if lengths else 0) == head.content_length
    assert all(name != b"transfer-encoding" for name, _ in event.headers)


@pytest.mark.parametrize("text, size, part", [
    ("bytes=0-0", 10, (0, 1)), ("bytes=5-", 10, (5, 5)), ("bytes=-3", 10, (7, 3)), ("bytes=-30", 10, (0, 10)),
    ("bytes=0-99", 10, (0, 10)), ("bytes=5-4", 10, None), ("bytes=0-1,3-4", 10, None), ("lines=1-2", 10, None),
    ("bytes=-", 10, None), ("bytes=a-b", 10, None), ("bytes=+1-2", 10, None)])
def test_a_single_range_is_honoured(text, size, part):
    assert http_head.byte_range(text, size) == part


@pytest.mark.parametrize("text, size", [("bytes=10-", 10), ("bytes=0-", 0), ("bytes=-0", 10), ("bytes=99-100", 10)])
def test_a_range_outside_is_refused(text, size):
    with pytest.raises(ParseError):
        http_head.byte_range(text, size)
