"""A node's disk is full at every step from the engine's archive to a shard's files; what runs keeps running.

The tests follow each other on one cluster: each begins where the one before ended.
"""
from __future__ import annotations

import json
import os
import signal

import pytest

from tests.whole.bad_day import NOWHERE, logged, repeated, small_disk
from tests.whole.cluster import MODEL, SERVER_YAML, Cluster, until

pytestmark = pytest.mark.slow
MB = 1000 * 1000
KEPT = 256 << 20                      # what an install leaves free


@pytest.fixture(scope="module")
def place(pyz, llama_archive, qa_template, tmp_path_factory):
    """A cluster whose node has a disk of its own, on which an archive cannot come in yet."""
    made = Cluster(pyz, tmp_path_factory.mktemp("node"), qa_template)
    made.env["LLMGW_GITHUB_API"] = NOWHERE
    with small_disk(made.dir("node-1"), 1000 * MB) as made.disk:
        try:
            made.disk.fill(100 * MB)
            made.start_server()
            made.start_agent()
            made.start_router()
            made.ctl("mirror", "import-engine", llama_archive.path, "--sha256", llama_archive.sha256)
            yield made
        finally:
            made.close()


def engine(place):
    """Return (phase, what ctl says below the node)."""
    nodes = [seen for engine in place.items("engines") for _, seen in engine["nodes"]]
    return (nodes[0]["phase"], place.ctl("nodes")) if nodes else ("", "")


def replicas(place):
    return sorted(place.items("replicas"), key=lambda replica: replica["created_at"])


def engines(place):
    return [pid for pid, words in place.left().items() if "llama-server" in words and "--port" in words]


def test_an_archive_that_has_no_room_is_a_sentence_of_the_node(place):
    phase, said = until("the download is refused", lambda: engine(place)[0] == "failed" and engine(place))
    assert f"llama.cpp b10991: no space left in {place.dir('node-1')}/blobs/partial: 5.0 MB are needed, " in said
    assert "of which 268.4 MB are kept; tried again in" in said
    assert f"try: free some space on the filesystem of {place.dir('node-1')}/blobs/partial" in place.ctl("engines")


def test_an_archive_that_has_no_room_to_be_unpacked_is_no_bomb(place, llama_archive):
    place.disk.fill(KEPT + os.path.getsize(llama_archive.path) + 2 * MB)
    said = until("the unpacking is refused", lambda: "to unpack" in engine(place)[1] and engine(place)[1])
    assert f"no space left in {place.dir('node-1')}/engines/llama.cpp/" in said.replace(".b10991.scratch", "")
    assert f"to unpack {llama_archive.name}: " in said and "of which 268.4 MB are kept" in said
    assert not [path for path in (place.dir("node-1") / "engines").rglob("*") if "llama-server" in path.name]


def test_it_is_installed_by_itself_when_there_is_room_again(place):
    place.disk.empty()
    until("it is installed", lambda: engine(place)[0] == "installed")
    assert "no space left" not in place.ctl("nodes") + place.ctl("engines")


def test_a_node_without_room_for_the_weights_is_not_chosen_and_says_why(place, gemma):
    place.disk.fill(100 * MB)
    until("the node has told", lambda: place.items("nodes")[0]["facts"]["disk_free_bytes"] < 110 * MB)
    place.ctl("mirror", "import", gemma, "--name", MODEL)
    said = until("the model says why", lambda: "of disk are needed" in place.ctl("models") and place.ctl("models"))
    assert "node-1: 241 MiB of disk are needed for the weights, " in said and "are kept" in said
    assert replicas(place) == []


def test_a_fetch_that_finds_no_room_is_a_sentence_and_goes_on_by_itself(place):
    """The disk fills between the decision and the fetch: the agent does not move meanwhile."""
    os.kill(place.children["node-1"].pid, signal.SIGSTOP)
    try:
        place.disk.empty()
    finally:
        os.kill(place.children["node-1"].pid, signal.SIGCONT)
    until("it is placed", lambda: replicas(place))
    os.kill(place.children["node-1"].pid, signal.SIGSTOP)
    place.disk.fill(20 * MB)
    os.kill(place.children["node-1"].pid, signal.SIGCONT)
    until("the fetch is refused", lambda: replicas(place)[0]["message"].startswith("no space left in "))
    said = replicas(place)[0]["message"]
    assert f"no space left in {place.dir('node-1')}/blobs/partial: " in said and "; free some space on the" in said
    assert said in " ".join(place.ctl("replicas").split()) or said in place.ctl("replicas")
    place.disk.empty()
    place.wait_ready()
    place.key = json.loads(place.ctl("keys", "create", "test", "--json"))["secret"]
    until("the router answers", lambda: _answers(place))


def _answers(place):
    try:
        return "Paris" in place.answer()
    except OSError:
        return False


def test_an_engine_that_runs_goes_on_and_so_it_does_through_a_restart_of_the_agent(place):
    before = engines(place)
    place.disk.fill()
    assert len(before) == 1 and "Paris" in place.answer()
    place.children["node-1"].kill()
    place.children.pop("node-1").wait(30)
    assert "Paris" in place.answer()
    place.start_agent()
    until("the agent tells of the disk", lambda: place.items("nodes")[0]["facts"]["disk_free_bytes"] < MB)
    for _ in range(5):
        assert "Paris" in place.answer()
    assert engines(place) == before and replicas(place)[0]["state"] == "ready"


def test_a_shard_whose_files_cannot_be_written_waits_and_says_why(place):
    place.config.write_text(SERVER_YAML + "    replicas: 2\n")
    until("a second one is placed", lambda: len(replicas(place)) == 2)
    said = until("it tells", lambda: "no space left on the device" in replicas(place)[1]["message"]
                 and replicas(place)[1]["message"])
    assert said.startswith(f"cannot be started: cannot write {place.dir('node-1')}/shards/") or \
        said.startswith("cannot make the folder"), said
    assert "what is wanted here could not be written down" in place.ctl("nodes")
    assert replicas(place)[0]["state"] == "ready" and "Paris" in place.answer()


def test_everything_is_there_when_there_is_room_again_and_nothing_was_told_again_and_again(place):
    running = engines(place)
    place.disk.empty()
    until("both are ready", lambda: [replica["state"] for replica in replicas(place)] == ["ready", "ready"], 120)
    until("the node complains no more", lambda: "no space left" not in place.ctl("nodes") + place.ctl("models"))
    assert set(running) <= set(engines(place))
    desired = json.loads((place.dir("node-1") / "state" / "desired.json").read_text())
    assert len(desired["desired"]["shards"]) == 2
    assert repeated(place) == []
    assert logged(place, "node-1", "Traceback") == [] and logged(place, "server", "Traceback") == []
