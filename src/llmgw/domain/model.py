"""An LLM to serve, and the files it is made of."""
from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Mapping, Optional, Tuple

from llmgw.domain.engine import LLAMA_CPP

CHUNK_BYTES = 8 << 20
DEFAULT_CONTEXT = 8192


def chunk_count(size_bytes: int) -> int:
    """Return how many chunks a file of so many bytes has."""
    return -(-size_bytes // CHUNK_BYTES)


class Task(str, enum.Enum):
    """What a model is asked to do."""

    CHAT = "chat"
    EMBED = "embed"
    RERANK = "rerank"


@dataclass(frozen=True)
class ModelSpec:
    """One entry under ``models:``; what the keys mean stands in docs/configuration.md."""

    name: str
    engine: str
    weights: str                                  # mirror:NAME, hf:ORG/REPO[@REV][:FILE], file:/PATH
    aliases: Tuple[str, ...] = ()
    replicas: int = 1
    task: Task = Task.CHAT
    context_length: Optional[int] = None          # of one request
    parallel: int = 1                             # requests at once
    gpus: Optional[int] = None                    # per shard; None: one if it fits, else CPU; 0: CPU
    nodes: int = 1
    chat_template: str = ""                       # the template's text, not its path
    labels: Mapping[str, str] = field(default_factory=dict)   # placement.labels
    only_nodes: Tuple[str, ...] = ()              # placement.nodes; empty: any
    args: Tuple[str, ...] = ()
    trust_remote_code: bool = False
    launch_mode: str = "mp"                       # of a replica over several nodes: mp or ray
    fabric: str = ""                              # the network that those nodes may use, such as 10.1.0.0/16
    gpu_layers: Optional[int] = None              # llama.cpp: so many on the GPU, the rest on the CPU; None: all


@dataclass(frozen=True)
class WeightsFile:
    """One file; ``chunks`` are the sha256 of its 8 MiB pieces, in order."""

    name: str                                     # a flat file name, no folder
    size_bytes: int
    sha256: str
    chunks: Tuple[str, ...] = ()


@dataclass(frozen=True)
class Weights:
    """A model's files as the mirror knows them. ``fingerprint`` is the digest of this manifest."""

    name: str
    fingerprint: str
    files: Tuple[WeightsFile, ...]
    source: str = ""
    revision: str = ""
    format: str = "gguf"                          # gguf, safetensors, raw
    kv_bytes_per_token: Optional[int] = None      # from the GGUF header; None: unknown
    context_train: Optional[int] = None
    imported_at: float = 0.0
    projector: str = ""                           # of a vision model: which of the files sees for it

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


def context_per_request(model: ModelSpec, weights: Weights) -> int:
    """Return how many tokens one request may use: as configured, else what the weights were made for.

    Capped where nobody asked: a long-context model would claim all memory for its KV cache.
    """
    if model.context_length is not None:
        return model.context_length
    return min(weights.context_train or DEFAULT_CONTEXT, DEFAULT_CONTEXT)


def told_context(model: ModelSpec, weights: Optional[Weights]) -> Optional[int]:
    """Return how many tokens one request may use, as far as that is known outside of the engine."""
    if model.engine != LLAMA_CPP or weights is None:
        return model.context_length       # the others choose for themselves
    return context_per_request(model, weights)


class WeightsPhase(str, enum.Enum):
    """Where a node stands with a model's files."""

    ABSENT = "absent"
    FETCHING = "fetching"
    WHOLE = "whole"
    DAMAGED = "damaged"
    FAILED = "failed"


@dataclass(frozen=True)
class WeightsObserved:
    """What a node says of a model's files."""

    name: str
    fingerprint: str
    phase: WeightsPhase
    done_bytes: int = 0
    total_bytes: int = 0
    message: str = ""
    bytes_per_second: int = 0                     # while fetching; 0: not known yet
