"""Which engines there are: the one table from a name to what llmgw knows of it."""
from __future__ import annotations

from typing import Dict

from llmgw.domain.errors import ConfigError
from llmgw.engines.base import Engine
from llmgw.engines.llama_cpp import LlamaCpp
from llmgw.engines.sglang import Sglang
from llmgw.engines.trtllm import TrtLlm
from llmgw.engines.vllm import Vllm

ENGINES: Dict[str, Engine] = {engine.name: engine for engine in (LlamaCpp(), Vllm(), Sglang(), TrtLlm())}


def get(name: str) -> Engine:
    """Return what is known of the engine ``name``; refuse a name that this version cannot run."""
    try:
        return ENGINES[name]
    except KeyError:
        raise ConfigError(f"this version of llmgw cannot run the engine {name!r:.100}",
                          hint="it knows: " + ", ".join(sorted(ENGINES))) from None
