"""Which engine work a node owes."""
from __future__ import annotations

import pytest

from llmgw.decide.engines import Attempt, Here, Install, Recheck, Remove, other_build, plan, retry_at
from llmgw.domain.engine import EngineWanted

CPU_WANTED = EngineWanted("llama.cpp", "b3", cpu=True)

NEW, OLD, OLDER = ("llama.cpp", "b3"), ("llama.cpp", "b2"), ("llama.cpp", "b1")
WANTED = EngineWanted(*NEW)


def test_what_is_not_here_is_installed():
    assert plan([WANTED], {}, {}, [], 0.0) == [Install(WANTED)]


def test_a_failed_install_waits_for_its_time():
    attempts = {NEW: Attempt(2, 100.0)}
    assert retry_at(attempts[NEW]) == 115.0
    assert plan([WANTED], {}, attempts, [], 114.0) == [] and plan([WANTED], {}, attempts, [], 115.0)


def test_retries_end_at_five_minutes_apart():
    assert [retry_at(Attempt(count, 0.0)) for count in (1, 2, 3, 4, 9)] == [5, 15, 60, 300, 300]


def test_an_installed_engine_is_looked_at_every_ten_minutes():
    assert plan([WANTED], {NEW: Here(0.0, True)}, {}, [], 599.0) == []
    assert plan([WANTED], {NEW: Here(0.0, True)}, {}, [], 600.0) == [Recheck(WANTED)]
    assert plan([WANTED], {NEW: Here(None)}, {}, [], 0.0) == [Recheck(WANTED)]


def test_one_old_version_is_kept_and_older_ones_go_once_the_new_one_runs():
    here = {NEW: Here(0.0, True, 30.0), OLD: Here(0.0, True, 20.0), OLDER: Here(0.0, True, 10.0)}
    assert plan([WANTED], here, {}, [], 1.0) == [Remove(*OLDER)]
    assert plan([WANTED], here, {}, [OLDER], 1.0) == []
    assert plan([WANTED], {**here, NEW: Here(0.0, False)}, {}, [], 1.0) == []


def test_an_engine_that_is_not_wanted_any_more_is_removed_once_nothing_uses_it():
    here = {NEW: Here(0.0, True, 30.0), OLD: Here(0.0, True, 20.0)}
    other = EngineWanted("vllm", "0.30.0")
    assert plan([], here, {}, [NEW], 1.0) == [Remove(*OLD)]
    assert plan([other], here, {("vllm", "0.30.0"): Attempt(1, 1.0)}, [], 1.0) == [Remove(*OLD), Remove(*NEW)]


@pytest.mark.parametrize("item, cuda, has_gpu, other", [
    (WANTED, "", False, False), (WANTED, "12.8", True, False), (WANTED, "", True, True),
    (WANTED, "12.8", False, False), (CPU_WANTED, "12.8", True, True), (CPU_WANTED, "", True, False),
    (EngineWanted(*NEW, cuda="12.8"), "13.4", True, True), (EngineWanted(*NEW, cuda="12.8"), "12.6", True, False),
    (EngineWanted(*NEW, cuda="12.10"), "12.9", True, False)],
    ids=["cpu node", "gpu node", "a gpu came", "a gpu is not seen just now", "cpu wanted now", "cpu as wanted",
         "an older one wanted now", "old enough", "numbers, not texts"])
def test_another_build_of_the_same_version_is_installed_when_it_is_wanted(item, cuda, has_gpu, other):
    found = Here(0.0, True, cuda=cuda)
    assert other_build(item, found, has_gpu) is other
    assert plan([item], {NEW: found}, {}, [], 1.0, has_gpu=has_gpu) == ([Install(item)] if other else [])
    assert plan([item], {NEW: found}, {NEW: Attempt(1, 0.0)}, [], 1.0, has_gpu=has_gpu) == []
