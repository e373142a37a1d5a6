"""SGLang: how its server (checked against the help of 0.5.23) is started and read."""
from __future__ import annotations

import json
from typing import Dict, List, Tuple

from llmgw.domain.command import Command
from llmgw.domain.engine import SGLANG
from llmgw.domain.model import Task
from llmgw.domain.replica import ShardWanted
from llmgw.domain.secret import Secret
from llmgw.engines import python_env
from llmgw.engines.base import Place, Program

MODULE = "sglang.launch_server"

# What llmgw sets itself, and what would open the node, run code of a request's or a file's choosing, write requests
# into files or logs, or start a part of a larger whole.
_RESERVED = """
    -h --help --config --model-path --model --tokenizer-path --served-model-name --host --port --fastapi-root-path
    --api-key --admin-api-key --ssl-* --enable-ssl-refresh --enable-http2 --http2-* --enable-http-worker-reuseport
    --grpc-* --smg-* --sidecar --sidecar-args --servicer-impl --metrics-port --metrics-host --gated-launch-port
    --enable-metrics --tokenizer-worker-num --context-length --max-running-requests --is-embedding
    --chat-template --completion-template --trust-request-chat-template --tool-server --trust-remote-code
    --tp-size --tensor-parallel-size --pp-size --pipeline-parallel-size --dp-size --data-parallel-size
    --attn-dp-size --enable-dp-attention --nnodes --node-rank --dist-init-addr --nccl-port --use-ray
    --device --base-gpu-id --gpu-id-step --enable-custom-logit-processor --forward-hooks --custom-weight-loader
    --msprobe-dump-config --debug-tensor-dump-* --crash-dump-folder --export-metrics-to-file* --log-requests*
    --file-storage-path --enable-response-store --otlp-* --enable-trace --trace-modules
    --kv-events-config --load-publish-endpoint --disaggregation-* --encoder-* --language-only --enable-pd-role-switch
    --remote-instance-weight-loader-* --engine-info-bootstrap-port --modelexpress-config --elastic-ep-*
    --decoupled-spec-* --spec-trace-dir --weight-cache-socket --allowed-media-domains --revision --download-dir
    --delete-ckpt-after-loading --checkpoint-engine-wait-weights-before-ready --lora-paths --warmups
"""


class Sglang(python_env.PythonEngine):
    """One program, ``sglang.launch_server``. It reads its key from a YAML file: its flag would show it to everybody."""

    name = SGLANG
    over_nodes = True
    health_path = "/ready"            # /health generates a token each time it is asked
    key_file_name = "key.yaml"        # it takes no other ending
    allowed_paths = python_env.allowed_paths("/health", "/ready", "/metrics", "/v1/models")
    reserved_flags = frozenset(_RESERVED.split())
    running = ("sglang:num_running_reqs", "sglang_num_running_reqs")          # both prefixes have been used
    waiting = ("sglang:num_queue_reqs", "sglang_num_queue_reqs")
    kv_used = ("sglang:token_usage", "sglang_token_usage")
    generated = ("sglang:generation_tokens_total", "sglang_generation_tokens_total")
    worked = (*generated, "sglang:prompt_tokens_total", "sglang_prompt_tokens_total")

    def inner_ports(self, shard: ShardWanted) -> int:
        return 1

    def key_file(self, key: Secret) -> bytes:
        return b"api-key: " + json.dumps(key.reveal()).encode("ascii") + b"\n"

    def programs(self, shard: ShardWanted, place: Place) -> Tuple[Program, ...]:
        argv = (place.program, "-m", MODULE, "--model-path", place.model_path, *_flags(shard, place),
                *shard.model.args)
        return (Program("engine", Command(argv, env=_env(shard, place), cwd=place.work_dir), title=MODULE,
                        help=(place.program, "-m", MODULE, "--help")),)


def _flags(shard: ShardWanted, place: Place) -> List[str]:
    model = shard.model
    flags = ["--config", place.key_file, "--served-model-name", model.name,
             "--host", "127.0.0.1", "--port", str(place.port), "--enable-metrics",
             "--tp-size", str(max(1, len(shard.gpus)) * (shard.gang.size if shard.gang else 1)),
             "--max-running-requests", str(model.parallel)]
    if place.inner_ports:                 # else it picks one at random between 22000 and 29999
        flags += ["--nccl-port", str(place.inner_ports[0])]
    if shard.gang is not None:
        flags += ["--nnodes", str(shard.gang.size), "--node-rank", str(shard.rank),
                  "--dist-init-addr", f"{shard.gang.lead_address}:{shard.gang.meet_port}"]
    if model.context_length is not None:
        flags += ["--context-length", str(model.context_length)]
    if not shard.gpus:
        flags += ["--device", "cpu"]
    if model.task is not Task.CHAT:
        flags += ["--is-embedding"]
    if place.template_file:
        flags += ["--chat-template", place.template_file]
    if model.trust_remote_code:
        flags += ["--trust-remote-code"]
    return flags


def _env(shard: ShardWanted, place: Place) -> Dict[str, str]:
    made = {**python_env.env(shard, place), "SGLANG_HOST_IP": shard.gang.address if shard.gang else "127.0.0.1"}
    if shard.gang is None and place.meet_file:
        # torch opens a port on every address to be met at, and asks nobody for a key there
        made["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{place.meet_file}"
    return made
