"""Which engine work a node owes."""
from __future__ import annotations

from llmgw.decide.engines import Attempt, Here, Install, Recheck, Remove, plan, retry_at
from llmgw.domain.engine import EngineWanted

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
    assert plan([], here, {}, [], 1.0) == []
