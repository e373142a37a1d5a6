"""Slow is not dead, silent is not dead, and dead is found."""
from __future__ import annotations

import dataclasses

import pytest

from llmgw.decide import progress
from llmgw.decide.progress import Health, Pulse, Sign, Start


@pytest.mark.parametrize("field", ["log_bytes", "memory_bytes", "read_bytes", "page_faults"])
def test_any_growth_is_progress_of_a_start(field):
    start = Start(Sign(), 0.0)
    moved = progress.seen(start, dataclasses.replace(Sign(), **{field: 1}), 170.0)
    assert not progress.start_has_stalled(moved, 300.0) and progress.start_has_stalled(start, 180.0)
    assert progress.start_has_stalled(moved, 350.0)


def health(pulses, start=None):
    current = start or Health()
    for pulse in pulses:
        current = progress.after_pulse(current, pulse)
    return current


def pulses(running, works, cpu=1.0, step=10.0):
    return [Pulse(number * step, running, work, number * cpu) for number, work in enumerate(works)]


def hung(current, now, answered=False, cpu=0.0):
    return progress.is_hung(current, now, probe_answered=answered, cpu_share=cpu)


def test_running_requests_without_work_for_a_minute_and_no_answer_is_hung():
    current = health(pulses(2, [5] * 8))
    assert current.flat_since == 10.0 and not hung(current, 69.0) and hung(current, 70.0)


def test_an_answered_probe_clears_it():
    assert not hung(health(pulses(2, [5] * 8)), 100.0, answered=True)


def test_a_busy_engine_is_never_hung_however_slow():
    assert not hung(health(pulses(4, [5, 6, 7, 8, 9, 10, 11, 12])), 1e6)


def test_an_idle_engine_is_never_hung():
    assert not hung(health(pulses(0, [5] * 100)), 1e6)


def test_a_silent_engine_that_computes_is_busy_for_ten_minutes():
    current = health([Pulse(0.0, 1, 5, 0.0)] + [Pulse(10.0 * n, None, None, n) for n in range(1, 70)])
    assert current.silent and current.flat_since == 10.0
    assert not hung(current, 500.0, cpu=0.9) and hung(current, 620.0, cpu=0.9)


def test_a_silent_engine_that_does_nothing_is_hung_after_a_minute():
    current = health([Pulse(0.0, 0, 5, 0.0)] + [Pulse(10.0 * n, None, None, 0.0) for n in range(1, 9)])
    assert hung(current, 75.0, cpu=0.0)


def test_one_answer_after_silence_with_new_work_is_well_again():
    current = health([Pulse(0.0, 1, 5, 0.0), Pulse(10.0, None, None, 1.0), Pulse(20.0, 1, 9, 2.0)])
    assert current.flat_since is None and not current.silent


def test_a_token_is_asked_for_before_anything_is_called_hung():
    current = health(pulses(2, [5] * 8))
    assert not progress.needs_probe(current, 39.0) and progress.needs_probe(current, 40.0)
    assert not progress.needs_probe(Health(), 1e6)


def test_a_hung_engine_has_a_second_minute():
    assert not progress.must_restart(100.0, 159.0) and progress.must_restart(100.0, 160.0)
