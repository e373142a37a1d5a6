"""What is said to vLLM and SGLang, and what is read from them; against their recorded help and metrics."""
from __future__ import annotations

import dataclasses
import json
import pathlib
import re

import pytest

from llmgw.domain.model import ModelSpec, Task, Weights, WeightsFile
from llmgw.domain.replica import GpuSlot, ShardWanted
from llmgw.domain.secret import Secret
from llmgw.engines import registry
from llmgw.engines.base import Place
from llmgw.parse.cluster_yaml import ALWAYS_RESERVED, is_reserved

DATA = pathlib.Path(__file__).parent.parent / "data"
HELP = {"vllm": (DATA / "vllm" / "serve-help-all-0.30.0.txt").read_text(),
        "sglang": (DATA / "sglang" / "launch-server-help-0.5.23.txt").read_text()}
PLACE = Place(program="/e/bin/python", library_dirs=(), model_path="/m/tiny", work_dir="/w", key_file="/w/key",
              template_file="", port=7901)
CARDS = (GpuSlot("GPU-b", 1), GpuSlot("GPU-d", 3))
WIDEST = dict(context_length=512, parallel=4, trust_remote_code=True)


def shard(engine, gpus=(), **model):
    spec = ModelSpec(**{"name": "org/tiny", "engine": engine, "weights": "mirror:tiny", **model})
    weights = Weights("tiny", "f" * 64, (WeightsFile("model.safetensors", 5 << 30, "a" * 64),), format="safetensors")
    return ShardWanted("r1.0", "r1", 0, spec, "0.30.0", weights, Secret("secret-key"), gpus=gpus)


def command(engine, place=PLACE, **wanted):
    (program,) = registry.get(engine).programs(shard(engine, **wanted), place)
    return program.command


def after(words, flag):
    return words[words.index(flag) + 1]


def flags_of(engine):
    """Every spelling of a flag that the recorded help explains, not only mentions."""
    found = set()
    for line in HELP[engine].splitlines():
        if re.match(r"  ?-", line) and not line.startswith("   "):
            found |= set(re.findall(r"(?<![\w-])--?[A-Za-z][\w-]*", re.sub(r"\{.*?\}|\[.*?\]", "", line)))
    return found


def test_the_recorded_help_is_understood():
    assert {"--served-model-name", "--no-enable-prefix-caching", "-tp", "-q"} <= flags_of("vllm")
    assert {"--served-model-name", "--tensor-parallel-size", "--enable-metrics"} <= flags_of("sglang")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("task", list(Task))
@pytest.mark.parametrize("gpus", [(), CARDS])
def test_every_flag_we_use_stands_in_the_recorded_help(engine, task, gpus):
    argv = command(engine, dataclasses.replace(PLACE, template_file="/t.jinja"), task=task, gpus=gpus, **WIDEST).argv
    used = {word for word in argv if word.startswith("--")}
    assert used - flags_of(engine) == set()


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_every_reserved_flag_stands_in_the_recorded_help(engine):
    known = flags_of(engine)
    unknown = [flag for flag in registry.get(engine).reserved_flags
               if flag.strip("!*") not in known and not any(one.startswith(flag.rstrip("*")) for one in known)]
    assert [flag for flag in unknown if len(flag) > 2] == []


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_what_we_set_is_reserved_in_every_spelling_of_argparse(engine):
    reserved = registry.get(engine).reserved_flags | ALWAYS_RESERVED
    argv = command(engine, dataclasses.replace(PLACE, template_file="/t.jinja"), gpus=CARDS, task=Task.EMBED, **WIDEST).argv
    ours = {word for word in argv if word.startswith("--")}
    assert [flag for flag in ours if not is_reserved(flag, engine, reserved)] == []
    for flag in ("--api-key", "--host", "--served-model-name", "--serv", "--trust_remote_code", "--ssl-keyfile"):
        assert is_reserved(flag, engine, reserved), flag
    refused_for_a_likeness = [flag for flag in flags_of(engine) - reserved if is_reserved(flag, engine, reserved)
                              and not any(one.endswith("*") and flag.startswith(one[:-1]) for one in reserved)]
    assert refused_for_a_likeness == []


@pytest.mark.parametrize("engine, flag", [
    ("vllm", "--middleware"), ("vllm", "--uds"), ("vllm", "--kv-transfer-config.kv_role"), ("vllm", "-tp"), ("vllm", "-n2"),
    ("vllm", "--allowed-local-media-path"), ("vllm", "--enable-prompt-embeds"), ("vllm", "--reasoning-parser-p"),
    ("vllm", "--data-parallel-address"), ("vllm", "-dpp"), ("vllm", "--config"), ("vllm", "--worker-extension-cls"),
    ("sglang", "--admin-api-key"), ("sglang", "--disaggregation-mode"), ("sglang", "--grpc-port"), ("sglang", "--config"),
    ("sglang", "--metrics-port"), ("sglang", "--enable-custom-logit-processor"), ("sglang", "--sidecar")])
def test_what_opens_the_node_or_runs_foreign_code_is_reserved(engine, flag):
    assert is_reserved(flag, engine, registry.get(engine).reserved_flags | ALWAYS_RESERVED)


@pytest.mark.parametrize("engine, flag", [
    ("vllm", "--reasoning-parser"), ("vllm", "--enable-prefix-caching"), ("vllm", "--gpu-memory-utilization"), ("vllm", "-q"),
    ("vllm", "--enforce-eager"), ("vllm", "--enable-auto-tool-choice"), ("vllm", "--tool-call-parser"), ("vllm", "--dtype"),
    ("vllm", "--speculative-config"), ("vllm", "-cc.mode"), ("vllm", "--config-format"), ("vllm", "--enable-expert-parallel"),
    ("sglang", "--reasoning-parser"), ("sglang", "--mem-fraction-static"), ("sglang", "--tool-call-parser"),
    ("sglang", "--attention-backend"), ("sglang", "--log-level"), ("sglang", "--ep-size")])
def test_what_an_operator_tunes_is_not(engine, flag):
    assert not is_reserved(flag, engine, registry.get(engine).reserved_flags | ALWAYS_RESERVED)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_server_listens_on_loopback_only_under_the_models_name(engine):
    made = command(engine, gpus=CARDS)
    assert after(made.argv, "--host") == "127.0.0.1" and after(made.argv, "--port") == "7901"
    assert after(made.argv, "--served-model-name") == "org/tiny" and "/m/tiny" in made.argv
    assert made.env["VLLM_HOST_IP" if engine == "vllm" else "SGLANG_HOST_IP"] == "127.0.0.1"
    assert made.env["HF_HUB_OFFLINE"] == "1" and made.env["PATH"].startswith("/e/bin:")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_cards_are_numbered_as_placement_did_and_all_are_used(engine):
    made = command(engine, gpus=CARDS)
    assert made.env["CUDA_VISIBLE_DEVICES"] == "1,3" and made.env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert after(made.argv, "--tensor-parallel-size" if engine == "vllm" else "--tp-size") == "2"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_no_key_is_in_the_command_line_or_in_what_is_logged(engine):
    made = command(engine, gpus=CARDS)
    assert "secret-key" not in str(made) + repr(made) and "secret-key" not in " ".join(made.argv)


def test_vllm_takes_its_key_from_the_environment():
    assert command("vllm").secret_env == {"VLLM_API_KEY": "secret-key"}
    assert registry.get("vllm").key_file(Secret("k")) == b"k\n"


def test_sglang_takes_its_key_from_a_yaml_file():
    engine = registry.get("sglang")
    assert engine.key_file_name.endswith(".yaml")
    assert engine.key_file(Secret("a: b")) == b'api-key: "a: b"\n'
    argv = command("sglang").argv
    assert after(argv, "--config") == "/w/key"             # two words: it finds no --config=FILE


def test_an_unnamed_context_length_is_left_to_the_engine():
    assert after(command("vllm").argv, "--max-model-len") == "auto"
    assert after(command("vllm", context_length=4096).argv, "--max-model-len") == "4096"
    assert "--context-length" not in command("sglang").argv
    assert after(command("sglang", context_length=4096).argv, "--context-length") == "4096"


def test_on_a_cpu_vllm_is_told_how_large_its_cache_may_be():
    assert command("vllm").env["VLLM_CPU_KVCACHE_SPACE"] == "2"        # a quarter of the weights
    assert "VLLM_CPU_KVCACHE_SPACE" not in command("vllm", gpus=CARDS).env
    assert "--device" in command("sglang").argv and "--device" not in command("sglang", gpus=CARDS).argv


def test_args_of_the_operator_come_last_and_unchanged():
    for engine in ("vllm", "sglang"):
        assert command(engine, args=("--dtype", "float16")).argv[-2:] == ("--dtype", "float16")


def test_nobody_is_told_of_the_use():
    assert command("vllm").env["VLLM_NO_USAGE_STATS"] == "1" and command("vllm").env["DO_NOT_TRACK"] == "1"


def test_gauges_of_the_recorded_page_are_read_by_their_exact_names():
    page = (DATA / "vllm" / "metrics-after-0.30.0.txt").read_bytes()
    read = registry.get("vllm").gauges(page)
    assert (read.running, read.waiting, read.kv_used, read.generated_tokens) == (0.0, 0.0, 0.0, 88.0)
    assert registry.get("vllm").work(page) == 88.0 + 263.0 + 88.0


def test_the_reasons_for_waiting_are_not_counted_again():
    read = registry.get("vllm").gauges(b"""
vllm:num_requests_waiting{engine="0",model_name="m"} 5
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 3
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="deferred"} 2
vllm:num_requests_waiting_created{engine="0",model_name="m"} 1.79e+09
""")
    assert read.waiting == 5.0 and read.running is None and read.kv_used is None


def test_engines_of_a_data_parallel_replica_are_summed_and_the_fullest_cache_counts():
    read = registry.get("vllm").gauges(b"""
vllm:num_requests_running{engine="0",model_name="m"} 2
vllm:num_requests_running{engine="1",model_name="m"} 3
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.1
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.9
""")
    assert (read.running, read.kv_used) == (5.0, 0.9)


def test_the_older_name_of_the_cache_gauge_counts_where_the_new_one_is_absent():
    old, new = b"vllm:gpu_cache_usage_perc 0.5\n", b"vllm:kv_cache_usage_perc 0.25\n"
    assert registry.get("vllm").gauges(old).kv_used == 0.5
    assert registry.get("vllm").gauges(old + new).kv_used == 0.25


@pytest.mark.parametrize("prefix", ["sglang:", "sglang_"])
def test_ranks_of_one_sglang_engine_count_once(prefix):
    page = "".join(f'{prefix}num_running_reqs{{tp_rank="{rank}",dp_rank="{dp}"}} {4 + dp}\n{prefix}token_usage{{tp_rank="{rank}",'
                   f'dp_rank="{dp}"}} 0.{dp + 1}\n' for rank in (0, 1) for dp in (0, 1))
    read = registry.get("sglang").gauges(page.encode())
    assert (read.running, read.kv_used, read.waiting) == (9.0, 0.2, None)


def test_the_names_read_of_sglang_stand_in_its_source():
    names = set((DATA / "sglang" / "metric-names-0.5.23.txt").read_text().split())
    assert {"sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage", "sglang:generation_tokens_total"} <= names


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_only_questions_of_the_openai_api_pass_the_gate(engine):
    paths = registry.get(engine).allowed_paths
    assert ("POST", "/v1/chat/completions") in paths and ("GET", "/metrics") in paths and ("GET", "/v1/models") in paths
    assert not {path for method, path in paths if method == "POST" and not path.startswith("/v1/")}
    assert not {"/invocations", "/tokenize", "/sleep", "/docs", "/generate", "/flush_cache", "/v1/load_lora_adapter"} \
        & {path for _, path in paths}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("task, path", [(Task.CHAT, "/v1/completions"), (Task.EMBED, "/v1/embeddings"), (Task.RERANK, "/v1/rerank")])
def test_the_smallest_request_is_one_of_the_model_under_its_name(engine, task, path):
    asked, body = registry.get(engine).smallest_request(shard(engine, task=task).model)
    assert asked == path and json.loads(body)["model"] == "org/tiny"
    assert ("POST", path) in registry.get(engine).allowed_paths
