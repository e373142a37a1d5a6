"""The server is killed again and again: it is needed to change what runs, never to run it."""
from __future__ import annotations

import pytest

from tests.whole.asking import Load
from tests.whole.cluster import MODEL

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("hang", "calm")]


def test_kill_9_of_the_server_at_any_moment_costs_no_request_and_no_engine(fire):
    engines, gates = fire.engines(MODEL), fire.gates()
    streams = [fire.hold(row["id"], stream=True, seconds=15) for row in fire.rows()]
    with Load(fire) as load:
        load.more(2)
        fire.kill9("server")
        load.more(4)
        fire.begin_server()                   # killed before it listens
        fire.kill9("server")
        fire.start_server()                   # before it has heard anybody
        fire.kill9("server")
        fire.start_server()                   # when it has heard everybody
        fire.right_within_two_heartbeats()
        fire.kill9("server")
        load.more(4)
        fire.begin_server()
        fire.right_within_two_heartbeats()
        load.more(4)
    assert load.failed == [] and load.broken == []
    assert [asked.wait().outcome for asked in streams] == ["whole", "whole"]
    assert (fire.engines(MODEL), fire.gates()) == (engines, gates)


def test_the_server_may_die_in_the_middle_of_a_request_to_it(fire):
    """A long poll, a reader of events and a command end with a sentence, and the next one works."""
    fire.kill9("server")
    failed = fire.ctl("nodes", ok=False)
    assert failed.returncode != 0 and failed.stderr.startswith("llmgw: ") and "Traceback" not in failed.stderr
    fire.begin_server()
    fire.right_within_two_heartbeats()
    assert fire.ctl("nodes")
