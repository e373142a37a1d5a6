"""What a test may set and nobody else needs to: read from ``LLMGW_REHEARSE_*`` at import."""
from __future__ import annotations

import os


def seconds(name: str, usual: float) -> float:
    """Return a span of time: ``usual``, unless a test has set ``LLMGW_REHEARSE_<name>``."""
    try:
        return float(os.environ.get(f"LLMGW_REHEARSE_{name}", ""))
    except ValueError:
        return usual


def places(name: str) -> str:
    """Return folders (as in PATH) where a test put programs that stand for the machine's own, empty otherwise."""
    return os.environ.get(f"LLMGW_REHEARSE_{name}", "")
