"""What the engines share that are Python programs: what they may see of their surroundings, and how they are asked."""
from __future__ import annotations

import json
from typing import Any, Dict, FrozenSet, Mapping, Optional, Tuple

from llmgw.domain.model import ModelSpec, Task
from llmgw.domain.replica import ShardWanted
from llmgw.domain.route import Gauges
from llmgw.engines.base import Engine, Place
from llmgw.parse import prometheus

_OPENAI_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/rerank")
_SMALLEST: Mapping[Task, Tuple[str, Dict[str, Any]]] = {
    Task.CHAT: ("/v1/completions", {"prompt": "ready", "max_tokens": 1, "temperature": 0}),
    Task.EMBED: ("/v1/embeddings", {"input": "ready"}),
    Task.RERANK: ("/v1/rerank", {"query": "ready", "documents": ["ready"]}),
}


def allowed_paths(*read: str) -> FrozenSet[Tuple[str, str]]:
    """Return the questions of the OpenAI API, and what may be read; everything else of the engine stays inside."""
    return frozenset([("POST", path) for path in _OPENAI_PATHS] + [("GET", path) for path in read])


def env(shard: ShardWanted, place: Place) -> Dict[str, str]:
    """Return the environment: the weights are here, so nothing is fetched, and nobody is told of their use.

    The programs of the environment come first on PATH: kernels are built with its ninja. gloo and
    NCCL are told their interface: gloo listens where the host name leads otherwise, NCCL on any but loopback.
    """
    made = {"PATH": f"{place.program.rpartition('/')[0]}:/usr/local/bin:/usr/bin:/bin",
            "HOME": place.work_dir, "LANG": "C.UTF-8", "PYTHONNOUSERSITE": "1", "PYTHONSAFEPATH": "1",
            "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1",
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": ",".join(str(slot.index) for slot in shard.gpus)}
    if place.interface:
        made.update({"GLOO_SOCKET_IFNAME": place.interface, "NCCL_SOCKET_IFNAME": f"={place.interface}"})
    if place.library_dirs:
        made["LD_LIBRARY_PATH"] = ":".join(place.library_dirs)
    return made


class PythonEngine(Engine):
    """Says by which names its metrics page has each number: several where versions differ."""

    takes_folder = True
    running: Tuple[str, ...]
    waiting: Tuple[str, ...]
    kv_used: Tuple[str, ...]
    generated: Tuple[str, ...]
    worked: Tuple[str, ...]               # those of which one grows while it computes

    def gauges(self, page: bytes) -> Gauges:
        # By exact names: vLLM's ..._waiting_by_reason repeats the same requests.
        samples = prometheus.read(page, (*self.running, *self.waiting, *self.kv_used, *self.generated))
        return Gauges(running=prometheus.total(samples, *self.running),
                      waiting=prometheus.total(samples, *self.waiting),
                      kv_used=prometheus.peak(samples, *self.kv_used),
                      generated_tokens=prometheus.total(samples, *self.generated))

    def work(self, page: bytes) -> Optional[float]:
        samples = prometheus.read(page, self.worked)
        known = [value for value in (prometheus.total(samples, name) for name in self.worked) if value is not None]
        return sum(known) if known else None

    def smallest_request(self, model: ModelSpec) -> Tuple[str, bytes]:
        path, body = _SMALLEST[model.task]
        return path, json.dumps({"model": model.name, **body}).encode()
