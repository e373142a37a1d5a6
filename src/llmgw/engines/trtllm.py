"""TensorRT-LLM: how trtllm-serve is started (by a launcher of ours, which demands the key) and read.

Options from the source of its serve.py, not from a run: data of the engine, checked against the operator's own --help.
"""
from __future__ import annotations

from typing import Dict, List, Tuple

from llmgw.domain.command import Command
from llmgw.domain.engine import TRTLLM
from llmgw.domain.replica import ShardWanted
from llmgw.engines import python_env
from llmgw.engines.base import Place, Program

PACKAGE = "tensorrt_llm"
LAUNCHER = "trtllm_serve.py"             # in launchers/; copied to the agent's data folder
SERVE = "tensorrt_llm.commands.serve"

# What llmgw sets itself, and what would open the node, run code of a file's choosing or start a part of a larger whole.
_RESERVED = """
    -h --help --host --port --trust-remote-code --revision --custom-module-dirs --max-batch-size --max-seq-len
    --tensor-parallel-size --tp-size --pipeline-parallel-size --pp-size --context-parallel-size --cp-size
    --moe-cluster-parallel-size --cluster-size --gpus-per-node --metadata-server-config-file --server-role
    --otlp-traces-endpoint --disagg-cluster-uri --chat-template --log-level
"""


class TrtLlm(python_env.PythonEngine):
    """One program, our launcher around trtllm-serve. It serves its model under the name of the folder it lies in."""

    name = TRTLLM
    named_by_folder = True
    launcher = LAUNCHER
    metrics_path = "/prometheus/metrics"      # /metrics is JSON, and reading it takes the statistics away
    allowed_paths = python_env.allowed_paths("/health", "/prometheus/metrics", "/v1/models")
    reserved_flags = frozenset(_RESERVED.split())
    running = ("trtllm_num_requests_running",)
    waiting = ("trtllm_num_requests_waiting",)
    kv_used = ("trtllm_kv_cache_utilization",)
    generated = ("trtllm_generation_tokens_total",)
    worked = (*generated, "trtllm_prompt_tokens_total")

    def programs(self, shard: ShardWanted, place: Place) -> Tuple[Program, ...]:
        argv = (place.program, place.launcher, "--key-file", place.key_file,
                "--merged", f"{place.work_dir}/trtllm.yaml", "--", "serve", place.model_path,
                *_flags(shard, place), *shard.model.args)
        return (Program("engine", Command(argv, env=_env(shard, place), cwd=place.work_dir), title="trtllm-serve",
                        help=(place.program, "-m", SERVE, "serve", "--help")),)


def _flags(shard: ShardWanted, place: Place) -> List[str]:
    model = shard.model
    flags = ["--host", "127.0.0.1", "--port", str(place.port), "--tp_size", str(max(1, len(shard.gpus))),
             "--max_batch_size", str(model.parallel)]
    if model.context_length is not None:
        flags += ["--max_seq_len", str(model.context_length)]
    if place.template_file:
        flags += ["--chat_template", place.template_file]
    if model.trust_remote_code:
        flags += ["--trust_remote_code"]
    return flags


def _env(shard: ShardWanted, place: Place) -> Dict[str, str]:
    return {**python_env.env(shard, place), "TLLM_DISABLE_USAGE_STATS": "1"}
