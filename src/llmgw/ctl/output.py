"""What people see: tables that fit the terminal, sizes and ages, colour; JSON for programs.

Names and engine output come from elsewhere: what could move the cursor, change
colours or reorder text never reaches the terminal.
"""
from __future__ import annotations

import json
import os
import shutil
import sys
import time
import unicodedata
from dataclasses import dataclass
from typing import Any, List, Optional, Sequence, TextIO, Tuple

# how much a word of the wire matters: green, yellow, red
_COLOURS = {"ready": "32", "installed": "32", "whole": "32", "run": "32",
            "suspect": "33", "stopping": "33", "drain": "33", "draining": "33", "skipped": "2",
            "unreachable": "31", "lost": "31", "failed": "31", "missing": "31", "crashloop": "31",
            "damaged": "31", "backoff": "31", "unready": "31"}
_UNLIMITED = 1 << 20
_NARROWEST = 8              # a cell is not cut below this


@dataclass(frozen=True)
class Row:
    """The cells of one line, and sentences that stand indented below it."""

    cells: Tuple[str, ...]
    notes: Tuple[str, ...] = ()


def clean(text: str) -> str:
    """Return ``text`` on one line without control, format (bidi) or unprintable characters."""
    if text.isascii() and text.isprintable():
        return text
    kept = [character if _shown(character) else " " for character in text]
    return " ".join("".join(kept).split(" ")).strip()


def _shown(character: str) -> bool:
    return unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def lines(text: str) -> List[str]:
    """Return the lines of an engine's output with tabs opened and everything else ``clean``; indents stay."""
    shown = []
    for line in text.split("\n"):
        line = line.rstrip("\r").rpartition("\r")[2].expandtabs(4)
        indent = len(line) - len(line.lstrip(" "))
        shown.append(" " * min(indent, 40) + clean(line.lstrip(" ")))
    return shown


def columns(text: str) -> int:
    """Return how many terminal columns ``text`` takes."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(character) else
               2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)


def cut(text: str, width: int) -> str:
    """Return ``text`` in at most ``width`` columns, with ``..`` where something is missing."""
    if columns(text) <= width:
        return text
    kept, used = [], 0
    for character in text:
        used += columns(character)
        if used > width - 2:
            break
        kept.append(character)
    return ("".join(kept) + "..")[:max(width, 0)]


def width_of(stream: TextIO) -> int:
    """Return the columns to fill: COLUMNS, the terminal's, or no limit when nobody looks."""
    named = os.environ.get("COLUMNS", "")
    if named.isdigit() and int(named) > 0:
        return int(named)
    if not stream.isatty():
        return _UNLIMITED
    return shutil.get_terminal_size().columns or 80       # some terminals say 0


def coloured(stream: TextIO) -> bool:
    """Say whether ``stream`` is a terminal whose user did not refuse colour."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def table(titles: Sequence[str], rows: Sequence[Row], *, width: int, colour: bool = False) -> List[str]:
    """Return the lines of a table of at most ``width`` columns; stacked when it cannot be that narrow.

    The first column is what people copy into the next command: it is never cut.
    """
    rows = [Row(tuple(clean(cell) or "-" for cell in row.cells), row.notes) for row in rows]
    widths = _fit([list(titles)] + [list(row.cells) for row in rows], width)
    if widths is None:
        return _stacked(titles, rows, width, colour)
    shown = [_line(titles, widths, False)]
    for row in rows:
        shown.append(_line(row.cells, widths, colour))
        shown += _notes(row.notes, width)
    return shown


def _fit(grid: List[List[str]], width: int) -> Optional[List[int]]:
    """Return a width per column: natural, or the widest ones narrowed; None when that is too little."""
    widths = [max(columns(cell) for cell in column) for column in zip(*grid)]
    floors = [widths[0]] + [min(size, _NARROWEST) for size in widths[1:]]
    spare = width - 2 * (len(widths) - 1)
    if sum(floors) > spare:
        return None
    while sum(widths) > spare:
        widest = max((size, at) for at, size in enumerate(widths) if size > floors[at])[1]
        widths[widest] -= 1
    return widths


def _line(cells: Sequence[str], widths: Sequence[int], colour: bool) -> str:
    shown = []
    for cell, size in zip(cells, widths):
        kept = cut(cell, size)
        shown.append(paint(kept, colour) + " " * (size - columns(kept)))
    return "  ".join(shown).rstrip()


def _stacked(titles: Sequence[str], rows: Sequence[Row], width: int, colour: bool) -> List[str]:
    label = max(len(title) for title in titles[1:]) if len(titles) > 1 else 0
    shown: List[str] = []
    for row in rows:
        shown += _wrap(row.cells[0], width, "")
        for title, cell in zip(titles[1:], row.cells[1:]):
            first, *more = _wrap(cell, max(width - label - 4, _NARROWEST), "")
            shown.append(f"  {title.lower():<{label}}  {paint(first, colour)}")
            shown += [" " * (label + 4) + line for line in more]
        shown += _notes(row.notes, width)
    return shown


def _notes(notes: Sequence[str], width: int) -> List[str]:
    return [line for note in notes for line in _wrap(clean(note), width, "  ")]


def _wrap(text: str, width: int, indent: str) -> List[str]:
    """Return ``text`` in lines of at most ``width`` columns; a word that is longer is broken."""
    shown, line = [], indent
    room = max(width, len(indent) + _NARROWEST)
    for word in text.split(" "):
        start = indent + "  " if indent else ""
        joined = line + (" " if line.strip() else "") + word
        if columns(joined) <= room:
            line = joined
            continue
        if line.strip():
            shown.append(line)
            line = start
        for character in word:
            if columns(line) + columns(character) > room:
                shown.append(line)
                line = start
            line += character
    return shown + [line] if line.strip() or not shown else shown


def wrapped(text: str, width: int) -> List[str]:
    """Return a sentence in lines of at most ``width`` columns, the indent of its first line kept on all."""
    indent = text[:len(text) - len(text.lstrip(" "))][:40]
    return [indent + line for line in _wrap(clean(text.lstrip(" ")), max(width - len(indent), 1), "")]


def paint(text: str, colour: bool) -> str:
    """Return a word of state in its colour, when there is colour."""
    code = _COLOURS.get(text) if colour else None
    return f"\x1b[{code}m{text}\x1b[0m" if code else text


def size(count: Optional[float]) -> str:
    """Return bytes as people read them: 512 B, 4.2 MB, 130 GB (powers of 1000); - for unknown."""
    if count is None:
        return "-"
    value, units = float(count), ["B", "kB", "MB", "GB", "TB", "PB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.1f} {units[0]}" if value < 9.95 and units[0] != "B" else f"{value:.0f} {units[0]}"


def age(seconds: Optional[float]) -> str:
    """Return a span as people say it: 5s, 3m, 2h, 9d; - for unknown."""
    if seconds is None:
        return "-"
    whole = max(0, int(seconds))
    for limit, unit, name in ((60, 1, "s"), (3600, 60, "m"), (172800, 3600, "h")):
        if whole < limit:
            return f"{whole // unit}{name}"
    return f"{whole // 86400}d"


def moment(at: float) -> str:
    """Return a wall clock time in the reader's own zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) if at > 0 else "-"


def count(number: Optional[float]) -> str:
    """Return a number without a needless fraction; - for unknown."""
    if number is None:
        return "-"
    return str(int(number)) if number == int(number) else f"{number:g}"      # 9000000, not 9e+06


def write(text: str) -> None:
    """Print data: the only things that go to stdout."""
    stream = sys.stdout
    encoding = getattr(stream, "encoding", None) or "ascii"
    stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
    stream.flush()


def write_table(titles: Sequence[str], rows: Sequence[Row], *, empty: str) -> None:
    """Print a table for people; ``empty`` goes to stderr when there is nothing to show."""
    if not rows:
        return say(empty)
    write("\n".join(table(titles, rows, width=width_of(sys.stdout), colour=coloured(sys.stdout))))


def write_json(data: Any) -> None:
    """Print data for programs; ASCII, so that no terminal obeys what is in it."""
    write(json.dumps(data, indent=2, sort_keys=True))


def say(text: str) -> None:
    """Tell a person something that is not data: on stderr."""
    sys.stderr.write(clean(text) + "\n")
    sys.stderr.flush()
