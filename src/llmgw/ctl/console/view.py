"""What a view of the console is. A new one is one module that makes a View, and one entry in ``state.VIEWS``."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Sequence, Tuple

from llmgw.ctl.output import Row


@dataclass(frozen=True)
class View:
    """A table of what one path of the API answers. All functions are pure: data in, lines out."""

    name: str
    path: str                                       # asked again and again
    decode: Callable[[Any], Any]                    # its JSON -> data
    titles: Tuple[str, ...]
    rows: Callable[[Any], Sequence[Row]]
    detail: Callable[[Any, int], Sequence[str]]     # (data, row) -> lines
    summary: Callable[[Any], str]                   # one line below the table
    empty: str
    keys: Tuple[Tuple[str, str], ...] = ()          # (key, what it does), beside those of every view
