"""The widest command of every engine, checked against the helps that real engines printed."""
from __future__ import annotations

import pathlib
import re

import pytest

from llmgw.engines import registry, widest
from llmgw.engines.widest import Status
from llmgw.parse.engine_help import read

DATA = pathlib.Path(__file__).resolve().parent.parent / "data"
SAVED = {"llama-server": DATA / "llamacpp" / "help-b10991.txt", "vllm serve": DATA / "vllm" / "serve-help-all-0.30.0.txt",
         "ray start": DATA / "vllm" / "ray-start-help-2.60.0.txt",
         "sglang.launch_server": DATA / "sglang" / "launch-server-help-0.5.23.txt"}


def check(engine, title, text, args=()):
    wide = next(one for one in widest.programs(engine, "/p", "/w", args) if one.title == title)
    return {verdict.flag: verdict for verdict in widest.judge(
        wide, read(text, wide.sections), tuple(engine.unlisted_flags), same_dashes=engine.dashes_are_underscores)}


@pytest.mark.parametrize("name", [name for name in sorted(registry.ENGINES) if name != "trtllm"])
def test_every_flag_is_accepted_by_the_help_that_the_real_engine_printed(name):
    engine = registry.get(name)
    for wide in widest.programs(engine, "/p", "/w"):
        found = check(engine, wide.title, SAVED[wide.title].read_text())
        assert {verdict.status for verdict in found.values()} == {Status.ACCEPTED}, wide.title


@pytest.mark.parametrize("name, wanted", [
    ("llama.cpp", {"--model", "--host", "--port", "--metrics", "--alias", "--parallel", "--n-gpu-layers", "--reranking",
                   "--embeddings", "--chat-template-file", "--threads"}),
    ("vllm", {"--host", "--port", "--tensor-parallel-size", "--served-model-name", "--runner", "--trust-remote-code",
              "--distributed-executor-backend", "--nnodes", "--node-rank", "--master-addr", "--master-port", "--headless"}),
    ("sglang", {"--host", "--port", "--tp-size", "--is-embedding", "--device", "--config", "--nnodes", "--node-rank", "--dist-init-addr",
                "--nccl-port"})])
def test_the_widest_command_has_every_option_that_llmgw_knows(name, wanted):
    engine = registry.get(name)
    serve = next(one for one in widest.programs(engine, "/p", "/w") if one.title != "ray start")
    assert wanted <= {use.flag for use in serve.uses}


def test_every_port_of_ray_start_is_checked_against_its_help():
    ray = next(one for one in widest.programs(registry.get("vllm"), "/p", "/w") if one.title == "ray start")
    assert {use.flag for use in ray.uses} >= {
        "--head", "--address", "--port", "--node-ip-address", "--num-gpus", "--num-cpus", "--include-dashboard", "--dashboard-port",
        "--node-manager-port", "--object-manager-port", "--runtime-env-agent-port", "--dashboard-agent-grpc-port", "--dashboard-agent-listen-port",
        "--metrics-export-port", "--ray-client-server-port", "--worker-port-list", "--disable-usage-stats", "--block"}


def test_renaming_one_flag_makes_exactly_that_one_fail():
    text = SAVED["llama-server"].read_text()
    for flag in ("--port", "--alias", "--metrics", "--n-gpu-layers"):
        renamed = re.sub(rf"(?m)^((?:-\w+, +)?(?:--[\w-]+, )?){flag}(?= )", rf"\1{flag}-new", text, count=1)
        assert renamed != text
        found = check(registry.get("llama.cpp"), "llama-server", renamed)
        assert [verdict.flag for verdict in found.values() if verdict.status is not Status.ACCEPTED] == [flag]
        assert found[flag].message == f"llama-server has no {flag}"


def test_a_cut_help_calls_nothing_missing():
    cut = "\n".join(SAVED["llama-server"].read_text().splitlines()[:400])
    found = check(registry.get("llama.cpp"), "llama-server", cut)
    assert {verdict.status for verdict in found.values()} == {Status.ACCEPTED, Status.UNCLEAR}


def test_args_are_checked_too_and_a_value_that_is_no_choice_is_refused():
    engine = registry.get("vllm")
    args = ["--enable-prefix-caching", "--gone-flag", "--dtype=float17", "-O3", "--max_num_batched_tokens", "2048",
            "--compilation-config.mode", "3", "--kv-cache-dtype", "fp8", "--swap-space", "-1"]
    found = check(engine, "vllm serve", SAVED["vllm serve"].read_text(), args)
    assert found["--gone-flag"].status is Status.MISSING and "args:" in found["--gone-flag"].message
    assert found["--dtype"].status is Status.REFUSED and "float17" in found["--dtype"].message
    for flag in ("--enable-prefix-caching", "-O3", "--max_num_batched_tokens", "--compilation-config.mode", "--kv-cache-dtype"):
        assert found[flag].status is Status.ACCEPTED, flag
    assert "-1" not in found


def test_no_secret_reaches_the_environment_of_a_help():
    for name in registry.ENGINES:
        for wide in widest.programs(registry.get(name), "/p", "/w"):
            assert widest._KEY not in " ".join(wide.env.values()) and wide.help[-1].startswith("--help")
