"""The life of a shard: every pair of the table, and hypothesis walking through it."""
from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.decide.lifecycle import TRANSITIONS, Event, step
from llmgw.domain.errors import IllegalTransition
from llmgw.domain.replica import ShardState


@pytest.mark.parametrize("state, event", list(itertools.product(ShardState, Event)),
                         ids=lambda value: value.value)
def test_every_pair_moves_or_is_refused(state, event):
    if event in TRANSITIONS[state]:
        assert step(state, event) in ShardState
    else:
        with pytest.raises(IllegalTransition, match=f"{event.value}.*{state.value}"):
            step(state, event)


def test_every_state_is_in_the_table_and_can_be_reached():
    assert set(TRANSITIONS) == set(ShardState)
    reached, todo = set(), [ShardState.WAITING]
    while todo:
        state = todo.pop()
        if state not in reached:
            reached.add(state)
            todo += TRANSITIONS[state].values()
    assert reached == set(ShardState)


@pytest.mark.parametrize("state", [state for state in ShardState if state is not ShardState.STOPPED],
                         ids=lambda value: value.value)
def test_every_living_shard_can_be_stopped(state):
    assert step(state, Event.STOP) is ShardState.STOPPING


@given(st.lists(st.sampled_from(list(Event)), max_size=60))
def test_what_was_stopped_never_comes_back(events):
    state, stopping = ShardState.WAITING, False
    for event in events:
        if event in TRANSITIONS[state]:
            state = step(state, event)
        stopping = stopping or event is Event.STOP
        if stopping:
            assert state in (ShardState.STOPPING, ShardState.STOPPED)


def test_only_a_proven_shard_is_ready():
    into_ready = {event for moves in TRANSITIONS.values() for event, state in moves.items()
                  if state is ShardState.READY}
    assert into_ready == {Event.READY, Event.ANSWERED}
