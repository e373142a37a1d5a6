"""The programs of a replica over several nodes: which, in which order, and what they are told of each other."""
from __future__ import annotations

import dataclasses

import pytest

from llmgw.domain.model import ModelSpec, Weights, WeightsFile
from llmgw.domain.replica import Gang, GpuSlot, ShardWanted
from llmgw.domain.secret import Secret
from llmgw.engines import registry
from llmgw.engines.base import Place

KEY = "replica-key-of-a-gang-0123456789"
PLACE = Place("/e/bin/python", (), "/m/tiny", "/w", "/w/key", "", 7903)
GANG = Gang(2, 3, "10.0.0.2", "10.0.0.1", 7901)


def programs(engine, rank, gpus=2, mode="mp"):
    slots = tuple(GpuSlot(f"GPU-{number}", number) for number in range(gpus))
    gang = dataclasses.replace(GANG, address=f"10.0.0.{rank + 1}")
    spec = ModelSpec("tiny", engine, "mirror:tiny", nodes=2, gpus=gpus, launch_mode=mode, args=("--enforce-eager",))
    return registry.get(engine).programs(ShardWanted(
        f"r.{rank}", "r", rank, spec, "0.30.0", Weights("tiny", "f" * 64, (WeightsFile("a", 1, "a" * 64),)), Secret(KEY), slots, gang), PLACE)


def said(command):
    return " ".join(command.argv)


def test_vllm_with_mp_meets_at_rank_0_and_the_others_are_headless():
    (lead,), (follower,) = programs("vllm", 0), programs("vllm", 1)
    for rank, program in enumerate((lead, follower)):
        assert f"--nnodes 2 --node-rank {rank} --master-addr 10.0.0.1 --master-port 7901" in said(program.command)
        assert "--tensor-parallel-size 2 --pipeline-parallel-size 2" in said(program.command)
        assert program.command.env["VLLM_HOST_IP"] == f"10.0.0.{rank + 1}" and "--enforce-eager" in program.command.argv
    assert "--host 127.0.0.1 --port 7903" in said(lead.command) and "--headless" not in said(lead.command)
    assert "--headless" in follower.command.argv and "--port" not in follower.command.argv
    assert "--tensor-parallel-size 2" in said(programs("vllm", 0, gpus=0)[0].command)      # as measured on CPUs


def test_vllm_with_ray_starts_ray_before_it_with_a_token_and_without_dashboard():
    head, serve = programs("vllm", 0, mode="ray")
    (joined,) = programs("vllm", 1, mode="ray")
    assert (head.name, serve.name, joined.name) == ("ray", "engine", "ray")
    assert "--head --port 7901 --include-dashboard false --node-ip-address 10.0.0.1 --num-gpus 2" in said(head.command)
    assert "--address 10.0.0.1:7901 --node-ip-address 10.0.0.2" in said(joined.command)
    assert head.ready_at == ("10.0.0.1", 7901) and all("--block" in one.command.argv for one in (head, joined))
    assert "--distributed-executor-backend ray" in said(serve.command) and "--nnodes" not in said(serve.command)
    for one in (head, serve, joined):
        assert one.command.env["RAY_AUTH_MODE"] == "token" and one.command.secret_env["RAY_AUTH_TOKEN"] == KEY
        assert KEY not in str(one.command) and KEY not in said(one.command)


@pytest.mark.parametrize("rank", [0, 1])
def test_sglang_is_told_where_rank_0_is_met(rank):
    (program,) = programs("sglang", rank)
    assert "--tp-size 4" in said(program.command) and f"--nnodes 2 --node-rank {rank} --dist-init-addr 10.0.0.1:7901" in said(program.command)
    assert program.command.env["SGLANG_HOST_IP"] == f"10.0.0.{rank + 1}" and KEY not in said(program.command)


def test_an_engine_on_one_node_hears_nothing_of_others():
    for engine in ("vllm", "sglang"):
        spec = ModelSpec("tiny", engine, "mirror:tiny", gpus=0, launch_mode="ray" if engine == "vllm" else "mp")
        (program,) = registry.get(engine).programs(ShardWanted(
            "r.0", "r", 0, spec, "0.30.0", Weights("tiny", "f" * 64, (WeightsFile("a", 1, "a" * 64),)), Secret(KEY)), PLACE)
        assert not {"--nnodes", "--distributed-executor-backend", "--dist-init-addr"} & set(program.command.argv)
