"""Moving to the next control plane while the old loop is still in its call: at most two loops, nothing old taken."""
from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time

import pytest

from llmgw.agent import failover
from llmgw.agent.failover import HeartbeatLoops
from llmgw.domain.digest import fingerprint
from llmgw.domain.errors import Unreachable
from llmgw.domain.model import WeightsPhase
from tests.agent.conftest import Node, free_block, wait_for
from tests.fakes.control_plane import ControlPlane, shard_of, weights_of


class Doors:
    """Control planes that are functions: each answers, fails, or holds a call until it is let go."""

    def __init__(self, count):
        self.behaviour = ["answer"] * count
        self.calls, self.running, self.most = [], 0, 0
        self.free, self._lock = threading.Event(), threading.Lock()
        self.stop, self.moved, self.failed = threading.Event(), [], []
        self.loops = HeartbeatLoops(self.beat, count, self.stop, threading.Event(), self.moved.append, self.failed.append)

    def beat(self, door):
        with self._lock:
            self.calls.append(door)
            self.running += 1
            self.most = max(self.most, self.running)
        try:
            if self.behaviour[door] == "fail":
                raise Unreachable(f"door {door}")
            if self.behaviour[door] == "hold":
                assert self.free.wait(60)
            return 0.01
        finally:
            with self._lock:
                self.running -= 1

    def turn_until(self, condition, what):
        def check():
            self.loops.turn()
            return condition()
        wait_for(check, what=what)

    def close(self):
        self.stop.set()
        self.free.set()


@pytest.fixture
def doors(monkeypatch):
    monkeypatch.setattr(failover, "MOVE_SECONDS", 600.0)        # on a loaded machine any call can take seconds
    monkeypatch.setattr(failover, "PAUSE_SECONDS", 0.05)
    made = Doors(3)
    yield made
    made.close()


def test_one_loop_stays_with_a_control_plane_that_answers(doors):
    doors.turn_until(lambda: len(doors.calls) > 20, "calls")
    assert set(doors.calls) == {0} and doors.most == 1 and doors.moved == [0]


def test_a_failure_moves_on_at_once_and_all_around(doors):
    doors.behaviour = ["fail", "fail", "answer"]
    doors.turn_until(lambda: doors.calls[-5:] == [2] * 5, "the third")
    assert doors.calls[:3] == [0, 1, 2] and len(doors.failed) == 2
    doors.behaviour = ["answer", "fail", "fail"]
    doors.turn_until(lambda: doors.calls[-5:] == [0] * 5, "the first again")


def test_a_call_that_hangs_is_left_and_never_a_third_loop_begins(doors, monkeypatch):
    doors.behaviour = ["hold", "hold", "hold"]
    monkeypatch.setattr(failover, "MOVE_SECONDS", 0.1)
    doors.turn_until(lambda: doors.running == 2, "the second loop")
    for _ in range(50):
        doors.loops.turn()
        time.sleep(0.01)
    assert doors.calls == [0, 1] and doors.most == 2
    monkeypatch.setattr(failover, "MOVE_SECONDS", 600.0)        # or the second counts as hung before it wakes
    doors.free.set()
    doors.turn_until(lambda: doors.calls.count(1) > 3, "the newest loop goes on")
    assert doors.calls.count(0) == 1 and doors.most == 2        # the one that was left makes no further call


class Fleet:
    """A real agent that knows two control planes, and the weights that they change under it."""

    def __init__(self, tmp_path, node, planes):
        self.node, self.planes = node, planes
        self.weights = []
        for number in range(4):
            path = tmp_path / f"w{number}.gguf"
            path.write_bytes(os.urandom(300_000 + number))
            self.weights.append(weights_of(path, f"w{number}"))
            for plane in planes:
                plane.offer(weights=self.weights[-1], path=path)
        for plane in planes:
            plane.epoch = 1 + planes.index(plane)
        node.start("--server", planes[1].url)

    def want(self, plane, *numbers):
        plane.want([], [shard_of(self.weights[number], f"r{number}.0") for number in numbers])

    def whole(self, observed):
        return {one.name for one in observed.weights if one.phase is WeightsPhase.WHOLE}


@pytest.mark.slow
def test_a_failover_under_load_while_weights_change_reports_only_what_is_there(tmp_path):
    planes = [ControlPlane(), ControlPlane()]
    node = Node(tmp_path, planes[0], free_block())
    fleet = None
    try:
        fleet = Fleet(tmp_path, node, planes)
        fleet.want(planes[0], 0)
        planes[0].wait(lambda observed: fleet.whole(observed) == {"w0"})
        planes[0].holding.set()                                  # heard, and answered late
        fleet.want(planes[0], 0, 3)
        wait_for(lambda: planes[0].in_flight and planes[0].generation == 2, what="a call that hangs")
        fleet.want(planes[1], 0, 1)
        burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
        try:
            planes[1].wait(lambda observed: observed.epoch == 2, 120.0)
            assert planes[0].in_flight + planes[1].in_flight <= 2
            planes[0].holding.clear()                            # its late answer wants w3, and is of an older epoch
            planes[1].wait(lambda observed: {"w0", "w1"} <= fleet.whole(observed), 120.0)
            for numbers in ((0, 2), (1, 2), (2,), (0, 1, 2)):
                fleet.want(planes[1], *numbers)
                generation = planes[1].generation
                wanted = {f"w{number}" for number in numbers}
                planes[1].wait(lambda observed, generation=generation, wanted=wanted: observed.generation == generation
                               and wanted <= fleet.whole(observed), 120.0)
            beats = planes[1].heartbeats
            wait_for(lambda: planes[1].heartbeats > beats + 5, 120.0, "heartbeats to the new one")
        finally:
            for burner in burners:
                burner.kill()
                burner.wait()
        assert "w3" not in {one.name for observed in planes[1].heard for one in observed.weights}
        known = {one.name: one.fingerprint for one in fleet.weights}
        for plane in planes:
            epochs = [(observed.epoch, observed.generation) for observed in plane.heard]
            assert epochs == sorted(epochs)
            for observed in plane.heard:
                for one in observed.weights:
                    assert known[one.name] == one.fingerprint
        for one in fleet.weights[:3]:
            assert one.fingerprint == fingerprint([(file.name, file.size_bytes, file.sha256) for file in one.files])
        assert re.search("the next one is asked too", node.log())
    finally:
        node.close()
        for plane in planes:
            plane.holding.clear()
            plane.close()
