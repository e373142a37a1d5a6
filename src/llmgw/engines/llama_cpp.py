"""llama.cpp: how llama-server (checked against b10991) is started and read."""
from __future__ import annotations

import json
from typing import Any, Dict, List, Optional, Tuple

from llmgw.domain.command import Command
from llmgw.domain.engine import LLAMA_CPP
from llmgw.domain.model import ModelSpec, Task, context_per_request
from llmgw.domain.replica import ShardWanted
from llmgw.domain.route import Gauges
from llmgw.engines.base import Engine, Place, Program
from llmgw.parse import prometheus

ALL_LAYERS = "999"            # more than any model has; "all" is younger than the builds we accept

# What llmgw sets itself, and what would open the node, its files or the internet.
_RESERVED = """
    -m --model -mu --model-url -dr --docker-repo -hf -hfr --hf-repo -hff --hf-file -hft --hf-token
    -hfv -hfrv --hf-repo-v -hffv --hf-file-v -hfd -hfrd --hf-repo-draft --spec-draft-hf
    -mm --mmproj -mmu --mmproj-url --mmproj-auto --no-mmproj --no-mmproj-auto
    --models-dir --models-preset --models-max --models-autoload
    -a --alias --host --port --reuse-port --path --api-prefix --api-key --api-key-file
    --ssl-key-file --ssl-cert-file -c --ctx-size -np --parallel
    --metrics --props --slots --no-slots --slot-save-path --media-path
    --chat-template --chat-template-file --embedding --embeddings --rerank --reranking
    -dev --device --rpc
    --cors-origins --cors-methods --cors-headers --cors-credentials
    --tools --tools-runtime --mcp-servers-config --mcp-servers-json -ag --agent
    --ui-mcp-proxy --webui-mcp-proxy --ui-config-file --webui-config-file
    --log-disable --log-file --log-prompts-dir --sleep-idle-seconds
    --embd-gemma-default --fim-qwen-1.5b-default --fim-qwen-3b-default --fim-qwen-7b-default
    --fim-qwen-7b-spec --fim-qwen-14b-spec --fim-qwen-30b-default --gpt-oss-20b-default
    --gpt-oss-120b-default --vision-gemma-4b-default --vision-gemma-12b-default
    -h --help --usage --version --list-devices --completion-bash -cl --cache-list
"""

_RUNNING = "llamacpp:requests_processing"
_WAITING = "llamacpp:requests_deferred"
_GENERATED = "llamacpp:tokens_predicted_total"
_WORK = ("llamacpp:n_decode_total", "llamacpp:prompt_tokens_total", _GENERATED)

_OPENAI_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses",
                 "/v1/rerank")
_SMALLEST: Dict[Task, Tuple[str, Dict[str, Any]]] = {
    Task.CHAT: ("/v1/completions", {"prompt": "ready", "max_tokens": 1, "temperature": 0, "cache_prompt": False}),
    Task.EMBED: ("/v1/embeddings", {"input": "ready"}),
    Task.RERANK: ("/v1/rerank", {"query": "ready", "documents": ["ready"]}),
}
_READ_PATHS = ("/health", "/metrics", "/props", "/slots", "/v1/models")


class LlamaCpp(Engine):
    """One program, ``llama-server``. It reads its key from a file and has no gauge of KV memory."""

    name = LLAMA_CPP
    allowed_paths = frozenset([("POST", path) for path in _OPENAI_PATHS]
                              + [("GET", path) for path in _READ_PATHS])
    reserved_flags = frozenset(_RESERVED.split())
    dashes_are_underscores = True

    def programs(self, shard: ShardWanted, place: Place) -> Tuple[Program, ...]:
        argv = (place.program, *_flags(shard, place), *shard.model.args)
        return (Program("engine", Command(argv, env=_env(shard, place), cwd=place.work_dir), title="llama-server",
                        help=(place.program, "--help"), sections=("example-specific params",)),)

    def gauges(self, page: bytes) -> Gauges:
        # KV use is unknown: kv_cache_usage_ratio is gone. The *_seconds gauges restart at each
        # reader, so rates come from the counter.
        samples = prometheus.read(page, (_RUNNING, _WAITING, _GENERATED))
        return Gauges(running=prometheus.total(samples, _RUNNING),
                      waiting=prometheus.total(samples, _WAITING),
                      generated_tokens=prometheus.total(samples, _GENERATED))

    def work(self, page: bytes) -> Optional[float]:
        # Token counters are only moved when a request ends; decode calls count while it runs.
        samples = prometheus.read(page, _WORK)
        known = [prometheus.total(samples, name) for name in _WORK]
        return sum(value for value in known if value is not None) if any(
            value is not None for value in known) else None

    def smallest_request(self, model: ModelSpec) -> Tuple[str, bytes]:
        # a model without a chat template has completions too
        path, body = _SMALLEST[model.task]
        return path, json.dumps({"model": model.name, **body}).encode()


def _flags(shard: ShardWanted, place: Place) -> List[str]:
    model = shard.model
    context = context_per_request(model, shard.weights)
    flags = ["--model", place.model_path, "--alias", model.name,
             "--host", "127.0.0.1", "--port", str(place.port),
             # llama-server divides this by --parallel
             "--ctx-size", str(context * model.parallel), "--parallel", str(model.parallel),
             "--metrics", "--api-key-file", place.key_file,
             "--n-gpu-layers", _layers_on_gpu(shard)]
    if place.projector_path:
        flags += ["--mmproj", place.projector_path]
    if place.template_file:
        flags += ["--chat-template-file", place.template_file]
    if place.threads is not None:
        flags += ["--threads", str(place.threads)]
    if model.task is not Task.CHAT:
        flags += ["--embeddings" if model.task is Task.EMBED else "--reranking"]
        # an input is embedded in one physical batch or refused
        flags += ["--batch-size", str(context), "--ubatch-size", str(context)]
    return flags


def _layers_on_gpu(shard: ShardWanted) -> str:
    if not shard.gpus:
        return "0"
    return ALL_LAYERS if shard.model.gpu_layers is None else str(shard.model.gpu_layers)


def _env(shard: ShardWanted, place: Place) -> Dict[str, str]:
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": place.work_dir, "LANG": "C.UTF-8",
           "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
           "CUDA_VISIBLE_DEVICES": ",".join(str(slot.index) for slot in shard.gpus)}
    if place.library_dirs:
        env["LD_LIBRARY_PATH"] = ":".join(place.library_dirs)
    return env
