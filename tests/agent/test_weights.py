"""The weights of a node, with a real agent process: whole, repaired, resumed, given up when nobody wants them."""
from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import threading
import time

import pytest

from llmgw.agent.board import Board, Desired
from llmgw.agent.fetch import Fetcher
from llmgw.agent.layout import Layout
from llmgw.agent.scrub import Scrub
from llmgw.agent.weights import MARKER, WeightsKeeper
from llmgw.api.client import ControlClient
from llmgw.domain.heartbeat import NodeDesired
from llmgw.domain.model import CHUNK_BYTES, WeightsFile, WeightsPhase
from llmgw.domain.node import NodeFacts, NodeIdentity
from llmgw.domain.secret import Secret
from tests.agent.conftest import wait_for
from tests.fakes.control_plane import TOKEN, shard_of, weights_of


class Keeping:
    """A keeper without its process: turns are taken by the test."""

    def __init__(self, plane, folder):
        self.layout, self.stop = Layout(str(folder)), threading.Event()
        os.makedirs(folder, exist_ok=True)
        self.board = Board(NodeIdentity("n1", "0", "b"))
        self.board.put_facts(NodeFacts(disk_total_bytes=1))
        self.client = ControlClient([plane.url], Secret(TOKEN))
        self.fetcher = Fetcher(self.client, self.layout)
        self.keeper = WeightsKeeper(self.fetcher, self.board, self.layout, self.stop)
        self.generation = 0

    def want(self, *weights):
        self.generation += 1
        self.board.put_desired(Desired(1, self.generation, NodeDesired(shards=tuple(
            shard_of(one, f"r{number}.0") for number, one in enumerate(weights)))))

    def turn(self, *wanted):
        if wanted or self.board.desired is None:
            self.want(*wanted)
        self.keeper.turn()
        return self

    def seen(self, weights):
        return self.board.weights((weights.name, weights.fingerprint))

    def marker(self, weights):
        return os.path.join(self.layout.weights(weights.name, weights.fingerprint), MARKER)

    def scrub(self, **more):
        made = Scrub(self.layout, self.keeper.held, self.fetcher, self.keeper.report_damage, self.stop,
                     **{"again_seconds": 0.0, "bytes_per_second": 1 << 40, **more})
        made.turn()
        return made


@pytest.fixture
def keeping(plane, tmp_path, gguf_weights):
    path, weights = gguf_weights
    plane.offer(weights=weights, path=path)
    made = Keeping(plane, tmp_path / "node")
    yield made
    made.client.close()


def flip(path, at):
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def test_one_flipped_byte_on_the_way_costs_one_chunk_and_is_told(keeping, plane, gguf_weights, caplog):
    _, weights = gguf_weights
    spoiled = CHUNK_BYTES + 9
    plane.spoil = lambda name, data: data if sum(f"bytes={CHUNK_BYTES}-" in one for one in plane.ranges) > 1 else (
        data[:spoiled] + bytes([data[spoiled] ^ 1]) + data[spoiled + 1:])
    keeping.turn(weights)
    seen = keeping.seen(weights)
    assert (seen.phase, seen.message) == (
        WeightsPhase.WHOLE, "1 of 3 chunks came wrong from the control plane, and were fetched again")
    assert sum(int(one.split("-")[1]) - int(one.partition("=")[2].split("-")[0]) + 1 for one in plane.ranges) \
        == weights.size_bytes + CHUNK_BYTES
    assert "came wrong from the control plane: this chunk is fetched again" in caplog.text


def test_one_flipped_byte_on_the_disk_costs_one_chunk_and_is_told(keeping, plane, gguf_weights, caplog):
    path, weights = gguf_weights
    keeping.turn(weights)
    blob = keeping.layout.blob(weights.files[0].sha256)
    inode = os.stat(blob).st_ino
    flip(blob, CHUNK_BYTES + 100)
    plane.ranges.clear()
    keeping.scrub()
    keeping.turn()
    seen = keeping.seen(weights)
    assert seen.phase is WeightsPhase.WHOLE
    assert seen.message == "1 of 3 chunks of three.gguf had changed on this disk, and were fetched again"
    assert plane.ranges == [f"{weights.files[0].sha256} bytes={CHUNK_BYTES}-{2 * CHUNK_BYTES - 1}"]
    assert os.stat(blob).st_ino == inode and pathlib.Path(blob).read_bytes() == path.read_bytes()
    assert "1 of 3 chunks have changed on this disk" in caplog.text
    keeping.turn()
    assert keeping.seen(weights).message == seen.message           # it stays until something else happens


def test_damage_that_cannot_be_repaired_now_stays_said(keeping, plane, gguf_weights):
    _, weights = gguf_weights
    keeping.turn(weights)
    flip(keeping.layout.blob(weights.files[0].sha256), 5)
    offered, plane.blobs = plane.blobs, {}
    keeping.scrub()
    keeping.turn()
    seen = keeping.seen(weights)
    assert seen.phase is WeightsPhase.DAMAGED and "cannot be fetched again yet: no file" in seen.message
    plane.blobs = offered
    keeping.keeper._failed.clear()                                  # its pause is over
    keeping.turn()
    assert keeping.seen(weights).phase is WeightsPhase.WHOLE


def test_a_scrub_reads_each_blob_when_it_is_time_and_remembers_it(keeping, gguf_weights):
    _, weights = gguf_weights
    keeping.turn(weights)
    assert keeping.scrub(again_seconds=1000.0).turn() is None       # it was proven when it came
    first = keeping.scrub()
    assert weights.files[0].sha256 in pathlib.Path(keeping.layout.root, "state", "scrub.json").read_text()
    keeping.stop.set()
    assert first.turn() is None                                     # stops in the middle of a file


def test_two_models_share_the_blob_that_they_have_in_common(keeping, plane, gguf_weights):
    path, weights = gguf_weights
    twin = weights_of(path, "twin")
    keeping.turn(weights, twin)
    assert [keeping.seen(one).phase for one in (weights, twin)] == [WeightsPhase.WHOLE] * 2
    assert os.listdir(os.path.join(keeping.layout.root, "blobs", "sha256")) == [weights.files[0].sha256]


def test_what_nobody_wanted_for_a_day_goes_and_what_runs_stays(keeping, gguf_weights):
    _, weights = gguf_weights
    keeping.turn(weights)
    marker = keeping.marker(weights)
    old = time.time() - 25 * 3600
    os.utime(marker, (old, old))
    keeping.turn()
    assert time.time() - os.path.getmtime(marker) < 60              # wanted: as good as new
    keeping.want()
    keeping.turn()
    assert os.path.exists(marker)
    os.utime(marker, (old, old))
    keeping.turn()
    assert not os.path.exists(marker) and keeping.seen(weights) is None
    assert os.listdir(os.path.join(keeping.layout.root, "blobs", "sha256")) == []


def test_a_full_disk_is_said_before_the_first_byte(keeping, plane, gguf_weights):
    _, weights = gguf_weights
    huge = WeightsFile("z.gguf", 1 << 50, "0" * 64)                 # the first file alone would fit
    weights = dataclasses.replace(weights, files=(*weights.files, huge))
    keeping.want(weights)
    keeping.keeper._fetch_or_wait(weights, 0)
    seen = keeping.seen(weights)
    assert seen.phase is WeightsPhase.FAILED and "are needed" in seen.message and plane.ranges == []


def test_a_marker_whose_files_are_not_those_of_its_fingerprint_is_none(keeping, gguf_weights):
    _, weights = gguf_weights
    keeping.turn(weights)
    marker = keeping.marker(weights)
    data = json.loads(pathlib.Path(marker).read_text())
    data["files"][0]["sha256"] = "0" * 64
    pathlib.Path(marker).write_text(json.dumps(data))
    keeping.keeper._manifests.clear()
    assert keeping.keeper.held() == []


@pytest.mark.parametrize("place", ["fetch-in-the-middle:kill@2", "weights-after-blob:kill", "weights-before-marker:kill",
                                   "weights-after-marker:kill", "fetch-before-rename:kill", "fetch-after-rename:kill"])
def test_an_agent_killed_at_any_step_of_a_fetch_ends_it_after_the_next_start(node, plane, gguf_weights, place):
    path, weights = gguf_weights
    plane.offer(weights=weights, path=path)
    plane.want([], [shard_of(weights)])
    node.start(LLMGW_FAILPOINT=place)
    assert node.ended() == -9
    before = len(plane.ranges)
    node.start()
    plane.wait(lambda observed: any(one.phase is WeightsPhase.WHOLE for one in observed.weights))
    blob = node.data / "blobs" / "sha256" / weights.files[0].sha256
    assert hashlib.sha256(blob.read_bytes()).hexdigest() == weights.files[0].sha256
    if place != "fetch-in-the-middle:kill@2":
        assert len(plane.ranges) == before                          # everything was here
    wait_for(lambda: list((node.data / "models").rglob(MARKER)), what="the marker")
