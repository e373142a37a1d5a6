"""The scanner of event streams: it reads a copy, cut anywhere, and never grows without bound."""
from __future__ import annotations

import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.parse.sse import MAX_EVENT_BYTES, SseScanner, usage_of

DELTA = b'data: {"choices":[{"index":0,"delta":{"content":"\xe5\x8c\x97"},"finish_reason":null}]}\n\n'
LAST = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,"total_tokens":10}}\n\n'
DONE = b"data: [DONE]\n\n"
WHOLE = b": ping\n\n" + DELTA * 3 + LAST + USAGE + DONE


def scan(*pieces):
    scanner = SseScanner()
    for piece in pieces:
        scanner.feed(piece)
    scanner.end()
    return scanner


@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"])
@given(cuts=st.lists(st.integers(1, 60), min_size=1, max_size=30))
def test_a_stream_cut_anywhere_with_any_line_end_says_the_same(newline, cuts):
    data, pieces, turn = WHOLE.replace(b"\n", newline), [], 0
    while data:
        size = cuts[turn % len(cuts)]
        pieces.append(data[:size])
        data, turn = data[size:], turn + 1
    scanner = scan(*pieces)
    assert (scanner.done, scanner.failed, scanner.finish_reason, scanner.usage) == (True, False, "stop", (7, 3))
    assert scanner.between_events or newline == b"\r"      # after CR, LF might have followed


@pytest.mark.parametrize("event", [b'data: {"error":{"message":"x"}}\n\n', b'data: {"error": "x"}\n\n', b"error: {}\n\n",
                                   b"event: error\ndata: {}\n\n"])
def test_done_after_an_error_is_no_success(event):
    scanner = scan(event.replace(b"\n\n", b"\n"), b"\n", DONE)
    assert scanner.done and scanner.failed


@pytest.mark.parametrize("data", [b'data: {"error":null}\n\n', b'data: {"choices":[{"delta":{"content":"\\"error\\""}}]}\n\n',
                                  b'data: {"choices":[{"delta":{"error":"x"}}]}\n\n'])
def test_the_word_error_alone_is_none(data):
    assert not scan(data).failed


@pytest.mark.parametrize("data", [b'data: {"usage":null}\n\n', b'data: {"usage":{"prompt_tokens":"7"}}\n\n',
                                  b'data: {"usage":{"prompt_tokens":true}}\n\n', b'data: {"usage":{"prompt_tokens":-1}}\n\n',
                                  b'data: {"usage":{broken}\n\n', b'data: {"choices":{"finish_reason":"x"}}\n\n',
                                  b"data: " + b"[" * 100000 + b'"error"\n\n'])
def test_odd_events_are_passed_over(data):
    scanner = scan(data)
    assert scanner.usage is None and not scanner.failed


def test_a_done_without_a_blank_line_counts():
    assert scan(DELTA, b"data: [DONE]\n").done
    assert scan(DELTA, b"data: [DONE]").done
    assert not scan(DELTA).done


def test_a_stream_without_a_newline_is_given_up_at_the_cap():
    scanner = SseScanner()
    for _ in range(MAX_EVENT_BYTES // 65536 + 2):
        scanner.feed(b"x" * 65536)
    assert scanner.blind and not scanner._pieces
    scanner.feed(DONE)
    assert not scanner.done


def test_the_middle_of_an_event_is_known():
    scanner = SseScanner()
    scanner.feed(DELTA + b'data: {"cho')
    assert not scanner.between_events
    scanner.feed(b'ices":[]}\n\n')
    assert scanner.between_events


@given(st.lists(st.binary(max_size=60), max_size=10))
def test_no_bytes_make_it_fail(pieces):
    scan(*pieces)


def test_usage_of_takes_only_counts():
    assert usage_of({"usage": {"prompt_tokens": 1, "completion_tokens": 2}}) == (1, 2)
    assert usage_of({"usage": {"prompt_tokens": 5}}) == (5, 0)
    assert usage_of([]) is None and usage_of({"usage": 3}) is None


RECORDED = pathlib.Path(__file__).parent.parent / "data" / "streams"


@pytest.mark.parametrize("name, finish", [("llamacpp-b10991-chat.sse", "length"), ("vllm-0.30.0-chat.sse", None)])
def test_a_recorded_stream_is_understood(name, finish):
    data = (RECORDED / name).read_bytes()
    scanner = scan(*(data[at:at + 100] for at in range(0, len(data), 100)))
    assert scanner.done and not scanner.failed and scanner.events > 3
    assert scanner.finish_reason in ("length", "stop") if finish is None else scanner.finish_reason == finish
