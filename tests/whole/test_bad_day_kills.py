"""kill -9 between any two steps: of a control plane that starts and takes files in, and of a node from archive to engine."""
from __future__ import annotations

import hashlib
import os

import pytest

from tests.whole.bad_day import NOWHERE
from tests.whole.cluster import MODEL, Cluster, until

pytestmark = pytest.mark.slow
AT_START = ("store-before-schema:kill", "token-file-before-store:kill@1", "token-file-before-store:kill@3",
            "write-atomic-before-rename:kill@2", "store-before-commit:kill@1", "store-after-commit:kill@2")
AT_IMPORT = ("upload-after-write:kill@2", "blob-before-rename:kill", "store-before-commit:kill@5",
             "store-after-commit:kill@5")
# in the order in which a node comes to them: each is reached by going on where the one before died
OF_A_NODE = ("fetch-before-rename", "fetch-after-rename", "unpack-before-links", "install-unpacked",
             "install-before-rename", "install-after-rename", "fetch-in-the-middle", "fetch-before-rename",
             "fetch-after-rename", "weights-after-blob", "weights-before-marker", "weights-after-marker",
             "shard-before-exec", "spawn-after-exec")


@pytest.fixture
def place(pyz, qa_template, tmp_path):
    made = Cluster(pyz, tmp_path, qa_template)
    made.env["LLMGW_GITHUB_API"] = NOWHERE
    yield made
    made.close()


def start_server_to_die(place, failpoint):
    """Start a server that kills itself at ``failpoint``."""
    place.env["LLMGW_FAILPOINT"] = failpoint
    child = place.start("server", "server", "--config", place.config, "--data-dir", place.dir("server"))
    del place.env["LLMGW_FAILPOINT"]
    return child


@pytest.mark.parametrize("failpoint", AT_START)
def test_a_server_killed_while_it_starts_for_the_first_time_starts_the_next_time(place, failpoint):
    child = start_server_to_die(place, failpoint)
    assert child.wait(30) == -9, place.log("server").read_text()
    place.start_server()
    assert place.items("keys", "list") == []
    key = place.ctl("keys", "create", "somebody").strip()
    assert key.startswith("llmgw_infer_") and key not in (place.dir("server") / "llmgw.db").read_bytes().decode("latin-1")
    assert not list(place.dir("server").rglob("*.tmp"))
    assert "Traceback" not in place.log("server").read_text()


@pytest.mark.parametrize("failpoint", AT_IMPORT)
def test_a_server_killed_within_an_import_takes_it_up_where_it_was(place, failpoint):
    place.start_server()                  # makes its database and tokens
    place.stop("server")
    path = place.folder / "weights.bin"
    path.write_bytes(os.urandom(20 << 20))
    child = start_server_to_die(place, failpoint)
    place.server = place.endpoint("server")
    done = place.ctl("mirror", "import", path, "--raw", "--name", "m", ok=False)
    assert child.wait(60) == -9, (done, place.log("server").read_text())
    place.start_server()
    again = place.ctl("mirror", "import", path, "--raw", "--name", "m", ok=False)
    assert again.returncode == 0, done.stderr + again.stderr
    held, = place.items("mirror", "list")["models"]
    blob = place.dir("server") / "mirror" / "blobs" / "sha256" / hashlib.sha256(path.read_bytes()).hexdigest()
    assert held["files"][0]["sha256"] == blob.name and blob.read_bytes() == path.read_bytes()
    assert not list((place.dir("server") / "mirror" / "uploads").iterdir())
    if failpoint.startswith("upload"):
        assert "goes on at" in again.stderr


def test_a_node_killed_between_every_two_steps_in_turn_still_gets_there(place, llama_archive, gemma):
    place.start_server()
    place.start_router()
    place.ctl("mirror", "import-engine", llama_archive.path, "--sha256", llama_archive.sha256)
    place.ctl("mirror", "import", gemma, "--name", MODEL)
    folder, died = place.dir("node-1"), []
    for failpoint in OF_A_NODE:
        place.env["LLMGW_FAILPOINT"] = f"{failpoint}:kill"
        place.start_agent()
        until(f"it dies at {failpoint}", lambda: place.children["node-1"].poll(), 90)
        assert place.children.pop("node-1").returncode == -9, place.log("node-1").read_text()[-3000:]
        died.append(failpoint)
    del place.env["LLMGW_FAILPOINT"]
    place.start_agent()
    place.wait_ready()
    engines = [words for words in place.left().values() if "llama-server" in words and "--port" in words]
    assert len(engines) == 1 and died == list(OF_A_NODE)
    assert os.listdir(folder / "engines" / "llama.cpp") == ["b10991"]
    until("nothing is left on the way", lambda: not list((folder / "blobs" / "partial").iterdir()))
    blob, = (folder / "blobs" / "sha256").iterdir()
    assert hashlib.sha256(blob.read_bytes()).hexdigest() == blob.name
    assert not [path for path in folder.rglob("*") if path.name.endswith((".tmp", ".scratch", ".part"))]
    assert place.items("replicas")[0]["shards"][0]["observed"]["first_failure"] is None
