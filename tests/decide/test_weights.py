"""Which weights a node fetches and gives up."""
from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmgw.decide.weights import Held, plan, reserve
from llmgw.domain.model import Weights, WeightsFile


def weights(name, size=100):
    return Weights(name, f"f-{name}", (WeightsFile("a.gguf", size, "a" * 64),))


def held(name, size=100, used_at=0.0):
    return Held(name, f"f-{name}", size, used_at)


def test_what_is_not_here_is_fetched_once():
    result = plan([weights("a"), weights("b"), weights("a")], [held("b")], free_bytes=10 ** 6, reserve_bytes=0)
    assert [item.name for item in result.fetch] == ["a"] and result.remove == ()


def test_weights_nobody_wants_stay_while_there_is_room():
    assert plan([weights("a")], [held("old")], free_bytes=1000, reserve_bytes=100).remove == ()


def test_the_longest_unused_go_first_and_only_as_many_as_needed():
    result = plan([weights("a", 150)], [held("x", 100, 2.0), held("y", 100, 1.0), held("z", 100, 3.0)],
                  free_bytes=100, reserve_bytes=50)
    assert [item.name for item in result.remove] == ["y"]


def test_what_nobody_wanted_for_a_day_goes_though_there_is_room():
    day = 24 * 3600.0
    result = plan([], [held("old", used_at=1.0), held("new", used_at=day), held("runs", used_at=0.0)],
                  free_bytes=10 ** 6, reserve_bytes=0, now=day + 2, in_use=frozenset({"f-runs"}))
    assert [item.name for item in result.remove] == ["old"]
    assert plan([weights("a")], [held("old", used_at=1.0)], free_bytes=10 ** 6, reserve_bytes=0, now=day).remove == ()


def test_what_still_runs_stays_however_short_the_room():
    result = plan([weights("a", 500)], [held("runs", 400), held("idle", 100)], free_bytes=0, reserve_bytes=0,
                  in_use=frozenset({"f-runs"}))
    assert [item.name for item in result.remove] == ["idle"]


@given(st.lists(st.sampled_from("abcde"), unique=True), st.lists(st.sampled_from("abcde"), unique=True),
       st.integers(0, 500))
def test_what_is_wanted_is_never_removed(wanted, here, free):
    result = plan([weights(name) for name in wanted], [held(name) for name in here],
                  free_bytes=free, reserve_bytes=50)
    assert not {item.name for item in result.remove} & set(wanted)
    assert {item.name for item in result.fetch} == set(wanted) - set(here)


def test_a_small_filesystem_keeps_a_share_and_a_large_one_a_sum_free():
    assert reserve(10 ** 9) == 5 * 10 ** 7 and reserve(10 ** 13) == 5 * 10 ** 9
