"""A string that cannot be printed by accident."""
from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Secret:
    """Prints as ``***``; only ``reveal`` gives the text."""

    _text: str = field(repr=False)

    def reveal(self) -> str:
        return self._text

    def __str__(self) -> str:
        return "***"

    def __repr__(self) -> str:
        return "Secret(***)"

    def __bool__(self) -> bool:
        return bool(self._text)
