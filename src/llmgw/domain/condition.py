"""Health as a list of conditions, never as one free-text state."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Condition:
    """One statement about a thing: ``reason`` is one CamelCase word, ``message`` is for a person."""

    type: str
    status: str               # "true", "false" or "unknown"
    reason: str = ""
    message: str = ""
    since: float = 0.0        # wall clock, seconds, for display only
