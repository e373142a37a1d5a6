"""The safetensors header reader: good files, hostile files, cut files."""
from __future__ import annotations

import json
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.domain.errors import ParseError
from llmgw.parse import safetensors
from tests.fakes import safetensors_file as make


def read(data):
    return safetensors.read_header(lambda at, count: data[at:at + count], len(data), "m.safetensors")


def refusal(data):
    with pytest.raises(ParseError) as caught:
        read(data)
    assert caught.value.message.startswith("m.safetensors: not a usable safetensors file: ")
    assert len(caught.value.message) <= 500
    return caught.value.message


def sample():
    """Return a file of about 4 KB with several tensors."""
    tensors = {f"layers.{index}.weight": ("BF16", [8, 8], index * 128, index * 128 + 128) for index in range(20)}
    return make.build({**tensors, "scalar": ("F32", [], 2560, 2564), "none": ("I64", [0, 4], 2564, 2564)},
                      data=b"\x01" * 2564, notes={"format": "pt"})


def test_a_good_file_tells_its_tensors_and_types():
    found = read(sample())
    assert (found.tensor_count, found.parameters, found.dtypes) == (22, 20 * 64 + 1, ("BF16", "F32", "I64"))
    assert read(make.build({})).tensor_count == 0 and read(make.model()).parameters == 4096


def test_a_type_newer_than_the_reader_is_let_through_and_half_bytes_are_counted():
    assert read(make.build({"a": ("F99", [3], 0, 5)}, data=b"x" * 5)).dtypes == ("F99",)
    assert read(make.build({"a": ("F4", [4], 0, 2)}, data=b"xx")).parameters == 4


def test_every_cut_of_a_file_is_refused():
    data = sample()
    assert 3000 < len(data) < 8000
    for length in range(len(data)):
        refusal(data[:length])
    refusal(data + b"x")


ONE = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
HOSTILE = {
    "empty": (b"", "it has 0 bytes"),
    "a length of 2^64-1": (b"\xff" * 8 + b"{}" * 10, "claims 18446744073709551615"),
    "a page": (b"<!DOCTYPE html><html></html>", "claims"),
    "a pickle": (struct.pack("<Q", 4) + b"\x80\x02}.", "starts with"),
    "a list": (make.build({}, header=b"[1,2,3]"), "starts with"),
    "no JSON": (make.build({}, header=b"{'a': 1}"), "not JSON"),
    "not UTF-8": (make.build({}, header=b'{"\xff": 1}'), "not JSON"),
    "deep": (make.build({}, header=b'{"a":' + b"[" * 200_000), "not JSON"),
    "NaN": (make.build({}, header=b'{"a": NaN}'), "holds NaN"),
    "twice": (make.build({}, header=b'{"a": {}, "a": {}}'), "twice"),
    "notes of numbers": (make.build({}, header=b'{"__metadata__": {"a": 1}}'), "notes"),
    "no object": (make.build({}, header=b'{"a": 3}'), "no object"),
    "no type": (make.build({}, header=json.dumps({"a": {**ONE, "dtype": 3}}).encode(), data=b"x"), "no type"),
    "a negative shape": (make.build({}, header=json.dumps({"a": {**ONE, "shape": [-1]}}).encode(), data=b"x"), "no shape"),
    "a shape of truth": (make.build({}, header=json.dumps({"a": {**ONE, "shape": [True]}}).encode(), data=b"x"), "no shape"),
    "a place of one": (make.build({}, header=json.dumps({"a": {**ONE, "data_offsets": [0]}}).encode(), data=b"x"), "no place"),
    "half a byte": (make.build({}, header=json.dumps({"a": {**ONE, "data_offsets": [0.5, 1]}}).encode(), data=b"x"), "no place"),
    "backwards": (make.build({"a": ("U8", [1], 1, 0)}, data=b"x"), "does not fill"),
    "too small": (make.build({"a": ("F32", [2], 0, 4)}, data=b"xxxx"), "does not fill"),
    "huge": (make.build({"a": ("U8", [1 << 59, 1 << 59], 0, 1)}, data=b"x"), "too large"),
    "a gap": (make.build({"a": ("U8", [1], 1, 2)}, data=b"xx"), "leave out"),
    "an overlap": (make.build({"a": ("U8", [2], 0, 2), "b": ("U8", [2], 1, 3)}, data=b"xxx"), "leave out"),
    "bytes beyond": (make.build({"a": ("U8", [1], 0, 1)}, data=b"xx"), "end at byte 1 of 2"),
    "bytes missing": (make.build({"a": ("U8", [1 << 40], 0, 1 << 40)}, data=b"xx"), "end at byte"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_refused(name):
    data, words = HOSTILE[name]
    assert words in refusal(data)


def test_a_header_larger_than_is_believed_is_not_even_read():
    asked = []

    def read_at(at, count):
        asked.append(count)
        return struct.pack("<Q", 1 << 30)[:count]
    with pytest.raises(ParseError, match="at most"):
        safetensors.read_header(read_at, 1 << 40)
    assert sum(asked) == 8


def test_a_file_that_shrinks_while_it_is_read_is_refused():
    data = sample()
    with pytest.raises(ParseError, match="while it was read"):
        safetensors.read_header(lambda at, count: data[:100][at:at + count], len(data))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300), st.booleans())
def test_any_bytes_give_a_header_or_our_error(data, framed):
    check(make.build({}, header=b"{" + data) if framed else data)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(0, 255), st.integers(1, 8))
def test_a_good_file_with_changed_bytes_gives_a_header_or_our_error(at, value, count):
    data = bytearray(sample())
    at %= len(data) - 8
    data[at:at + count] = bytes([value]) * count
    check(bytes(data))


def check(data):
    try:
        found = read(data)
    except ParseError as error:
        assert len(error.message) <= 500
        return
    assert found.tensor_count >= 0
