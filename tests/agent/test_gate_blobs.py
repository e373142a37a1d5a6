"""What other nodes may read through the gate, and what not: the gate as a process, on real sockets."""
from __future__ import annotations

import hashlib
import os

import pytest

from llmgw.agent.gate_blobs import MOST_READERS
from llmgw.agent.layout import Layout
from llmgw.api import paths, wire
from llmgw.domain.gate import GateTable, PeerDoor
from llmgw.domain.model import CHUNK_BYTES
from llmgw.system import files
from llmgw.system.have import Have
from llmgw.system.shares import COMING as COMING_HERE
from tests.agent.test_gate import KEY, GateProcess, entry, sha256
from tests.fakes.raw_client import RawClient, ask, request
from tests.fakes.upstream import Upstream, wait_for

PEER_KEY = "peer-key-of-node-b"
DATA = b"".join(number.to_bytes(8, "big") for number in range((2 * CHUNK_BYTES + 1000) // 8))
DIGEST = hashlib.sha256(DATA).hexdigest()
COMING = "c" * 64


class PeerGate(GateProcess):
    """A gate whose data folder holds one blob whole, and of another the middle one of three chunks."""

    def __init__(self, folder, *entries):
        self.peers = (PeerDoor("b", sha256(PEER_KEY)),)
        self.root = folder / "data"
        layout = self.layout = Layout(str(self.root))
        for path in (layout.blob(DIGEST), layout.partial(COMING)):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as out:
                out.write(DATA[:2 * CHUNK_BYTES] if path == layout.partial(COMING) else DATA)
        coming = Have(layout.partial(COMING), len(DATA))
        coming.mark([1])
        coming.mark([2], COMING_HERE)
        coming.close()
        super().__init__(folder, *entries)

    def write(self, *entries):
        files.write_atomic(self.path, wire.dumps(wire.GATE_TABLE, GateTable(
            "127.0.0.1", self.port, entries, root=str(self.root), peers=self.peers)))

    def get(self, digest=DIGEST, span="", key=PEER_KEY, pattern=paths.PEER_BLOB):
        path = pattern.replace("{digest}", digest)
        return ask(self.port, "GET", path, b"", key, [f"Range: bytes={span}"] if span else [])


@pytest.fixture(scope="module")
def gate(tmp_path_factory):
    with Upstream() as engine:
        door = PeerGate(tmp_path_factory.mktemp("gate"), entry(engine.port))
        door.engine = engine
        yield door
        door.stop()


def test_a_node_with_a_key_reads_ranges_of_a_blob(gate):
    first = CHUNK_BYTES - 10
    answer = gate.get(span=f"{first}-{first + 19}")
    assert answer.status == 206 and answer.body == DATA[first:first + 20]
    assert answer.headers["content-range"] == f"bytes {first}-{first + 19}/{len(DATA)}"
    whole = gate.get()
    assert whole.status == 200 and whole.body == DATA
    assert gate.get(pattern=paths.PEER_CHUNKS).json == {"chunks": "111"}
    assert gate.get(span=f"{len(DATA)}-").status == 416


def test_of_a_blob_that_still_comes_only_proven_chunks_are_read(gate):
    assert gate.get(COMING, pattern=paths.PEER_CHUNKS).json == {"chunks": "012"}
    answer = gate.get(COMING, f"{CHUNK_BYTES}-{2 * CHUNK_BYTES - 1}")
    assert answer.status == 206 and answer.body == DATA[CHUNK_BYTES:2 * CHUNK_BYTES]
    assert answer.headers["content-range"].endswith(f"/{len(DATA)}")
    for span in (f"0-{CHUNK_BYTES}", f"{CHUNK_BYTES}-{2 * CHUNK_BYTES}", ""):
        assert gate.get(COMING, span).status == 404
    assert gate.get("d" * 64).status == 404
    assert gate.get("d" * 64, pattern=paths.PEER_CHUNKS).json == {"chunks": ""}


@pytest.mark.parametrize("key", [None, "wrong", KEY, sha256(PEER_KEY)])
@pytest.mark.parametrize("pattern", [paths.PEER_BLOB, paths.PEER_CHUNKS])
def test_nobody_else_reads_a_blob(gate, key, pattern):
    answer = gate.get(key=key, pattern=pattern)
    assert answer.status in (401, 429) and b"chunks" not in answer.body


def test_a_peers_key_opens_no_engine(gate):
    answer = ask(gate.port, "POST", "/v1/chat/completions", b"{}", PEER_KEY)
    assert answer.status in (401, 429) and not gate.engine.requests


@pytest.mark.parametrize("path", [
    "/peer/blobs/../../state/desired.json", "/peer/blobs/%2e%2e%2f%2e%2e%2fstate%2fdesired.json", "/peer/blobs/",
    "/peer/blobs/" + DIGEST.upper(), f"/peer/blobs/sha256:{DIGEST}", f"/peer/blobs/{DIGEST}/../x", f"/peer/blobs/{DIGEST}?x",
    f"/peer/blobs//{DIGEST}", f"/peer/blobs/{DIGEST}/chunks/", f"/peer/blobs/{'0' * 63}\u00e9"])
def test_no_other_path_reaches_the_disk(gate, path):
    assert ask(gate.port, "GET", path, b"", PEER_KEY).status in (400, 404)


def test_what_is_no_plain_file_is_not_read(gate, tmp_path):
    (tmp_path / "secret").write_bytes(b"secret")
    for digest, make in (("a" * 64, lambda path: os.symlink(tmp_path / "secret", path)), ("b" * 64, os.mkdir),
                         ("e" * 64, os.mkfifo)):
        make(gate.layout.blob(digest))
        answer = gate.get(digest)
        assert answer.status in (404, 500) and b"secret" not in answer.body
        assert gate.get(digest, pattern=paths.PEER_CHUNKS).json == {"chunks": ""}


def test_a_few_read_at_once_and_the_engine_is_asked_meanwhile(gate):
    question = request("GET", paths.PEER_BLOB.replace("{digest}", DIGEST), b"", PEER_KEY)
    readers = [RawClient(gate.port) for _ in range(MOST_READERS)]
    try:
        for reader in readers:
            reader.send(question)
            reader.until(b"\r\n\r\n")                       # and takes no more of its answer
        busy = gate.get()
        assert busy.status == 503 and busy.headers["retry-after"] == "1"
        assert ask(gate.port, "POST", "/v1/chat/completions", b'{"model": "m", "messages": []}', KEY).status == 200
        assert gate.get(pattern=paths.PEER_CHUNKS).status == 200
    finally:
        for reader in readers:
            reader.sock.close()
    wait_for(lambda: gate.get().status == 200, what="a place for another reader")


def test_a_node_that_is_taken_out_of_the_table_is_refused_at_once(tmp_path):
    door = PeerGate(tmp_path)
    try:
        assert door.get(span="0-9").status == 206
        door.peers = ()
        door.take()
        assert door.get(span="0-9").status == 401
    finally:
        door.stop()
