"""The metrics reader: strict names, unknown is None, ranks of one engine count once."""
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.parse import prometheus
from llmgw.parse.prometheus import peak, read, total


def test_a_name_that_is_not_on_the_page_is_unknown_and_not_zero():
    samples = read(b"other 1\n", ["llamacpp:requests_processing"])
    assert total(samples, "llamacpp:requests_processing") is None
    assert peak(samples, "llamacpp:requests_processing") is None


@pytest.mark.parametrize("page", [b"", b"# EOF\n", b"<html><body>502</body></html>", b"x", b"x ", b"x NaN",
                                  b"x +Inf", b"x -Inf", b"x nan", b"x 0x10", b"x 1_0", b"x 1e999", b"x 1 2 3",
                                  b"x{a=\"b\" 1", b"xy 1", b" x 1", b"x{a=\"b\"}1", b"x -1"])
def test_what_is_not_a_finite_sample_of_that_name_is_passed_over(page):
    assert total(read(page, ["x"]), "x") is None


@pytest.mark.parametrize("line, value", [
    (b"x 1", 1.0), (b"x 1.5e1", 15.0), (b"x 1 1700000000000", 1.0), (b"x 1\r", 1.0),
    (b'x{a="b c"} 2', 2.0), (b'x{a="}"} 2', 2.0), (b'x{a="q\\"uote",b="\\\\"} 2', 2.0), (b"x{} 3", 3.0),
    (b'x{a="b",} 4', 4.0), (b"x .5", 0.5), (b'x 6 # {trace_id="1"} 1', 6.0)])
def test_the_forms_that_exporters_write_are_read(line, value):
    assert total(read(b"# TYPE x gauge\n" + line + b"\nlast 9\n", ["x"]), "x") == value


def test_labels_are_unescaped():
    (sample,) = read(b'x{a="q\\"u\\\\o\\nte", b = "}"} 1', ["x"])["x"]
    assert dict(sample.labels) == {"a": 'q"u\\o\nte', "b": "}"}


def test_ranks_of_one_engine_count_once_and_engines_add_up():
    page = b"".join(b'sglang:num_running_reqs{dp_rank="%d",tp_rank="%d"} %d\n' % (dp, tp, 3 + dp)
                    for dp in range(2) for tp in range(4))
    assert total(read(page, ["sglang:num_running_reqs"]), "sglang:num_running_reqs") == 7.0


def test_the_fullest_engine_decides_the_kv_share():
    page = b'kv{engine="0"} 0.1\nkv{engine="1"} 0.99\n'
    assert peak(read(page, ["kv"]), "kv") == 0.99


def test_the_first_name_present_wins_over_the_legacy_one():
    samples = read(b"old 0.9\nnew 0.2\n", ["new", "old"])
    assert peak(samples, "new", "old") == 0.2
    assert peak(read(b"old 0.9\n", ["new", "old"]), "new", "old") == 0.9


def test_a_page_over_the_cap_and_too_many_series_are_unknown():
    assert read(b"x 1\n" + b"#" * prometheus.MAX_PAGE_BYTES, ["x"]) == {}
    assert read(b"".join(b'x{a="%d"} 1\n' % i for i in range(prometheus.MAX_SAMPLES + 1)), ["x"]) == {}
    assert read(b'x{a="' + b"y" * prometheus.MAX_LINE_BYTES + b'"} 1\n', ["x"]) == {}


@given(st.binary(max_size=300))
def test_no_bytes_make_it_fail(page):
    read(page, ["x"])
    read(b"x" + page, ["x"])


def test_a_page_that_llama_server_wrote():
    page = (b"# HELP llamacpp:requests_processing Number of requests processing.\n"
            b"# TYPE llamacpp:requests_processing gauge\nllamacpp:requests_processing 2\n"
            b"llamacpp:requests_deferred 1\n")
    samples = read(page, ["llamacpp:requests_processing", "llamacpp:requests_deferred"])
    assert (total(samples, "llamacpp:requests_processing"), total(samples, "llamacpp:requests_deferred")) == (2, 1)
