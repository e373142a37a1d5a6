"""What is said to llama-server, and what is read from it."""
from __future__ import annotations

import dataclasses
import pathlib
import re

import pytest

from llmgw.domain.errors import ConfigError
from llmgw.domain.model import ModelSpec, Task, Weights, WeightsFile, context_per_request
from llmgw.domain.replica import GpuSlot, ShardWanted
from llmgw.domain.secret import Secret
from llmgw.engines import registry
from llmgw.engines.base import Place

DATA = pathlib.Path(__file__).parent.parent / "data" / "llamacpp"
ENGINE = registry.get("llama.cpp")
PLACE = Place(program="/e/llama-server", library_dirs=(), model_path="/m/a.gguf", work_dir="/w",
              key_file="/w/key", template_file="", port=7901)


def shard(gpus=(), **model):
    spec = ModelSpec(**{"name": "tiny", "engine": "llama.cpp", "weights": "mirror:tiny", **model})
    weights = Weights("tiny", "f" * 64, (WeightsFile("a.gguf", 1, "a" * 64),), context_train=2048)
    return ShardWanted("r1.0", "r1", 0, spec, "b10991", weights, Secret("secret-key"), gpus=gpus)


def command(wanted, place=PLACE):
    (program,) = ENGINE.programs(wanted, place)
    return program.command


def after(words, flag):
    return words[words.index(flag) + 1]


def test_the_server_listens_on_loopback_only_under_the_models_name():
    argv = command(shard()).argv
    assert argv[0] == "/e/llama-server"
    assert after(argv, "--host") == "127.0.0.1" and after(argv, "--port") == "7901"
    assert after(argv, "--alias") == "tiny" and after(argv, "--model") == "/m/a.gguf"
    assert "--metrics" in argv and "--no-mmap" not in argv


def test_the_key_is_in_a_file_and_never_in_the_command_line():
    made = command(shard())
    assert after(made.argv, "--api-key-file") == "/w/key"
    assert "secret-key" not in str(made) and "secret-key" not in " ".join(made.argv)


@pytest.mark.parametrize("length, parallel, total", [(8192, 4, "32768"), (4096, 1, "4096")])
def test_the_context_of_one_request_is_multiplied_by_the_slots(length, parallel, total):
    argv = command(shard(context_length=length, parallel=parallel)).argv
    assert after(argv, "--ctx-size") == total and after(argv, "--parallel") == str(parallel)


@pytest.mark.parametrize("train, used", [(2048, 2048), (131072, 8192), (None, 8192)])
def test_an_unnamed_context_length_is_the_models_own_up_to_a_cap(train, used):
    weights = dataclasses.replace(shard().weights, context_train=train)
    assert context_per_request(shard().model, weights) == used


@pytest.mark.parametrize("gpus, layers, said", [((), None, "0"), ((GpuSlot("GPU-1", 0),), None, "999"), ((GpuSlot("GPU-1", 0),), 20, "20"), ((), 20, "0")])
def test_all_layers_are_on_the_gpu_unless_a_part_is_asked_for(gpus, layers, said):
    assert after(command(shard(gpus=gpus, gpu_layers=layers)).argv, "--n-gpu-layers") == said


def test_args_of_the_operator_come_last_and_unchanged():
    assert command(shard(args=("--flash-attn", "on"))).argv[-2:] == ("--flash-attn", "on")


def test_a_shard_on_the_cpu_sees_no_gpu():
    made = command(shard(), dataclasses.replace(PLACE, threads=6))
    assert made.env["CUDA_VISIBLE_DEVICES"] == "" and after(made.argv, "--n-gpu-layers") == "0"
    assert after(made.argv, "--threads") == "6"


def test_a_shard_with_gpus_sees_them_as_placement_numbered_them():
    made = command(shard(gpus=(GpuSlot("GPU-b", 1), GpuSlot("GPU-d", 3))))
    assert made.env["CUDA_VISIBLE_DEVICES"] == "1,3"
    assert made.env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert after(made.argv, "--n-gpu-layers") == "999"


def test_a_template_and_library_folders_are_passed_when_there_are_any():
    made = command(shard(), dataclasses.replace(PLACE, template_file="/w/t.jinja", library_dirs=("/a", "/b")))
    assert after(made.argv, "--chat-template-file") == "/w/t.jinja"
    assert made.env["LD_LIBRARY_PATH"] == "/a:/b"


def test_a_vision_model_is_given_its_projector_and_another_none():
    assert after(command(shard(), dataclasses.replace(PLACE, projector_path="/w/mmproj.gguf")).argv,
                 "--mmproj") == "/w/mmproj.gguf"
    assert "--mmproj" not in command(shard()).argv


@pytest.mark.parametrize("task, flag", [(Task.EMBED, "--embeddings"), (Task.RERANK, "--reranking")])
def test_embedding_and_reranking_have_their_flag_and_one_batch_per_input(task, flag):
    argv = command(shard(task=task, context_length=512, parallel=4)).argv
    assert flag in argv and after(argv, "--ubatch-size") == "512"


def test_every_flag_we_use_and_reserve_stands_in_the_recorded_help_of_b10991():
    known = set(re.findall(r"(?<![\w-])--?[A-Za-z][\w.-]*", (DATA / "help-b10991.txt").read_text()))
    used = [word for task in Task for word in command(
        shard(task=task), dataclasses.replace(PLACE, threads=1, template_file="/t", projector_path="/p")).argv
        if word.startswith("-")]
    assert [flag for flag in used if flag not in known] == []
    spoken = ENGINE.reserved_flags - {"--rpc"}          # only builds with RPC have it
    older = {"-hfv", "-hfrv", "--hf-repo-v", "-hffv", "--hf-file-v"}
    assert sorted(spoken - known - older) == []


def test_gauges_are_read_by_their_exact_names_and_kv_use_is_unknown():
    read = ENGINE.gauges((DATA / "metrics-b10991-three-requests-two-slots.txt").read_bytes())
    assert (read.running, read.waiting, read.generated_tokens) == (2.0, 1.0, 522.0)
    assert read.kv_used is None


def test_a_page_of_something_else_gives_unknown_and_not_zero():
    read = ENGINE.gauges(b"<html>busy</html>")
    assert (read.running, read.waiting, read.generated_tokens) == (None, None, None)


def test_the_gate_lets_questions_through_and_nothing_that_changes_the_engine():
    assert ("POST", "/v1/chat/completions") in ENGINE.allowed_paths
    assert ("GET", "/metrics") in ENGINE.allowed_paths
    assert not {("POST", "/props"), ("POST", "/slots/0"), ("POST", "/lora-adapters")} & ENGINE.allowed_paths


def test_an_unknown_engine_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError) as caught:
        registry.get("exllama")
    assert "llama.cpp" in caught.value.hint
