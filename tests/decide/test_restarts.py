"""Pauses between starts, and what makes a crash loop."""
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.decide import restarts
from llmgw.decide.restarts import Failure, after_failure, is_well, signature


def fail(times, signatures=None, was_ready=False, jitter=1.0):
    failures, verdicts = (), []
    for number, at in enumerate(times):
        mark = signatures[number] if signatures else f"cause {number}"
        verdict = after_failure(failures, Failure(at, mark, was_ready), jitter)
        failures = verdict.failures
        verdicts.append(verdict)
    return verdicts


def test_the_pauses_double_up_to_the_fifth_failure_in_ten_minutes():
    verdicts = fail([0, 10, 20, 30, 40])
    assert [verdict.not_before - at for verdict, at in zip(verdicts, [0, 10, 20, 30])] == [1, 2, 4, 8]
    assert [verdict.crashloop for verdict in verdicts] == [False, False, False, False, True]
    assert verdicts[-1].not_before == 40 + 300


def test_failures_far_apart_are_no_crash_loop():
    assert not any(verdict.crashloop for verdict in fail([0, 700, 1400, 2100, 2800, 3500]))


def test_three_with_one_cause_before_ready_are_a_crash_loop():
    assert fail([0, 2, 5], ["a", "a", "a"])[-1].crashloop
    assert not fail([0, 2, 5], ["a", "b", "a"])[-1].crashloop
    assert not fail([0, 2, 5], ["a", "a", "a"], was_ready=True)[-1].crashloop


def test_a_failure_whose_reason_did_not_get_out_counts_with_the_others_of_its_code():
    known, cut = signature("E failed to load", "code 1"), signature("loading", "code 1")
    assert fail([0, 2, 5], [known, cut, known])[-1].crashloop
    assert not fail([0, 2, 5], [known, signature("", "signal 9"), known])[-1].crashloop


def test_running_out_of_memory_twice_is_a_crash_loop():
    assert [item.crashloop for item in fail([0, 90], [restarts.OUT_OF_MEMORY] * 2, was_ready=True)] == [False, True]
    assert not any(item.crashloop for item in fail([0, 9, 20], [restarts.OUT_OF_MEMORY, "x", restarts.OUT_OF_MEMORY]))


def test_a_crash_loop_is_tried_every_five_minutes():
    verdicts = fail([0, 2, 5, 310, 615], ["a"] * 5)
    assert [verdict.crashloop for verdict in verdicts[2:]] == [True, True, True]


@given(st.floats(0, 1), st.integers(0, 3))
def test_jitter_never_takes_more_than_half_of_a_pause(jitter, before):
    verdict = fail([float(number) for number in range(before + 1)], jitter=jitter)[-1]
    delay = verdict.not_before - before
    assert 0.5 * 2 ** before <= delay <= 2 ** before


def test_the_pause_is_at_most_a_minute():
    assert restarts.LONGEST_DELAY == 60.0 and restarts.CRASHLOOP_DELAY == 300.0


def test_ten_ready_minutes_make_a_shard_well():
    assert not is_well(0.0, 599.0) and is_well(0.0, 600.0)


def test_the_last_words_are_the_last_error_and_not_the_tidying_up():
    assert restarts.last_words("E failed to load a.gguf\nI cleaning up\n\n") == "E failed to load a.gguf"
    assert restarts.last_words("one\ntwo") == "two" and restarts.last_words("") == ""


@pytest.mark.parametrize("one, other, same", [
    ("loading\nerror: port 7901 in use\nbye 1", "error: port 7944 in use\nbye 2", True),
    ("1 E error loading model\n2 I cleaning up", "7 E error loading model\n8 I cleaning up\n9 E exiting: error", True),
    ("error: no such model", "error: out of memory", False),
    ("", "", True),
    ("loading 7 of 9", "loading 8 of 9", True),
])
def test_failures_with_one_cause_have_one_signature(one, other, same):
    assert (signature(one, "code 1") == signature(other, "code 1")) is same
    assert signature(one, "code 1") != signature(one, "signal 9")
