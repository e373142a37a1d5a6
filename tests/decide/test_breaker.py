"""A replica is left out for a moment when requests to it fail, and few bad requests cannot do that."""
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.decide.breaker import TRANSITIONS, Breaker, Event, State


def failing(count=5, now=100.0, **more):
    breaker = Breaker()
    for _ in range(count):
        breaker.failed(now, **more)
    return breaker


def test_five_failures_in_ten_seconds_open_it():
    assert failing(4).state is State.CLOSED
    assert failing(5).state is State.OPEN


def test_failures_that_are_far_apart_do_not():
    breaker = Breaker()
    for turn in range(20):
        breaker.failed(100.0 + 3 * turn)
    assert breaker.state is State.CLOSED


def test_it_stays_closed_while_most_requests_succeed():
    breaker = Breaker()
    for turn in range(40):
        breaker.succeeded(100.0)
        if turn % 2:
            breaker.failed(100.0)
    assert breaker.state is State.CLOSED


def test_one_bad_request_repeated_counts_once():
    assert failing(50, request=7).state is State.CLOSED
    breaker = Breaker()
    for request in range(5):
        breaker.failed(100.0, request=request)
    assert breaker.state is State.OPEN


def test_an_open_one_lets_one_probe_through_after_five_seconds():
    breaker = failing()
    assert not breaker.allows(104.9)
    assert breaker.allows(105.0)
    breaker.started()
    assert not breaker.allows(105.1)
    breaker.succeeded(106.0)
    assert breaker.state is State.CLOSED and breaker.allows(106.0)


def test_a_neutral_end_of_the_probe_lets_the_next_one_through():
    breaker = failing()
    assert breaker.allows(105.0)
    breaker.started()
    breaker.neutral()
    assert breaker.state is State.HALF_OPEN and breaker.allows(105.0)


def test_each_failed_probe_doubles_the_time_up_to_a_minute():
    breaker, now = failing(), 100.0
    for seconds in (5, 10, 20, 40, 60, 60):
        assert not breaker.allows(now + seconds - 0.1)
        now += seconds
        assert breaker.allows(now)
        breaker.started()
        breaker.failed(now)


def test_after_a_success_it_forgets_the_past():
    breaker = failing()
    assert breaker.allows(105.0)
    breaker.started()
    breaker.succeeded(105.0)
    for _ in range(4):
        breaker.failed(105.0)
    assert breaker.state is State.CLOSED
    assert Breaker().state is State.CLOSED


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", Event)
def test_every_pair_of_state_and_event_is_decided(state, event):
    assert TRANSITIONS[state].get(event) in (None, *State)


@given(st.lists(st.tuples(st.sampled_from(["allows", "failed", "succeeded", "neutral"]), st.floats(0, 30)), max_size=60))
def test_no_order_of_events_breaks_it_and_it_always_recovers(steps):
    breaker, now, probing = Breaker(), 0.0, 0
    for what, passed in steps:
        now += passed
        if what == "allows":
            if breaker.allows(now):
                breaker.started()
                probing += 1
        elif what == "neutral":
            breaker.neutral()
        else:
            getattr(breaker, what)(now)
    for _ in range(probing):
        breaker.neutral()
    assert breaker.allows(now + 61.0)
