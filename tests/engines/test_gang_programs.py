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
INNER = tuple(range(7904, 7944))
PLACE = Place("/e/bin/python", (), "/m/tiny", "/w", "/w/key", "", 7903, inner_ports=INNER, interface="eth9", meet_file="/w/work/meet")
GANG = Gang(2, 3, "10.0.0.2", "10.0.0.1", 7901)


def programs(engine, rank, gpus=2, mode="mp"):
    slots = tuple(GpuSlot(f"GPU-{number}", number) for number in range(gpus))
    gang = dataclasses.replace(GANG, address=f"10.0.0.{rank + 1}")
    spec = ModelSpec("tiny", engine, "mirror:tiny", nodes=2, gpus=gpus, launch_mode=mode, args=("--enforce-eager",))
    wanted = ShardWanted(f"r.{rank}", "r", rank, spec, "0.30.0", Weights("tiny", "f" * 64, (WeightsFile("a", 1, "a" * 64),)), Secret(KEY), slots, gang)
    made = registry.get(engine)
    return made.programs(wanted, dataclasses.replace(PLACE, inner_ports=INNER[:made.inner_ports(wanted)]))


def alone(engine, **place):
    wanted = ShardWanted("r.0", "r", 0, ModelSpec("tiny", engine, "mirror:tiny"), "0.30.0",
                         Weights("tiny", "f" * 64, (WeightsFile("a", 1, "a" * 64),)), Secret(KEY), (GpuSlot("GPU-0", 0),))
    return registry.get(engine).programs(wanted, dataclasses.replace(PLACE, **place))[0].command


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


def test_every_port_of_ray_is_one_of_the_agents_and_none_is_used_twice():
    for rank, head in ((0, {"--dashboard-port", "--ray-client-server-port"}), (1, set())):
        (ray, *_) = programs("vllm", rank, mode="ray")
        flags = {flag: value for flag, value in zip(ray.command.argv, ray.command.argv[1:]) if flag.endswith(("-port", "-list"))}
        assert set(flags) - {"--port"} == head | {"--node-manager-port", "--object-manager-port", "--runtime-env-agent-port", "--metrics-export-port",
                                                  "--dashboard-agent-grpc-port", "--dashboard-agent-listen-port", "--worker-port-list"}
        said = [port for flag, value in flags.items() if flag != "--port" for port in value.split(",")]
        said += [ray.command.env[name] for name in ("AUTOSCALER_METRIC_PORT", "DASHBOARD_METRIC_PORT") if name in ray.command.env]
        assert sorted(map(int, said)) == list(INNER[:22 if rank == 0 else 18])
        assert len(flags["--worker-port-list"].split(",")) == 12 and "--num-cpus 1" in " ".join(ray.command.argv)


def test_ports_inside_are_the_agents_and_what_meets_on_one_node_opens_none_to_others():
    vllm, sglang = alone("vllm"), alone("sglang")
    assert vllm.env["VLLM_PORT"] == "7904" and "VLLM_PORT" not in programs("vllm", 0)[0].command.env
    assert "--nccl-port 7904" in said(sglang) and "--nccl-port 7904" in said(programs("sglang", 1)[0].command)
    assert sglang.env["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] == "file:///w/work/meet"
    assert "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE" not in programs("sglang", 0)[0].command.env
    for command, interface in ((vllm, "eth9"), (sglang, "eth9"), (alone("vllm", interface="lo"), "lo"), (programs("vllm", 1)[0].command, "eth9")):
        assert (command.env["GLOO_SOCKET_IFNAME"], command.env["NCCL_SOCKET_IFNAME"]) == (interface, f"={interface}")
    assert not {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} & set(alone("vllm", interface="").env)


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
