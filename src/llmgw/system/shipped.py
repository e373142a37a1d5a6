"""Lists of packages that came with llmgw."""
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
