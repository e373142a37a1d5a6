"""Weights from the gates of other nodes: with gates that do what a test says, and with three real agents."""
from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import time

import pytest

from llmgw.agent.board import Board, Desired
from llmgw.agent.fetch import Fetcher
from llmgw.agent.layout import Layout
from llmgw.agent.peers import Peers
from llmgw.api import paths, wire
from llmgw.api.client import ControlClient
from llmgw.domain.heartbeat import NodeDesired, Share
from llmgw.domain.model import CHUNK_BYTES, Weights, WeightsFile
from llmgw.domain.node import NodeIdentity
from llmgw.domain.secret import Secret
from llmgw.api.joining import kept
from llmgw.system import hashing
from llmgw.system.http_client import HttpClient
from llmgw.system.chunks import PEER_SECONDS
from llmgw.system.shares import PATIENCE_SECONDS
from tests.agent.conftest import free_block, wait_for
from tests.fakes.control_plane import TOKEN, shard_of, weights_of
from tests.fakes.peer_gate import PeerGate
from tests.server.running import RunningServer
from tests.server.test_joining import TlsServer

COUNT = 5
DATA = b"".join(number.to_bytes(8, "big") for number in range(((COUNT - 1) * CHUNK_BYTES + 800) // 8))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("source") / "m.gguf"
    path.write_bytes(DATA)
    return path, weights_of(path, "m")


class Fetching:
    """A node's fetcher without its process; ``gates`` are named b, c ..."""

    def __init__(self, plane, folder, file, *gates):
        path, self.weights = file
        plane.offer(weights=self.weights, path=path)
        self.plane, self.layout = plane, Layout(str(folder))
        self.board = Board(NodeIdentity("a", "0", "b"))
        self.client = ControlClient([plane.url], Secret(TOKEN))
        self.peers = Peers(self.board)
        self.fetcher = Fetcher(self.client, self.layout, self.peers.having, self.peers.share)
        self.digest = self.weights.files[0].sha256
        self.name(*gates)

    def name(self, *gates):
        self.board.put_desired(Desired(1, 1, NodeDesired(shards=(shard_of(self.weights),), peers=tuple(
            gate.peer(self.weights.fingerprint, name) for name, gate in zip("bcd", gates)))))

    def fetch(self):
        done = self.fetcher.fetch(self.weights, reserve_bytes=0, report=lambda done, speed: None, stopping=lambda: False)
        with open(self.layout.blob(self.digest), "rb") as blob:
            assert blob.read() == DATA
        assert os.listdir(os.path.dirname(self.layout.partial(self.digest))) == []
        return done

    def from_plane(self):
        """How many chunks were asked of the control plane."""
        return sum(-(-(int(last) - int(first) + 1) // CHUNK_BYTES) for first, last in (
            one.partition("bytes=")[2].split("-") for one in self.plane.ranges))


@pytest.fixture
def gates():
    made = []

    def start(*args, **more):
        made.append(PeerGate(DATA, *args, **more))
        return made[-1]
    yield start
    for gate in made:
        gate.close()


def test_a_peer_that_has_all_gives_all_but_the_chunk_that_tells_how_fast_the_mirror_is(plane, gates, tmp_path, file):
    gate = gates()
    node = Fetching(plane, tmp_path, file, gate)
    done = node.fetch()
    assert node.from_plane() == 1 and gate.sent_bytes >= len(DATA) - CHUNK_BYTES
    assert "MB from node b" in done.sources and "8.4 MB from the control plane" in done.sources and not done.problem
    assert node.client.close() is None


def test_two_peers_that_have_half_each_give_the_whole(plane, gates, tmp_path, file):
    first, second = gates(chunks="11000"), gates(chunks="00111")
    node = Fetching(plane, tmp_path, file, first, second)
    node.fetch()
    assert node.from_plane() == 1 and first.sent_bytes and second.sent_bytes


@pytest.mark.parametrize("fault", [
    "lies", "cuts", *(pytest.param(fault, marks=pytest.mark.slow) for fault in ("is busy", "is not there"))])
def test_a_bad_peer_costs_what_it_sent_and_the_mirror_gives_the_rest(plane, gates, tmp_path, file, fault, caplog):
    caplog.set_level("INFO")
    node = Fetching(plane, tmp_path, file, gates(fault))
    done = node.fetch()
    assert done.sources == f"{len(DATA) / 1e6:.1f} MB from the control plane"
    if fault == "lies":
        assert "came wrong from node b, and were fetched again" in done.problem
        assert "came wrong from node b: this chunk is fetched again" in caplog.text
    if fault != "is busy":
        assert node.peers.having(node.digest) == []                     # not asked again for a while
        assert "node b is not asked for weights for" in caplog.text
    else:
        assert node.peers.having(node.digest)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["hangs", "drips", "drips its head", "refuses"])
def test_a_peer_that_is_slow_or_silent_costs_a_bounded_time(plane, gates, tmp_path, file, fault):
    node = Fetching(plane, tmp_path, file, gates(fault))
    began = time.monotonic()
    done = node.fetch()
    assert done.sources == f"{len(DATA) / 1e6:.1f} MB from the control plane" and not done.problem
    assert time.monotonic() - began < PEER_SECONDS + PATIENCE_SECONDS + 60
    assert node.peers.having(node.digest) == []


def test_a_peer_that_lies_does_not_spoil_what_another_gives(plane, gates, tmp_path, file):
    honest = gates()
    node = Fetching(plane, tmp_path, file, gates("lies"), honest)
    done = node.fetch()
    assert honest.sent_bytes and "MB from node c" in done.sources
    assert [one.name for one in node.peers.having(node.digest)] == ["node c"]


def test_a_peer_whose_gate_cannot_be_trusted_is_not_asked(plane, gates, tmp_path, file):
    node = Fetching(plane, tmp_path, file)
    peer = gates().peer(node.weights.fingerprint)
    for bad in (dataclasses.replace(peer, host="10.1.2.3"), dataclasses.replace(peer, tls_name="x.gate.llmgw")):
        node.board.put_desired(Desired(1, 2, NodeDesired(shards=(shard_of(node.weights),), peers=(bad,))))
        assert node.peers.having(node.digest) == []


def test_a_node_begins_with_the_part_that_it_was_told_and_else_at_the_beginning(plane, tmp_path, file):
    node = Fetching(plane, tmp_path, file)
    assert node.peers.share(node.digest) == (0, 1)
    for told, place in ((Share(node.weights.fingerprint, 2, 3), (2, 3)), (Share("another", 2, 3), (0, 1)),
                        (Share(node.weights.fingerprint, 3, 3), (0, 1)), (Share(node.weights.fingerprint, 0, 0), (0, 1))):
        node.board.put_desired(Desired(1, 2, NodeDesired(shards=(shard_of(node.weights),), shares=(told,))))
        assert node.peers.share(node.digest) == place


def test_what_it_fetches_is_told_beside_the_partial_file_and_nothing_of_a_kill_is_told(plane, gates, tmp_path, file):
    node = Fetching(plane, tmp_path, file)
    partial = node.layout.partial(node.digest)
    os.makedirs(os.path.dirname(partial))
    with open(partial, "wb") as out:
        out.write(DATA[:CHUNK_BYTES] + b"\0" * CHUNK_BYTES)             # the second is not what it should be
    with open(partial + ".have", "wb") as out:
        out.write(b"%016d\n11111" % len(DATA))                          # a lie of before a crash
    plane.cut_after = 10
    with pytest.raises(Exception, match="ended"):
        node.fetch()
    with open(partial + ".have", "rb") as told:
        assert told.read()[:-1] == b"%016d\n1000" % len(DATA)             # the last is short, and may have come


# Three agents and a server.

MODEL = """
  - {name: on-%s, engine: llama.cpp, weights: "mirror:m", context_length: 2048, placement: {nodes: [%s]}}"""
ENGINE = """#!/bin/sh
case "$1" in
  --version) echo "version: 0.4.1-dev (build 10991, commit abc)" >&2; exit 0;;
  --list-devices) echo "Available devices:"; echo "  (none)"; exit 0;;
  --help) cat %s; exit 0;;
esac
exec sleep 1000
"""


class Agents:
    """A real server with a file of many chunks, and agents whose engine is a stand-in that serves nothing."""

    def __init__(self, folder, chunks, names="abc", kind=RunningServer, more=""):
        self.folder, self.running = folder, {}
        self.ports = free_block(40)
        (folder / "server").mkdir()
        config = "cluster: test\nengines:\n  llama.cpp: {version: b10991}\nmodels:" + "".join(
            MODEL % (name, name) for name in names) + "\n" + more
        self.server = kind(folder / "server", config).start()
        source = folder / "source"
        block = bytes(range(256)) * 4096
        with open(source, "wb") as out:
            for number in range(8 * chunks):
                out.write(number.to_bytes(8, "big") + block[8:])
        digest, parts, size = hashing.hash_file(str(source))
        os.link(source, self.server.data / "mirror" / "blobs" / "sha256" / digest)
        self.weights = self.server.client().call(
            "PUT", paths.fill(paths.MIRROR_MODEL, model="m"), send=wire.WEIGHTS, receive=wire.WEIGHTS, timeout=600,
            value=Weights("m", "", (WeightsFile("m.bin", size, digest, parts),), format="raw"))
        engine = folder / "llama-server"
        engine.write_text(ENGINE % (os.path.abspath("tests/data/llamacpp/help-b10991.txt")))
        engine.chmod(0o755)
        folder.chmod(0o755)
        self.config = folder / "agent.yaml"
        self.config.write_text(f"engines:\n  llama.cpp: {{binary: {engine}}}\n")

    def start(self, *names, **environment):
        for name in names:
            port = self.ports + 12 * "abc".index(name)
            with open(self.folder / f"{name}.log", "ab") as log:
                self.running[name] = subprocess.Popen(
                    [sys.executable, "-m", "llmgw", "--debug", "agent", "--config", str(self.config), "--server",
                     self.server.url, *self._trusted(name), "--node", name, "--data-dir", str(self.folder / name),
                     "--gate-port", str(port), "--engine-ports", str(port + 1), "--owned"], stdout=log, stderr=log, env={**os.environ, **environment})

    def _trusted(self, name):
        """Return the words with which an agent is let in: the shared token, or a join string over TLS."""
        if isinstance(self.server, TlsServer):
            string = self.folder / f"{name}.join"
            if not string.exists():
                string.write_text(self.server.make()[1])
            return "--join-file", str(string)
        return "--token-file", str(self.server.data / "tokens" / "node")

    def layout(self, name):
        return Layout(str(self.folder / name))

    def whole(self, *names, seconds=180):
        def here():
            return all(os.path.exists(self.layout(name).blob(self.weights.files[0].sha256)) for name in names)
        wait_for(here, seconds, f"the weights on {names}: {[self.log(name)[-1500:] for name in names]}")

    def log(self, name):
        return (self.folder / f"{name}.log").read_text()

    def ends(self, name):
        """Return the line that an agent logs when its weights are whole."""
        return wait_for(lambda: self.log(name).partition("weights whole")[2].partition("\n")[0], what="the line of the end")

    def sent(self):
        """How many times over the control plane has sent the file."""
        page = self.server.client().request("GET", paths.METRICS).body.decode()
        line = next(line for line in page.splitlines() if line.startswith("llmgw_mirror_sent_bytes_total "))
        return float(line.split()[1]) / self.weights.size_bytes

    def close(self):
        for child in self.running.values():
            child.terminate()
        for child in self.running.values():
            child.wait(90)
        self.server.stop()


@pytest.fixture
def agents(tmp_path):
    made = []

    def start(chunks, **more):
        made.append(Agents(tmp_path, chunks, **more))
        return made[-1]
    yield start
    for one in made:
        one.close()


@pytest.mark.slow
def test_of_three_stand_in_nodes_that_begin_at_once_the_mirror_sends_each_byte_about_once(agents):
    fleet = agents(24, more="mirror: {megabytes_per_second: 8}\n")      # it lasts far longer than learning of each other
    fleet.start(*"abc")
    fleet.whole(*"abc")
    assert fleet.sent() <= 1.5, [fleet.ends(name) for name in "abc"]
    assert sum("MB from node" in fleet.ends(name) for name in "abc") >= 2


@pytest.mark.slow
def test_a_node_gets_from_another_what_is_damaged_in_the_mirror(agents):
    fleet = agents(6, names="ab")
    fleet.start("a")
    fleet.whole("a")
    digest = fleet.weights.files[0].sha256
    with open(fleet.server.data / "mirror" / "blobs" / "sha256" / digest, "r+b") as blob:
        for at in range(0, fleet.weights.size_bytes, CHUNK_BYTES):
            blob.seek(at)
            blob.write(b"damaged")
    fleet.start("b")
    fleet.whole("b")
    assert hashing.hash_file(fleet.layout("b").blob(digest))[0] == digest
    assert "came wrong from the control plane" in fleet.log("b")
    assert f"{fleet.weights.size_bytes / 1e6:.1f} MB from node a" in fleet.ends("b")


@pytest.mark.slow
def test_stand_in_nodes_that_joined_speak_tls_a_killed_one_goes_on_and_a_revoked_one_is_refused(agents):
    fleet = agents(12, names="ab", kind=TlsServer)
    fleet.start("a")
    fleet.whole("a")
    fleet.start("b", LLMGW_FAILPOINT="fetch-in-the-middle:kill@5")
    assert fleet.running["b"].wait(180) == -9
    fleet.start("b")
    fleet.whole("b")
    came = {name: float(count) for count, name in re.findall(r"([0-9.]+) MB from ([a-z ]+)", fleet.ends("b"))}
    assert set(came) == {"node a", "the control plane"}
    assert sum(came.values()) * 1e6 <= fleet.weights.size_bytes - 2 * CHUNK_BYTES      # of before the kill
    assert fleet.sent() <= 1.4

    held = kept(fleet.layout("b").credential)
    with open(fleet.layout("b").desired, "rb") as file:
        (peer,) = wire.loads(wire.HEARTBEAT_ANSWER, file.read(), "desired").desired.peers
    gate = HttpClient(f"https://{peer.host}:{peer.port}", ca_pem=held.fleet_ca, server_name=peer.tls_name)

    def status():
        digest = fleet.weights.files[0].sha256
        return gate.request("GET", paths.fill(paths.PEER_BLOB, digest=digest), headers={
            "Authorization": f"Bearer {peer.key.reveal()}", "Range": "bytes=0-99"}).status
    assert status() == 206
    fleet.server.client().json("POST", paths.fill(paths.REVOKE_NODE, node="b"), {})
    wait_for(lambda: status() == 401, what="the end of the revoked node's key at the other's gate")
    gate.close()
