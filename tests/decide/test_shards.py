"""What a node does next for its shards."""
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.decide.shards import Seen, Step, changes, next_step
from llmgw.domain.replica import ShardState as S


def test_what_is_wanted_is_taken_up_and_the_rest_ended():
    plan = changes(["a", "b", "b"], ["b", "c"])
    assert plan.take_up == ("a",) and plan.end == ("c",)


@given(st.lists(st.sampled_from("abcdef")), st.lists(st.sampled_from("abcdef")))
def test_after_the_changes_exactly_the_wanted_are_known(wanted, known):
    plan = changes(wanted, known)
    after = (set(known) - set(plan.end)) | set(plan.take_up)
    assert after == set(wanted) and changes(wanted, sorted(after)) == changes([], [])


@pytest.mark.parametrize("seen, step", [
    (Seen(S.WAITING, engine_usable=False), Step.WAIT_FOR_ENGINE),
    (Seen(S.WAITING, weights_whole=False), Step.WAIT_FOR_WEIGHTS),
    (Seen(S.WAITING), Step.START),
    (Seen(S.FETCHING, engine_usable=False), Step.WAIT_FOR_ENGINE),
    (Seen(S.FETCHING), Step.START),
    (Seen(S.STARTING, runs=True), Step.PROVE),
    (Seen(S.STARTING, runs=True, start_stalled=True), Step.END_STALLED),
    (Seen(S.STARTING, runs=False), Step.RECORD_END),
    (Seen(S.READY, runs=True), Step.WATCH),
    (Seen(S.READY, runs=True, engine_usable=False, weights_whole=False), Step.WATCH),
    (Seen(S.READY, runs=False), Step.RECORD_END),
    (Seen(S.UNREADY, runs=True), Step.WATCH),
    (Seen(S.UNREADY, runs=True, hung_too_long=True), Step.END_HUNG),
    (Seen(S.BACKOFF, not_before=11.0), Step.PAUSE),
    (Seen(S.BACKOFF, not_before=10.0), Step.START),
    (Seen(S.CRASHLOOP, not_before=11.0), Step.PAUSE),
    (Seen(S.CRASHLOOP, not_before=9.0), Step.START),
    (Seen(S.BACKOFF, engine_usable=False), Step.WAIT_FOR_ENGINE),
    (Seen(S.STOPPING, runs=True), Step.STOP),
    (Seen(S.STOPPED), Step.NOTHING),
])
def test_the_next_step(seen, step):
    assert next_step(seen, 10.0) is step


@pytest.mark.parametrize("state", [state for state in S if state is not S.STOPPED])
@pytest.mark.parametrize("runs", [True, False])
def test_what_nobody_wants_is_stopped_in_every_state(state, runs):
    assert next_step(Seen(state, wanted=False, runs=runs), 10.0) is Step.STOP
