"""The wall clock steps, of one machine or of all: nobody is lost for it, nothing is stopped, and the skew is told."""
from __future__ import annotations

import glob
import json
import os
import re
import shutil
import subprocess
import sys
import threading

import pytest

from llmgw.domain.heartbeat import NodeObserved
from llmgw.domain.node import NodeFacts, NodeIdentity
from llmgw.server.events import Events
from llmgw.server.nodes import Nodes
from llmgw.server.store_sqlite import SqliteStore
from llmgw.system.clock import Clock
from tests.whole.bad_day import NOWHERE, log_lines
from tests.whole.cluster import Cluster, until

HOUR = 3600
FAKETIME = next(iter(sorted(glob.glob("/usr/lib/*/faketime/libfaketimeMT.so.1"))), "")
REAL_SLEEP = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "fakes", "real_sleep.c")


class SteppingClock(Clock):
    """Goes on as it should, but for what ``step`` adds to the wall clock."""

    def __init__(self):
        self.step = 0.0

    def wall(self):
        return super().wall() + self.step


@pytest.mark.parametrize("step", [-HOUR, HOUR, -1.7e9, 5e8], ids=["-1 h", "+1 h", "1970", "2040"])
def test_a_server_whose_clock_steps_keeps_its_nodes_and_the_order_of_events(tmp_path, step):
    """The injected clock: this runs where libfaketime is not."""
    clock, store = SteppingClock(), SqliteStore(str(tmp_path))
    nodes, events = Nodes(store, clock, threading.Event()), Events(store, clock)
    seen = NodeObserved(NodeIdentity("a", "1", "boot"), NodeFacts(), True, clock=clock.wall())
    nodes.hear(seen)
    events.add("x", "Before", "before the step")
    clock.step = step
    events.add("x", "After", "after the step")
    heard = nodes.seen()["a"].at
    assert 0 <= clock.monotonic() - heard < 5
    assert [event.reason for event in events.after(0, 0)] == ["Before", "After"]
    nodes.hear(seen)
    assert abs(nodes.heard()["a"].skew_seconds + step) < 5
    events.flush()
    store.close()
    again = SqliteStore(str(tmp_path))
    assert [event.reason for event in Events(again, clock).after(0, 0)] == ["Before", "After"]
    again.close()


class Clocks:
    """A file per role with what its clock is off by."""

    def __init__(self, cluster):
        self.cluster = cluster
        sleep = str(cluster.folder / "real_sleep.so")
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", sleep, REAL_SLEEP], check=True, timeout=60)
        cluster.env.update({"LD_PRELOAD": f"{sleep}:{FAKETIME}", "FAKETIME_DONT_FAKE_MONOTONIC": "1", "FAKETIME_NO_CACHE": "1",
                            "NO_FAKE_STAT": "1"})

    def of(self, name):
        self.cluster.env["FAKETIME_TIMESTAMP_FILE"] = str(self.cluster.folder / f"{name}.clock")
        self.step(name, 0)

    def step(self, name, seconds):
        written = self.cluster.folder / f"{name}.clock.new"
        written.write_text(f"{seconds:+d}\n")
        os.replace(written, self.cluster.folder / f"{name}.clock")     # it is read at every look at the clock


@pytest.fixture(scope="module")
def place(pyz, qa_template, tmp_path_factory):
    if not FAKETIME or not shutil.which("cc"):
        pytest.skip("NOT TESTED as processes: no libfaketime or no cc (Debian: apt-get install faketime gcc)")
    made = Cluster(pyz, tmp_path_factory.mktemp("clock"), qa_template)
    made.env["LLMGW_GITHUB_API"] = NOWHERE
    made.clocks = Clocks(made)
    try:
        for name, start in (("server", made.start_server), ("node-1", made.start_agent), ("router", made.start_router)):
            made.clocks.of(name)
            start()
        slept = subprocess.run([sys.executable, "-c", "import time; time.sleep(0.01)"], env={**os.environ, **made.env},
                               stderr=subprocess.PIPE, text=True, timeout=60)
        assert slept.returncode == 0, slept.stderr
        made.env = {key: value for key, value in made.env.items() if "FAKE" not in key and key != "LD_PRELOAD"}
        until("the node is ready", lambda: [node["state"] for node in made.items("nodes")] == ["ready"])
        yield made
    finally:
        made.close()


def node(place):
    return place.items("nodes")[0]


@pytest.mark.slow
def test_a_node_whose_clock_steps_back_an_hour_stays_and_its_skew_is_told(place):
    place.clocks.step("node-1", -HOUR)
    until("the skew is seen", lambda: abs(node(place)["clock_skew_seconds"] + HOUR) < 30)
    assert node(place)["state"] == "ready"
    assert re.search(r"\n  its clock is 3[56]\d\d s behind\n", place.ctl("nodes"))
    place.clocks.step("node-1", 0)
    until("it is well again", lambda: abs(node(place)["clock_skew_seconds"]) < 5)


@pytest.mark.slow
def test_a_server_and_a_router_whose_clocks_step_back_an_hour_serve_on(place):
    events = len(place.items("events"))
    for name in ("server", "router", "node-1"):
        place.clocks.step(name, -HOUR)
    key = json.loads(place.ctl("keys", "create", "later", "--json"))
    table = place.dir("router") / "table.json"
    until("the router learns the key", lambda: key["id"] in table.read_text())
    place.config.write_text(place.config.read_text() + "    replicas: 2\n")
    until("an edit is taken", lambda: place.items("models")[0]["wanted"] == 2)
    beats = until("heartbeats go on", lambda: node(place)["seen_seconds_ago"] < 6 and [node(place)["state"]])
    assert beats == ["ready"]
    new = place.items("events")[events:]
    assert [event["reason"] for event in new] == ["KeyMade", "Applied"], new
    assert new[0]["id"] < new[1]["id"] and new[0]["at"] < place.items("events")[0]["at"]
    place.check()
    for name in place.children:
        assert [text for level, text in log_lines(place, name) if "Traceback" in text] == []
