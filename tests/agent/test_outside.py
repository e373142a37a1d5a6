"""An engine that listens where other machines reach it is found out."""
from __future__ import annotations

import dataclasses
import os
import socket
import sys

import pytest

from llmgw.agent.board import Board
from llmgw.agent.engine_user import EngineUser
from llmgw.agent.layout import Layout
from llmgw.agent.ports import Ports
from llmgw.agent.readiness import MayListen, Proof, listens_outside
from llmgw.agent.shard import ShardKeeper
from llmgw.agent.shard_row import ShardRow, write
from llmgw.domain.command import Command
from llmgw.domain.model import ModelSpec, Weights, WeightsFile
from llmgw.domain.node import NodeIdentity
from llmgw.domain.replica import Gang, ShardWanted
from llmgw.domain.secret import Secret
from llmgw.engines import registry
from llmgw.system import addresses, spawn
from llmgw.system.clock import Clock
from tests.agent.conftest import wait_for

LISTEN = """
import socket, sys, time, subprocess
sockets = []
for host in sys.argv[1:]:
    sockets.append(socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, dualstack_ipv6="ffff" in host))
print("listens", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("hosts, outside", [(["127.0.0.1"], []), (["0.0.0.0"], ["0.0.0.0"]), (["127.0.0.1", "0.0.0.0"], ["0.0.0.0"]),
                                            (["::"], ["::"])])
def test_what_a_program_and_its_children_open_to_others_is_found(tmp_path, hosts, outside):
    marker = ("LLMGW_TEST_MARK", str(tmp_path))
    identity = spawn.start(Command((sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])", sys.executable,
                                    "-c", LISTEN, *hosts), env={"PATH": "/usr/bin:/bin"}), marker, str(tmp_path / "log"))
    try:
        wait_for(lambda: (tmp_path / "log").read_text(), what="it listens")
        assert "listens" in (tmp_path / "log").read_text() or pytest.skip("no IPv6 here")
        assert [where.split()[0] for where in listens_outside(identity)] == outside
        assert listens_outside(identity, MayListen(tuple(outside))) == ()
        ports = tuple(int(where.split()[-1]) for where in listens_outside(identity))
        assert listens_outside(identity, MayListen(ports=ports)) == listens_outside(identity, MayListen(more_ports=1)) == ()
    finally:
        assert spawn.stop(marker, grace_seconds=2.0) == []
        spawn.forget(identity.pid)


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_an_ipv4_address_that_ipv6_wraps_is_that_address(tmp_path):
    marker, own = ("LLMGW_TEST_MARK", str(tmp_path)), next((one for one in addresses.own_addresses() if ":" not in one), "")
    if not own:
        pytest.skip("this machine has no address but loopback")
    identity = spawn.start(Command((sys.executable, "-c", LISTEN, f"::ffff:{own}"), env={"PATH": "/usr/bin:/bin"}), marker, str(tmp_path / "log"))
    try:
        wait_for(lambda: (tmp_path / "log").read_text(), what="it listens")
        assert "listens" in (tmp_path / "log").read_text() or pytest.skip("no IPv6 here")
        assert len(listens_outside(identity)) == 1 and listens_outside(identity, MayListen((own,))) == ()
    finally:
        assert spawn.stop(marker, grace_seconds=2.0) == []
        spawn.forget(identity.pid)


def test_one_port_more_than_may_be_open_shows_all_of_them(tmp_path):
    marker = ("LLMGW_TEST_MARK", str(tmp_path))
    identity = spawn.start(Command((sys.executable, "-c", LISTEN, "0.0.0.0", "0.0.0.0"), env={"PATH": "/usr/bin:/bin"}), marker, str(tmp_path / "log"))
    try:
        wait_for(lambda: (tmp_path / "log").read_text(), what="it listens")
        assert len(listens_outside(identity, MayListen(more_ports=1))) == 2
        assert listens_outside(identity, MayListen(more_ports=2)) == ()
    finally:
        assert spawn.stop(marker, grace_seconds=2.0) == []
        spawn.forget(identity.pid)


@pytest.mark.parametrize("name", sorted(registry.ENGINES))
def test_the_gate_lets_nothing_in_that_changes_or_opens_an_engine(name):
    allowed = registry.get(name).allowed_paths
    assert ("POST", "/v1/chat/completions") in allowed and ("GET", "/v1/models") in allowed
    for path in ("/invocations", "/tokenize", "/detokenize", "/pause", "/resume", "/sleep", "/wake_up", "/update_weights", "/update_weights_from_disk",
                 "/release_memory", "/flush_cache", "/reset_prefix_cache", "/collective_rpc", "/v1/load_lora_adapter", "/props", "/slots",
                 "/start_profile", "/docs", "/openapi.json", "/server_info", "/generate", "/abort_request", "/scale_elastic_ep"):
        assert ("POST", path) not in allowed, path
    assert all(path.startswith("/v1/") for method, path in allowed if method == "POST")


@pytest.mark.parametrize("gang_host, proof", [("127.0.0.1", Proof.READY), ("0.0.0.0", Proof.WRONG)])
def test_a_rank_that_does_not_serve_is_looked_at_too_once_rank_0_has_answered(tmp_path, gang_host, proof):
    """As a shard's keeper asks, with a program that listens there."""
    layout = Layout(str(tmp_path / "data"))
    weights = Weights("m", "f" * 64, (WeightsFile("a.gguf", 1, "a" * 64),))
    wanted = ShardWanted("m-1.1", "m-1", 1, ModelSpec("m", "vllm", "mirror:m", nodes=2), "1", weights, Secret("k" * 20),
                         gang=Gang(2, 1, "127.0.0.1", "127.0.0.1", 7901, lead_ready=True))
    board = Board(NodeIdentity("n1", "1", "boot", "127.0.0.1", 0, {}))
    folder = layout.shard("m-1.1")
    os.makedirs(folder)
    row = ShardRow("m-1.1", 1, 7900, turn=1)
    marker = row.marker(folder)
    identity = spawn.start(Command((sys.executable, "-c", LISTEN, gang_host), env={"PATH": "/usr/bin:/bin"}), marker, str(tmp_path / "log"))
    try:
        wait_for(lambda: (tmp_path / "log").read_text(), what="it listens")
        write(folder, dataclasses.replace(row, identity=identity))
        keeper = ShardKeeper(wanted, board, layout, Ports(7900), Clock(), EngineUser("root", layout, print))
        keeper.adopt()
        keeper.turn()
        (seen,) = board.observed(0.0).shards
        assert (seen.reason == "Ready") is (proof is Proof.READY)
        assert proof is Proof.READY or (seen.reason == "ListensOutside" and "lets other machines in: it listens on 0.0.0.0" in seen.message)
    finally:
        assert spawn.stop(marker, grace_seconds=2.0) == []
        spawn.forget(identity.pid)
