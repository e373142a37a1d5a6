"""The GGUF header reader: real files, hostile files, cut files."""
from __future__ import annotations

import os
import struct
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.domain.errors import ParseError
from llmgw.parse import gguf
from tests.fakes import gguf_file as make


def read(data):
    return gguf.read_header(lambda at, count: data[at:at + count], len(data), "m.gguf")


def refusal(data):
    with pytest.raises(ParseError) as caught:
        read(data)
    assert caught.value.message.startswith("m.gguf: not a usable GGUF file: ") and len(caught.value.message) <= 500
    return caught.value.message


def test_the_header_of_a_real_model_is_read_and_nothing_more(gemma):
    asked = []

    def read_at(at, count):
        asked.append(at + count)
        with open(gemma, "rb") as source:
            source.seek(at)
            return source.read(count)
    size = os.path.getsize(gemma)
    found = gguf.read_header(read_at, size, str(gemma))
    assert (found.version, found.architecture, found.block_count, found.file_type) == (3, "gemma3", 18, 15)
    assert (found.tensor_count, found.context_length, found.has_chat_template) == (236, 32768, False)
    assert found.kv_bytes_per_token == 18 * 1 * (256 + 256) * 2
    assert found.size_bytes == size and max(asked) < size / 10


def test_a_small_model_is_read():
    data = make.small_model()
    found = read(data)
    assert (found.name, found.block_count, found.context_length, found.file_type) == ("tiny", 2, 2048, 0)
    assert found.kv_bytes_per_token == 2 * 2 * (16 + 16) * 2 and found.has_chat_template
    assert found.size_bytes == len(data) and (found.split_number, found.split_count) == (0, 1)


def test_every_cut_of_a_file_is_refused():
    data = make.small_model()
    assert 3000 < len(data) < 8000
    for length in range(len(data)):
        refusal(data[:length])


def test_heads_may_differ_from_layer_to_layer():
    found = read(make.build(make.llama(kv_heads=[2, 0, 4], layers=3)))
    assert found.kv_bytes_per_token == (2 + 0 + 4) * (16 + 16) * 2


def test_explicit_key_and_value_lengths_win():
    found = read(make.build(make.llama(make.u32("llama.attention.key_length", 128),
                                       make.u32("llama.attention.value_length", 64))))
    assert found.kv_bytes_per_token == 2 * 2 * (128 + 64) * 2


def test_latent_attention_keeps_one_compressed_row():
    found = read(make.build(make.llama(make.u32("llama.attention.kv_lora_rank", 512),
                                       make.u32("llama.rope.dimension_count", 64))))
    assert found.kv_bytes_per_token == 2 * 2 * (512 + 64)


def test_what_the_header_does_not_say_is_unknown():
    found = read(make.build([make.string("general.architecture", "bert")]))
    assert (found.kv_bytes_per_token, found.context_length, found.block_count) == (None, None, None)


def test_a_part_of_a_split_model_says_so():
    found = read(make.build(make.llama(make.u32("split.no", 1), make.u32("split.count", 3))))
    assert (found.split_number, found.split_count) == (1, 3)


def test_an_odd_chat_template_is_still_one():
    assert read(make.build(make.llama(make.string("tokenizer.chat_template", "x" * 100_000)))).has_chat_template
    assert not read(make.build(make.llama(make.string("tokenizer.chat_template", "")))).has_chat_template


def test_version_two_is_read_and_others_are_refused():
    assert read(make.build(make.llama(), version=2)).version == 2
    assert "version 1" in refusal(make.build(make.llama(), version=1))
    assert "version 4" in refusal(make.build(make.llama(), version=4))
    assert "big-endian" in refusal(make.build(make.llama(), version=3 << 24))


ARCH = make.string("general.architecture", "x")
HOSTILE = {
    "not GGUF": (b"PK\x03\x04" + b"\0" * 100, "does not start with GGUF"),
    "empty": (b"", "it has 0 bytes"),
    "2^61 tensors": (make.build([ARCH], tensor_count=1 << 61), "tensors, at most"),
    "2^63 keys": (make.build([ARCH], key_count=1 << 63), "keys, at most"),
    "a million tensors that are not there": (make.build([ARCH], tensor_count=1_000_000), "ends early"),
    "a string beyond the file": (make.build([make.text("a") + struct.pack("<IQ", make.STRING, 1 << 20)]), "ends early"),
    "a string of 2^63": (make.build([make.text("a") + struct.pack("<IQ", make.STRING, 1 << 63)]), "bytes in a string"),
    "a key of 2^40": (make.build([struct.pack("<Q", 1 << 40)]), "bytes in a string"),
    "an empty key": (make.build([make.u32("", 1)]), "a key of 0 bytes"),
    "a key twice": (make.build([ARCH, ARCH]), "stands there twice"),
    "an unknown type": (make.build([make.text("a") + struct.pack("<I", 13)]), "unknown type 13"),
    "an array of unknown type": (make.build([make.text("a") + struct.pack("<IIQ", 9, 99, 1)]), "unknown type 99"),
    "an array of 2^62": (make.build([make.text("a") + struct.pack("<IIQ", 9, 4, 1 << 62)]), "ends early"),
    "strings, 2^60 of them": (make.build([make.text("a") + struct.pack("<IIQ", 9, 8, 1 << 60)]), "ends early"),
    "arrays in arrays": (make.build([make.text("a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 60]), "nested"),
    "a tensor of 1 GiB": (make.build([ARCH], [make.tensor("t", [1 << 28])], data=b"\0" * 64), "a tensor ends at byte"),
    "a tensor far off": (make.build([ARCH], [make.tensor("t", [8], offset=1 << 40)], data=b"\0"), "a tensor ends at"),
    "an offset of 2^64-32": (make.build([ARCH], [make.tensor("t", [8], offset=(1 << 64) - 32)]), "a tensor ends at"),
    "dimensions that overflow": (make.build([ARCH], [make.tensor("t", [1 << 32, 1 << 32])]), "values"),
    "five dimensions": (make.build([ARCH], [make.tensor("t", [1] * 5)]), "5 dimensions"),
    "2^32-1 dimensions": (make.build([ARCH], [make.text("t") + struct.pack("<I", (1 << 32) - 1)]), "dimensions"),
    "an odd offset": (make.build([ARCH], [make.tensor("t", [8], offset=7)], data=b"\0" * 64), "not aligned"),
    "a block half full": (make.build([ARCH], [make.tensor("t", [31], kind=2)], data=b"\0" * 64), "fill its blocks"),
    "alignment 0": (make.build([ARCH, make.u32("general.alignment", 0)]), "alignment"),
    "alignment 2^31": (make.build([ARCH, make.u32("general.alignment", 1 << 31)]), "alignment"),
    "alignment 48": (make.build([ARCH, make.u32("general.alignment", 48)]), "alignment"),
    "alignment as text": (make.build([ARCH, make.string("general.alignment", "32")]), "alignment"),
    "no architecture": (make.build([make.u32("a", 1)]), "no architecture"),
    "an architecture of 10 KB": (make.build([make.string("general.architecture", "x" * 10_000)]), "no architecture"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_refused_at_once(name):
    data, words = HOSTILE[name]
    started = time.process_time()
    assert words in refusal(data)
    assert time.process_time() - started < 2


def test_numbers_beyond_belief_are_unknown():
    assert read(make.build(make.llama(layers=1 << 31))).kv_bytes_per_token is None
    assert read(make.build(make.llama(heads=0))).kv_bytes_per_token is None


def test_a_file_that_shrinks_while_it_is_read_is_refused():
    data = make.small_model()
    with pytest.raises(ParseError, match="while it was read"):
        gguf.read_header(lambda at, count: data[:100][at:at + count], len(data))


def test_a_file_full_of_empty_strings_takes_bounded_time():
    count = 200_000
    data = make.build([make.text("a") + struct.pack("<IIQ", 9, 8, count) + b"\0" * 8 * count, ARCH])
    started = time.process_time()
    assert read(data).architecture == "x"
    assert time.process_time() - started < 20


@settings(max_examples=300)
@given(st.binary(max_size=300), st.booleans())
def test_any_bytes_give_a_header_or_our_error(data, start):
    check(b"GGUF\x03\0\0\0" + data if start else data)


@settings(max_examples=400)
@given(st.integers(0, 1 << 30), st.integers(0, 255), st.integers(1, 8))
def test_a_good_file_with_changed_bytes_gives_a_header_or_our_error(at, value, count):
    data = bytearray(make.small_model())
    at %= len(data) - 8
    data[at:at + count] = bytes([value]) * count
    check(bytes(data))


def check(data):
    try:
        found = read(data)
    except ParseError as error:
        assert len(error.message) <= 500
        return
    assert found.architecture and found.size_bytes <= len(data)
