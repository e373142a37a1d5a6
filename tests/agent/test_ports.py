"""Ports of a shard: all of them from the agent's block, each tested, held until the shard has ended."""
from __future__ import annotations

import dataclasses
import socket

import pytest

from llmgw.agent.board import Usable
from llmgw.agent.engine_user import EngineUser
from llmgw.agent.layout import Layout
from llmgw.agent.ports import Ports
from llmgw.agent.prepare import next_row, prepared
from llmgw.agent.shard_row import ShardRow, read, write
from llmgw.domain.errors import PortTaken
from llmgw.domain.model import ModelSpec, Weights, WeightsFile
from llmgw.domain.replica import Gang, GpuSlot, ShardWanted
from llmgw.domain.secret import Secret
from llmgw.engines import registry
from tests.agent.conftest import free_block


def wanted(engine, rank=0, gang=True, mode="mp", gpus=2):
    spec = ModelSpec("m", engine, "mirror:m", nodes=2 if gang else 1, gpus=gpus, launch_mode=mode)
    return ShardWanted(f"m-1.{rank}", "m-1", rank, spec, "1", Weights("m", "f" * 64, (WeightsFile("config.json", 1, "a" * 64),)), Secret("k"),
                       tuple(GpuSlot(f"GPU-{number}", number) for number in range(gpus)),
                       Gang(2, 1, f"127.0.0.{rank + 1}", "127.0.0.1", 7901) if gang else None)


@pytest.mark.parametrize("engine, rank, gang, mode, meets, inner", [
    ("llama.cpp", 0, False, "mp", False, 0), ("vllm", 0, False, "mp", False, 1), ("vllm", 0, True, "mp", True, 0), ("vllm", 1, True, "mp", False, 0),
    ("vllm", 0, True, "ray", True, 22), ("vllm", 1, True, "ray", False, 18), ("sglang", 0, False, "mp", False, 1), ("sglang", 1, True, "mp", False, 1)])
def test_a_start_takes_what_its_engine_needs_from_the_block_and_steps_over_what_is_taken(engine, rank, gang, mode, meets, inner):
    first = free_block(30)
    ports, shard = Ports(first, 30), wanted(engine, rank, gang, mode)
    with socket.socket() as stranger:
        stranger.bind((shard.gang.address if gang else "127.0.0.1", first + 1))
        stranger.listen(1)
        row = next_row(ShardRow(shard.id, incarnation=4, meet_port=1, inner_ports=(2,)), shard, registry.get(engine), ports)
    assert row.incarnation == 5 and bool(row.meet_port) is meets and len(row.inner_ports) == inner
    assert len(set(row.ports)) == len(row.ports) == 1 + meets + inner
    assert set(row.ports) <= set(range(first, first + 30)) - {first + 1}
    rest = Ports.take_all(ports, 30 - 1 - len(row.ports))
    assert not set(rest) & set(row.ports)


@pytest.mark.parametrize("gang", [False, True])
def test_its_programs_are_told_of_their_ports_their_interface_and_a_meeting_place_that_is_new(tmp_path, gang):
    layout, shard = Layout(str(tmp_path)), wanted("sglang", gang=gang)
    stale = tmp_path / "shards" / "m-1.0" / "work" / "meet"
    stale.parent.mkdir(parents=True)
    stale.write_text("of a run that was killed")
    row = ShardRow("m-1.0", 1, 7900, meet_port=7901 if gang else 0, inner_ports=(7902,))
    (program,) = prepared(shard, registry.get("sglang"), Usable("/e/bin/python"), row, layout, EngineUser("root", layout, print))
    assert "--nccl-port 7902" in " ".join(program.command.argv) and not stale.exists()
    assert program.command.env["GLOO_SOCKET_IFNAME"] == "lo"
    assert program.command.env.get("SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE") == (None if gang else f"file://{stale}")
    assert ("--dist-init-addr 127.0.0.1:7901" in " ".join(program.command.argv)) is gang


def test_too_few_ports_give_back_those_that_there_were():
    first = free_block(8)
    ports = Ports(first, 8)
    with pytest.raises(PortTaken, match=f"no free port from {first} to {first + 7}"):
        next_row(ShardRow("m-1.0"), wanted("vllm", mode="ray"), registry.get("vllm"), ports)
    assert len(ports.take_all(8)) == 8


def test_a_shard_is_found_again_with_all_its_ports(tmp_path):
    row = ShardRow("m-1.0", 1, 7900, meet_port=7901, inner_ports=(7902, 7903))
    write(str(tmp_path), row)
    assert read(str(tmp_path), "m-1.0") == row and row.ports == (7900, 7901, 7902, 7903) and row.inner == (7901, 7902, 7903)
    assert dataclasses.replace(row, port=None, meet_port=0).ports == (7902, 7903)
