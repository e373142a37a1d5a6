"""What a real server tells nodes of each other, so that they may give each other weights."""
from __future__ import annotations

import contextlib
import hashlib

import pytest

from llmgw.api import paths
from llmgw.domain.errors import ApiError
from tests.server.running import StandInNode, until
from tests.server.test_joining import TlsServer

MODEL = """
  - {name: on-%s, engine: llama.cpp, weights: "mirror:m", context_length: 2048, placement: {nodes: [%s]}}"""
CONFIG = """
cluster: test
engines:
  llama.cpp: {version: b10991}
models:""" + MODEL % ("a", "a") + MODEL % ("b", "b") + "\n"


@pytest.fixture
def server(tmp_path):
    running = TlsServer(tmp_path, CONFIG).start()
    running.import_model()
    yield running
    running.stop()


def joined(server, folder, name):
    _, text = server.make()
    held = server.join(folder, text, name)
    node = StandInNode(server, held.name)
    node.client = server.client(token=held.token)
    return node, held


def keys(node):
    """Return {peer: sha256 of the key for it}, and {reader: sha256 of its key}."""
    wanted = node.desired
    return ({peer.node: hashlib.sha256(peer.key.reveal().encode()).hexdigest() for peer in wanted.peers},
            {door.node: door.key_sha256 for door in wanted.readers}) if wanted else ({}, {})


def told(nodes, condition, what):
    def beat():
        for node in nodes:
            with contextlib.suppress(ApiError):
                node.beat()
        return condition()
    return until(beat, what)


def test_two_nodes_get_keys_for_each_other_that_a_restart_keeps_and_a_revocation_ends(server, tmp_path):
    (a, held), (b, other) = joined(server, tmp_path / "a", "a"), joined(server, tmp_path / "b", "b")

    def is_told():
        (ours, to_us), (theirs, to_them) = keys(a), keys(b)
        return set(ours) == {"b"} and set(theirs) == {"a"} and (ours["b"], theirs["a"]) == (to_them["a"], to_us["b"])
    told([a, b], is_told, "their keys")
    peer = a.desired.peers[0]
    assert (peer.host, peer.port, peer.tls_name) == ("127.0.0.1", 7802, other.tls_name)
    assert peer.fingerprints == (a.desired.shards[0].weights.fingerprint,)
    assert keys(a)[0] != keys(b)[0] and "llmgw_peer_" not in repr(a.desired)
    before, epoch = (keys(a), keys(b)), a.observed.epoch
    server.stop()
    server.start()
    for node, credential in ((a, held), (b, other)):
        node.client = server.client(token=credential.token)
    told([a, b], lambda: min(a.observed.epoch, b.observed.epoch) > epoch and is_told(), "the same after a restart")
    assert (keys(a), keys(b)) == before

    server.client().json("POST", paths.fill(paths.REVOKE_NODE, node="a"), {})
    told([b], lambda: keys(b) == ({}, {}), "the end of the revoked node's key")
    again, _ = joined(server, tmp_path / "again", "a")
    assert again.name == "a"
    told([again, b], lambda: keys(b)[1].get("a") and keys(again)[0].get("b"), "keys of the node that joined anew")
    assert keys(again)[0]["b"] == keys(b)[1]["a"] != before[0][0]["b"]      # the revoked one still knows that
