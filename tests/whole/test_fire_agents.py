"""Agents and the router are killed, and start again with no server at all."""
from __future__ import annotations

import json
import os
import signal
import urllib.request

import pytest

from tests.whole.asking import Load
from tests.whole.cluster import MODEL
from tests.whole.fire import NODES

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("calm")]


def test_kill_9_of_every_agent_costs_no_request_and_no_process(fire):
    engines, gates = fire.engines(), fire.gates()
    streams = [fire.hold(row["id"], stream=True, seconds=8) for row in fire.rows()]
    with Load(fire) as load:
        load.more(2)
        for name in NODES:
            fire.kill9(name)
        load.more(6)
        assert (fire.engines(), fire.gates()) == (engines, gates)
        for name in NODES:
            fire.start_agent(name)
        fire.until("both agents have adopted what runs", lambda: all(
            fire.log(name).read_text().count("gate adopted") == 1
            and fire.log(name).read_text().count("shard adopted") == 2 for name in NODES))
        load.more(6)
    assert [asked.wait().outcome for asked in streams] == ["whole", "whole"]
    assert load.failed == [] and load.broken == []
    fire.calm()
    assert (fire.engines(), fire.gates()) == (engines, gates)
    assert {row["shards"][0]["observed"]["restarts"] for row in fire.rows()} == {0}


def test_with_no_server_at_all_the_router_starts_from_disk_and_nodes_repair_themselves(fire):
    engines, rows = fire.engines(MODEL), fire.rows()
    fire.kill9("server")
    fire.kill9("router")
    fire.start_router()
    with urllib.request.urlopen(fire.router["url"] + "/ready", timeout=30) as answer:
        assert json.loads(answer.read())["status"] == "ready"
    for row in rows:
        stream = fire.hold(row["id"], stream=True, tokens=16)
        assert stream.wait().is_right, "every replica is served from the kept table"
    victim = rows[0]["id"]
    with Load(fire) as load:
        load.more(2)
        os.kill(engines[victim], signal.SIGKILL)
        fire.until("another engine runs", lambda: fire.engines(MODEL).get(victim) not in (None, engines[victim]))
        load.more(4)
    assert load.failed == [], "only streams that had begun may break"
    fire.until("the replica serves again", lambda: fire.serves(victim))
    repaired = fire.engines(MODEL)
    fire.begin_server()
    fire.right_within_two_heartbeats()
    fire.calm()
    assert fire.engines(MODEL) == repaired
    assert {name for name in engines if engines[name] != repaired[name]} == {victim}


def test_a_killed_router_serves_again_at_once_and_what_it_had_begun_is_given_up(fire):
    engines, gates = fire.engines(MODEL), fire.gates()
    streams = [fire.hold(row["id"], stream=True) for row in fire.rows()]
    fire.kill9("router")
    assert {stream.wait().outcome for stream in streams} == {"cut"}
    fire.start_router()
    assert fire.ask().wait().is_right, "the first request after the restart"
    fire.until("the engines compute nothing for those who left", lambda: fire.running() == {row["id"]: 0 for row in fire.rows()})
    assert (fire.engines(MODEL), fire.gates()) == (engines, gates)
