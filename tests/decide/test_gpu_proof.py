"""Which GPUs a program holds, told from what drivers say in all their shapes."""
from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.decide.gpu_proof import LEAST_BYTES, Holder, Sample, judge, unreleased
from llmgw.domain.replica import GpuSlot

A, B = "GPU-aaaaaaaa", "GPU-bbbbbbbb"
BOTH = (GpuSlot(A, 0), GpuSlot(B, 3))
GIB = 1 << 30


def sample(a, b, *holders):
    return Sample({A: a, B: b}, tuple(Holder(*holder) for holder in holders))


@pytest.mark.parametrize("what, before, now, words", [
    ("all is as before", sample(GIB, GIB, (1, A, GIB)), sample(GIB, GIB, (1, A, GIB)), ""),
    ("an ended program is listed", sample(0, 0), sample(GIB, 0, (99, A, GIB)), "GPU 0 still shows memory of programs that ended"),
    ("it is listed, and before is not known", None, sample(GIB, GIB, (99, A, GIB), (98, B, None)), "GPUs 0, 3 still show memory of programs that ended"),
    ("nobody is listed, the memory is not back", sample(0, 0), sample(0, GIB), "GPU 3 still shows memory of programs that ended"),
    ("a stranger runs there by now", sample(0, 0), sample(GIB, 0, (7, A, GIB)), ""),
    ("a little more than before", sample(0, 0), sample(LEAST_BYTES - 1, 0), ""),
    ("unified memory, nothing is told", sample(None, None), sample(None, None), "")])
def test_memory_that_is_not_free_again_after_the_end_is_told(what, before, now, words):
    assert unreleased(BOTH, before, now, frozenset((7, 8))) == words, what


@pytest.mark.parametrize("what, before, now, idle, unknown", [
    ("both held by our pids", sample(0, 0), sample(GIB, GIB, (7, A, GIB), (8, B, GIB)), (), ()),
    ("one of ours on one only", sample(0, 0), sample(GIB, GIB, (7, A, GIB), (99, B, GIB)), (3,), ()),
    ("none of ours, though memory grew on one", sample(0, 0), sample(GIB, 0, (99, A, GIB)), (3,), ()),
    ("our pid with [N/A] bytes holds", sample(None, None), sample(None, None, (7, A, None), (7, B, None)), (), ()),
    ("our pid with no bytes holds nothing", sample(0, 0), sample(0, 0, (7, A, 0), (8, B, GIB)), (0,), ()),
    ("pids are hidden, memory grew", sample(GIB, GIB), sample(2 * GIB, 3 * GIB), (), ()),
    ("pids are hidden, memory did not grow", sample(GIB, GIB), sample(GIB, GIB + LEAST_BYTES - 1), (0, 3), ()),
    ("pids of another namespace, memory grew on one", sample(0, 0), sample(GIB, 0, (4_000_001, A, GIB)), (3,), ()),
    ("unified memory (GB10), our pid shown on one", sample(None, None), sample(None, None, (7, A, GIB)), (3,), ()),
    ("unified memory, hidden pids, one more program there", sample(None, None, (1, A, GIB)),
     sample(None, None, (1, A, GIB), (4_000_001, A, GIB), (4_000_001, B, GIB)), (), (0, 3)),
    ("unified memory, hidden pids, nobody new", sample(None, None, (1, A, GIB)), sample(None, None, (1, A, GIB)), (0, 3), ()),
    ("unified memory, nothing is told", sample(None, None), sample(None, None), (), (0, 3)),
    ("adopted, so nothing is known of before", None, sample(GIB, GIB), (), (0, 3)),
    ("a card that is gone from the list", Sample({A: 0}), Sample({A: GIB}), (), (3,))])
def test_every_shape(what, before, now, idle, unknown):
    verdict = judge(BOTH, before, now, frozenset((7, 8)))
    assert (verdict.idle, verdict.unknown) == (idle, unknown), what


def test_the_sentence_names_the_gpu_and_the_likely_cause():
    assert judge(BOTH, sample(0, 0), sample(GIB, 0), frozenset()).sentence == "GPU 3 holds nothing of it: it probably runs on the CPU"
    assert judge(BOTH, sample(0, 0), sample(0, 0), frozenset()).sentence.startswith("GPUs 0, 3 hold nothing")
    assert judge(BOTH, sample(0, 0), sample(GIB, GIB), frozenset()).sentence == ""


SAMPLES = st.builds(lambda a, b, holders: Sample({A: a, B: b}, tuple(holders)),
                    *[st.none() | st.integers(0, 4 * GIB)] * 2,
                    st.lists(st.builds(Holder, st.integers(1, 5), st.sampled_from([A, B]), st.none() | st.integers(0, GIB)), max_size=4))


@given(st.none() | SAMPLES, SAMPLES, st.frozensets(st.integers(1, 5)))
@settings(deadline=None)
def test_a_card_is_never_both_idle_and_unknown_and_no_card_is_made_up(before, now, ours):
    verdict = judge(BOTH, before, now, ours)
    assert not set(verdict.idle) & set(verdict.unknown)
    assert set(verdict.idle) | set(verdict.unknown) <= {0, 3}
