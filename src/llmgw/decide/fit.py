"""How much memory one replica needs, and whether a node's CPU or GPUs have it."""
from __future__ import annotations

from typing import Dict, List, Optional, Sequence, Tuple, Union

from llmgw.domain.engine import LLAMA_CPP, PYTHON_ENGINES
from llmgw.domain.model import ModelSpec, Weights, context_per_request
from llmgw.domain.node import Gpu
from llmgw.domain.replica import GpuSlot

OVERHEAD_BYTES = 256 << 20    # the engine itself: code, compute buffers, a tokenizer
PYTHON_BYTES = 3 << 30        # torch and its kind, in several processes
COMPUTE_SHARE = 0.05          # of the weights: activations grow with the model
UNKNOWN_KV_SHARE = 0.10       # of the weights, when no header tells the KV cache's size
GPU_USABLE_SHARE = 0.9        # what vLLM and its kind claim of a card
FOREIGN_SHARE = 0.1           # a card that strangers use more than this of is not taken whole


def kv_bytes(spec: ModelSpec, weights: Weights) -> int:
    """Return the size of the KV cache for all requests at once; estimated when the header is silent."""
    if weights.kv_bytes_per_token is None:
        return int(weights.size_bytes * UNKNOWN_KV_SHARE)
    return weights.kv_bytes_per_token * context_per_request(spec, weights) * spec.parallel


def memory_bytes(spec: ModelSpec, weights: Weights) -> int:
    """Return what a replica needs: weights, KV cache, and the engine's own."""
    if spec.engine in PYTHON_ENGINES and spec.gpus == 0:      # a cache of a quarter of the weights: engines/vllm.py
        return int(weights.size_bytes * (1 + COMPUTE_SHARE)) + max(1 << 30, weights.size_bytes // 4) + PYTHON_BYTES
    return int(weights.size_bytes * (1 + COMPUTE_SHARE)) + kv_bytes(spec, weights) + OVERHEAD_BYTES


def gpu_count(spec: ModelSpec) -> int:
    """Return how many GPUs a shard asks for; 1 where the model leaves it open."""
    return 1 if spec.gpus is None else spec.gpus


def may_use_cpu(spec: ModelSpec) -> bool:
    """Whether the model may run without a GPU: by itself with llama.cpp only, else when told to."""
    return spec.gpus == 0 or (spec.engine == LLAMA_CPP and spec.gpus is None)


def choose_gpus(spec: ModelSpec, weights: Weights,
                free: Sequence[Gpu]) -> Union[Tuple[GpuSlot, ...], str]:
    """Return the tightest fitting cards of one kind, or the sentence why ``free`` does not do."""
    count = gpu_count(spec)
    need = _per_gpu(spec, weights, count)
    problems: List[str] = []
    by_kind: Dict[str, List[Tuple[int, int, Gpu]]] = {}
    for gpu in free:
        problem = _gpu_problem(spec, gpu, need)
        if problem:
            problems.append(f"GPU {gpu.index} {problem}")
            continue
        left = _left(gpu)
        by_kind.setdefault(gpu.name, []).append((left if left is not None else 1 << 62, gpu.index, gpu))
    fitting = sorted((sorted(cards)[:count] for cards in by_kind.values() if len(cards) >= count),
                     key=lambda cards: (sum(card[0] for card in cards), cards[0][1]))
    if fitting:
        return tuple(GpuSlot(gpu.uuid, gpu.index) for _, _, gpu in sorted(fitting[0], key=lambda card: card[1]))
    most = max((len(cards) for cards in by_kind.values()), default=0)
    said = f"{most} of the {count} GPUs of one kind it needs can take it"
    return f"{said} ({'; '.join(problems)})" if problems else said


def _per_gpu(spec: ModelSpec, weights: Weights, count: int) -> int:
    shared = memory_bytes(spec, weights) - OVERHEAD_BYTES
    return shared // max(1, count * spec.nodes) + OVERHEAD_BYTES


def _left(gpu: Gpu) -> Optional[int]:
    if gpu.memory_total_bytes is None:
        return None
    return gpu.memory_total_bytes - (gpu.memory_used_bytes or 0)


def _gpu_problem(spec: ModelSpec, gpu: Gpu, need: int) -> str:
    if gpu.mig:
        return "is split by MIG"
    total, left = gpu.memory_total_bytes, _left(gpu)
    if total is None or left is None:
        return ""                 # unknown is not none: the engine will tell
    if spec.engine == LLAMA_CPP:
        return "" if left >= need else f"has {gib(left)} free, {gib(need)} are needed"
    if total - left > total * FOREIGN_SHARE:
        return f"is in use by another program ({gib(total - left)} of {gib(total)})"
    if total * GPU_USABLE_SHARE < need:
        return f"has {gib(total)}, {gib(need)} are needed"
    return ""


def gib(size: float) -> str:
    """Return a size for people, such as ``1.5 GiB``."""
    if size < 1 << 30:
        return f"{max(0.0, size) / (1 << 20):.0f} MiB"
    return f"{size / (1 << 30):.1f} GiB"
