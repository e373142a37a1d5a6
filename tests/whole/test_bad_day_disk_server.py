"""The control plane's disk is full: every write says so, nothing is half-written, and it heals by itself."""
from __future__ import annotations

import json
import os

import pytest

from tests.fakes import gguf_file
from tests.whole.bad_day import NOWHERE, read_only, repeated, small_disk
from tests.whole.cluster import Cluster, until

pytestmark = pytest.mark.slow
YAML = "cluster: test\nlisten: 127.0.0.1:0\nengines: {llama.cpp: {version: b10991}}\nmodels:\n"
MODEL = "  - {name: %s, engine: llama.cpp, weights: '%s'}\n"


@pytest.fixture(scope="module")
def place(pyz, qa_template, tmp_path_factory):
    """A server whose data folder is a small disk of its own."""
    made = Cluster(pyz, tmp_path_factory.mktemp("full"), qa_template)
    made.env["LLMGW_GITHUB_API"] = NOWHERE
    made.config.write_text(YAML + MODEL % ("one", "mirror:one"))
    (made.folder / "small.gguf").write_bytes(gguf_file.small_model())
    with small_disk(made.dir("server"), 256 << 20) as made.disk:
        try:
            made.start_server()
            made.start_agent()
            until("the node is known", lambda: made.items("nodes"))
            yield made
        finally:
            made.close()


@pytest.fixture
def full(place):
    place.disk.fill()
    yield place
    place.disk.empty()


def models(place):
    return json.loads(place.ctl("models", "--json"))


def test_a_key_that_cannot_be_kept_is_not_made(full):
    done = full.ctl("keys", "create", "somebody", ok=False)
    assert done.returncode == 75 and done.stdout == ""
    assert f"llmgw: cannot write {full.dir('server')}/llmgw.db: no space left on the device" in done.stderr
    assert f"try: free some space on the filesystem of {full.dir('server')}" in done.stderr
    assert full.items("keys", "list") == []
    full.disk.empty()
    assert full.ctl("keys", "create", "somebody").startswith("llmgw_infer_")


def test_an_upload_is_refused_before_it_is_half_there_and_goes_through_later(full):
    done = full.ctl("mirror", "import", full.folder / "small.gguf", "--name", "one", ok=False)
    assert done.returncode == 75 and f"no space left in {full.dir('server')}/mirror: " in done.stderr, done.stderr
    assert "of which 67.1 MB are kept" in done.stderr
    assert list((full.dir("server") / "mirror" / "uploads").iterdir()) == []
    assert full.items("mirror", "list")["models"] == []
    full.disk.empty()
    full.ctl("mirror", "import", full.folder / "small.gguf", "--name", "one")


def test_an_edit_that_cannot_be_kept_waits_and_is_told_once(full):
    full.config.write_text(YAML + MODEL % ("one", "mirror:one") + MODEL % ("two", "mirror:two"))
    said = until("the edit is refused", lambda: models(full)["config_problem"])
    assert said == f"cannot write {full.dir('server')}/llmgw.db: no space left on the device"
    assert [model["name"] for model in models(full)["items"]] == ["one"]
    assert f"server.yaml is not used as it is now: {said}" in full.ctl("models", ok=False).stderr
    full.disk.empty()
    until("the edit is taken without being touched again", lambda: not models(full)["config_problem"])
    assert [model["name"] for model in models(full)["items"]] == ["one", "two"]
    events = [event["message"] for event in full.items("events") if event["subject"] == "config"]
    assert [event for event in events if said in event] != [] and "model two added" in events


def test_a_file_of_the_server_is_read_again_when_there_is_room(full):
    full.disk.empty()
    path = full.folder / "local.gguf"
    path.write_bytes(gguf_file.small_model() + b"\0" * 64)
    full.disk.fill(1 << 20)               # room for the database, none for the mirror
    full.config.write_text(YAML + MODEL % ("local", f"file:{path}"))

    def why():
        return next((model["why_not"] for model in models(full)["items"] if model["name"] == "local"), [])
    until("the model tells", lambda: any(f"no space left in {full.dir('server')}/mirror" in why_not for why_not in why()))
    full.disk.empty()
    until("it is in the mirror", lambda: next(
        model["size_bytes"] for model in models(full)["items"] if model["name"] == "local"))
    assert not list((full.dir("server") / "mirror" / "uploads").iterdir())


def test_folders_that_become_read_only_are_told_and_heal_by_themselves(place):
    whole = place.config.read_text()
    with read_only(place.dir("server")), read_only(place.dir("node-1")):
        (place.folder / "other.gguf").write_bytes(gguf_file.small_model() + b"other")
        for name in ("small.gguf", "other.gguf"):             # one whose bytes are there already, and one to be sent
            done = place.ctl("mirror", "import", place.folder / name, "--name", "again", ok=False)
            assert done.returncode == 75 and f"llmgw: cannot write {place.dir('server')}/mirror/" in done.stderr, done.stderr
            assert ": the filesystem is read-only" in done.stderr and "  try: look at dmesg" in done.stderr
        place.config.write_text(whole.replace("b10991", "b10992"))
        said = until("the node tells", lambda: "the filesystem is read-only" in place.ctl("nodes") and place.ctl("nodes"))
        assert "what is wanted here could not be written down" in " ".join(said.split())
        assert place.items("nodes")[0]["state"] == "ready" and place.ctl("keys", "create", "meanwhile")
    until("the node has nothing more to tell", lambda: "read-only" not in place.ctl("nodes") + place.ctl("engines"), 120)
    kept = json.loads((place.dir("node-1") / "state" / "desired.json").read_text())
    assert kept["desired"]["engines"][0]["version"] == "b10992"
    place.ctl("mirror", "import", place.folder / "small.gguf", "--name", "again")
    place.config.write_text(whole)


def test_heartbeats_and_reads_go_on_and_nothing_is_told_again_and_again(full):
    until("the node is seen", lambda: full.items("nodes")[0]["state"] == "ready")
    full.ctl("events")
    full.check()
    assert repeated(full) == []
    assert "Traceback" not in full.log("server").read_text()


def test_a_disk_that_fills_within_a_piece_keeps_what_was_whole(place):
    """Here the disk is full for exactly one write; the same command goes on where it stopped."""
    place.stop("server")
    place.env["LLMGW_FAILPOINT"] = "upload-after-write:enospc@2"
    try:
        place.start_server()
        path = place.folder / "big.bin"
        path.write_bytes(os.urandom(20 << 20))
        done = place.ctl("mirror", "import", path, "--raw", "--name", "big", ok=False)
        assert done.returncode == 75 and "no space left on the device" in done.stderr, done.stderr
        part, = (place.dir("server") / "mirror" / "uploads").iterdir()
        assert part.stat().st_size == 8 << 20
        assert "big.bin: goes on at 8.4 MB" in place.ctl("mirror", "import", path, "--raw", "--name", "big", ok=False).stderr
        assert not list((place.dir("server") / "mirror" / "uploads").iterdir())
    finally:
        del place.env["LLMGW_FAILPOINT"]
