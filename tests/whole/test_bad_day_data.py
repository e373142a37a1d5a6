"""Files that are not what they should be: archives, models, blobs on either disk, and the roles' own state.

The tests follow each other on one cluster: each begins where the one before ended.
"""
from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import tarfile

import pytest

from tests.whole.bad_day import NOWHERE, logged
from tests.whole.cluster import MODEL, Cluster, until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(pyz, qa_template, tmp_path_factory):
    """A cluster without an engine and without a model, yet."""
    made = Cluster(pyz, tmp_path_factory.mktemp("data"), qa_template)
    made.env["LLMGW_GITHUB_API"] = NOWHERE
    try:
        made.start_server()
        made.start_agent()
        made.start_router()
        until("the node is known", lambda: made.items("nodes"))
        yield made
    finally:
        made.close()


def blobs(place, name):
    folder = place.dir(name) / ("mirror" if name == "server" else "") / "blobs" / "sha256"
    return sorted(folder.iterdir()) if folder.is_dir() else []


def engine(place):
    nodes = [seen for engine in place.items("engines") for _, seen in engine["nodes"]]
    return nodes[0] if nodes else {"phase": "", "message": ""}


def replica(place):
    return place.items("replicas")[0]


def read(path):
    """Return the JSON in a file, {} while it is none."""
    try:
        return json.loads(path.read_bytes())
    except ValueError:
        return {}


def engines(place):
    return [pid for pid, words in place.left().items() if "llama-server" in words and "--port" in words]


def test_an_archive_with_another_sha256_is_refused_before_it_is_sent(place, llama_archive):
    done = place.ctl("mirror", "import-engine", llama_archive.path, "--sha256", "0" * 64, ok=False)
    assert done.returncode == 1
    assert f"llmgw: {llama_archive.path}: sha256 is {llama_archive.sha256}, expected {'0' * 64}" in done.stderr
    assert "try: nothing of it was kept; fetch or import the file again" in done.stderr
    assert place.items("mirror", "list")["engines"] == [] and blobs(place, "server") == []


def test_an_archive_that_climbs_out_is_refused_by_the_node_and_leaves_nothing(place, llama_archive):
    path = place.folder / llama_archive.name
    with tarfile.open(path, "w:gz") as tar:
        for name, data in (("llama-b10991/llama-server", b"#!/bin/sh\n"), ("llama-b10991/../../../../evil", b"evil")):
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o755
            tar.addfile(info, io.BytesIO(data))
    place.ctl("mirror", "import-engine", path, "--sha256", hashlib.sha256(path.read_bytes()).hexdigest())
    until("it is refused", lambda: engine(place)["phase"] == "failed")
    assert "a name that climbs out of its folder: 'llama-b10991/../../../../evil'" in engine(place)["message"]
    assert "climbs out of its folder" in place.ctl("nodes")
    assert "try: bring the release's own archive: llmgw.pyz ctl mirror import-engine" in place.ctl("engines")
    assert list(place.folder.rglob("evil")) == []
    assert not [item for item in (place.dir("node-1") / "engines").rglob("*") if item.is_file()]


def test_an_archive_that_rotted_in_the_mirror_is_refused_and_can_be_brought_again(place, llama_archive):
    place.ctl("mirror", "import-engine", llama_archive.path, "--sha256", llama_archive.sha256)
    until("the right archive is installed", lambda: engine(place)["phase"] == "installed")
    shutil.rmtree(place.dir("node-1") / "engines")
    blob = place.dir("server") / "mirror" / "blobs" / "sha256" / llama_archive.sha256
    rot(blob, 1000)
    restart_agent(place)
    until("it is refused", lambda: engine(place)["phase"] == "failed")
    assert f"expected {llama_archive.sha256}" in engine(place)["message"]
    again = place.ctl("mirror", "import-engine", llama_archive.path, "--sha256", llama_archive.sha256, ok=False)
    assert again.returncode == 0 and "what the server had of it was damaged, it is sent again" in again.stderr
    until("it is installed", lambda: engine(place)["phase"] == "installed")


def rot(path, at, count=64):
    """Change some bytes of a file and nothing else of it."""
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(bytes(count))


def restart_agent(place):
    place.children["node-1"].kill()
    place.children.pop("node-1").wait(30)
    place.start_agent()


def test_a_truncated_model_is_refused_before_it_is_sent(place, gemma):
    path = place.folder / "short.gguf"
    with open(gemma, "rb") as whole:
        path.write_bytes(whole.read(10 << 20))
    done = place.ctl("mirror", "import", path, "--name", MODEL, ok=False)
    assert done.returncode == 1 and f"llmgw: {path}: " in done.stderr and "the file is cut off" in done.stderr, done.stderr
    assert place.items("mirror", "list")["models"] == []
    path.write_bytes(b"<!doctype html><title>Not Found</title>")
    done = place.ctl("mirror", "import", path, "--name", MODEL, ok=False)
    assert done.returncode == 1 and "not a GGUF file: it starts with b'<!do'" in done.stderr
    place.ctl("mirror", "import", gemma, "--name", MODEL)
    place.wait_ready()


def test_a_blob_that_rotted_on_a_node_is_found_when_no_engine_can_load_it(place):
    blob, = blobs(place, "node-1")
    rot(blob, 0, 4096)                    # the header: no engine loads that
    for pid in engines(place):
        os.kill(pid, 9)
    until("it is found", lambda: logged(place, "node-1", "weights damaged on this disk"), 120)
    place.wait_ready()
    assert hashlib.sha256(blobs(place, "node-1")[0].read_bytes()).hexdigest() == blob.name
    assert len(logged(place, "node-1", "weights damaged on this disk")) == 1


def test_garbage_in_what_an_agent_knows_is_a_sentence_and_no_engine_notices(place):
    before, folder = engines(place), place.dir("node-1")
    place.children["node-1"].kill()
    place.children.pop("node-1").wait(30)
    state = folder / "state" / "desired.json"
    for path in (state, folder / "gate" / "table.json", next((folder / "shards").glob("*/state.json"))):
        path.write_bytes(b'{"epoch": 1, "desi\0\xff')
    place.start_agent()
    until("it is told", lambda: logged(place, "node-1", f"the last desired state cannot be read: {state}: not JSON"))
    until("it is mended", lambda: read(state).get("desired", {}).get("shards"))
    until("the node is ready", lambda: replica(place)["state"] == "ready")
    assert engines(place) == before and replica(place)["shards"][0]["observed"]["restarts"] == 0
    assert read(folder / "gate" / "table.json")["entries"]


def test_garbage_in_a_routers_table_is_a_sentence_and_it_learns_a_new_one(place):
    table = place.dir("router") / "table.json"
    until("the table is kept", table.exists)
    place.children["router"].kill()
    place.children.pop("router").wait(30)
    table.write_bytes(table.read_bytes()[:100])
    place.start_router()
    until("it is told", lambda: logged(place, "router", f"the kept table cannot be used: {table}: not JSON"))
    until("it has a new one", lambda: MODEL in [model["name"] for model in read(table).get("models", ())])


@pytest.mark.parametrize("make, says, advice", [
    (lambda path: path.write_bytes(b"garbage " * 4096), "llmgw.db: the database is damaged: ", "restore a backup"),
    (lambda path: path.write_bytes(path.read_bytes()[:5000] + b"\xff" * 9000), "the database is damaged: ", "restore"),
], ids=["garbage", "half of it"])
def test_a_damaged_database_is_a_sentence_and_its_backup_brings_everything_back(place, make, says, advice):
    place.ctl("backup", place.folder / "backup.db")
    keys = place.items("keys", "list")
    assert place.stop("server") == 0
    database = place.dir("server") / "llmgw.db"
    make(database)
    for name in ("llmgw.db-wal", "llmgw.db-shm"):
        (place.dir("server") / name).unlink(missing_ok=True)
    place.start("server", "server", "--config", place.config, "--data-dir", place.dir("server"))
    assert place.children.pop("server").wait(60) == 1
    sentence, hint = place.log("server").read_text().splitlines()[-2:]
    assert sentence.startswith("llmgw: ") and says in sentence and advice in hint, sentence
    for item in place.dir("server").glob("llmgw.db*"):
        item.unlink()
    place.start("restore", "server", "--restore", place.folder / "backup.db", "--data-dir", place.dir("server"))
    assert place.children.pop("restore").wait(60) == 0, place.log("restore").read_text()
    place.start("server", "server", "--config", place.config, "--data-dir", place.dir("server"),
                "--listen", place.server["url"].partition("://")[2])
    place.server = place.endpoint("server")
    assert place.items("keys", "list") == keys
    until("the replica is ready", lambda: [item["state"] for item in place.items("replicas")] == ["ready"], 90)
