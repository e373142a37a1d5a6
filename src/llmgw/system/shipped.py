"""Files that came with llmgw: lists of packages, and what an engine's own Python runs."""
from __future__ import annotations

import pkgutil
from typing import Optional


def lock(engine: str, version: str) -> Optional[str]:
    """Return the shipped list of an engine's version, None when there is none."""
    try:
        data = pkgutil.get_data("llmgw", f"engines/locks/{engine}-{version}.txt")
    except OSError:
        return None
    return data.decode("ascii") if data is not None else None


def launcher(name: str) -> bytes:
    """Return a file of launchers/."""
    data = pkgutil.get_data("llmgw", f"engines/launchers/{name}")
    if data is None:
        raise FileNotFoundError(name)
    return data
