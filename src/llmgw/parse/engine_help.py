"""The help text of an engine's program: which flags it takes. Words in descriptions are no flags."""
from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_BOXES = re.compile(r"^[ \t]*[\u2500-\u257f]+(?=[ \t])|[ \t]+[\u2500-\u257f]+[ \t]*$")
# a flag, and where it ends: never in the middle of a longer one
_NAME = re.compile(r"--?[A-Za-z0-9\[](?:[A-Za-z0-9._\[\]-]*[A-Za-z0-9\]])?\+?(?=[\s,=/|\[<{]|$)")
_VALUE_ENDS = re.compile(r"  | -| ?$| [,/|] ")
_EITHER = re.compile(r"(--?)\[no-\](.+)")
_DEEPEST = 8                      # columns: what begins further right belongs to a description
_MAX_LINE = 4_000
_FEWEST_LINES, _FEWEST_FLAGS = 20, 10
_HEADER = re.compile(r"(?im)^\s*usage:|^-{3,} .* params -{3,}\s*$")
_OPEN, _CLOSE = "([{", ")]}"
_REMOVED = ("the argument has been removed", "removed:", "[removed]")


@dataclass(frozen=True)
class Entry:
    """One option of a help. ``choices`` is empty where any value may be, or none."""

    names: Tuple[str, ...]
    takes_value: bool
    choices: Tuple[str, ...] = ()
    removed: bool = False         # it is named, and said to be gone


@dataclass(frozen=True)
class Help:
    """What a help says. ``truncated`` is why it looks as if some of it were missing, empty when it looks whole."""

    entries: Mapping[str, Entry]
    truncated: str = ""

    def find(self, flag: str) -> Optional[Entry]:
        """Return the entry of ``flag``, in whole words; ``--x.key`` is a key of ``--x``, ``-O3`` a value of ``-O``."""
        found = self.entries.get(flag)
        if found is None and "." in flag:
            found = self.entries.get(flag.split(".", 1)[0].rstrip("+"))
        if found is None:
            short = re.fullmatch(r"(-[A-Za-z]{1,3})[0-9]+", flag)
            found = self.entries.get(short.group(1)) if short else None
        return None if found is None or found.removed else found


def read(text: str, sections: Sequence[str] = ()) -> Help:
    """Return what the help ``text`` says; ``sections`` are lines that a whole one of this program holds."""
    lines = _lines(text)
    entries: Dict[str, Entry] = {}
    count, last = 0, len(lines)
    for at, entry in _entries(lines):
        count, last = count + 1, at
        for name in entry.names:
            if name not in entries or entries[name].removed:
                entries[name] = entry
    return Help(entries, _truncated(lines, sections, count, last))


def _lines(text: str) -> List[str]:
    plain = _ANSI.sub("", text).replace("\r\n", "\n").expandtabs(8)
    return [_BOXES.sub(lambda match: " " * len(match.group(0)), line[:_MAX_LINE]).rstrip()
            for line in plain.split("\n")]


def _entries(lines: Sequence[str]) -> Iterator[Tuple[int, Entry]]:
    at = 0
    while at < len(lines):
        start, head = at, lines[at]
        at += 1
        if not _begins_entry(head):
            continue
        # a list of choices or of names that goes on in the next line
        while at < len(lines) and at - start < 40 and _goes_on(head) and lines[at].strip():
            head = f"{head.rstrip()} {lines[at].strip()}" if head.rstrip().endswith(",") and not _depth(head) \
                else head.rstrip() + lines[at].strip()
            at += 1
        entry = _entry(head.strip(), next((line.strip() for line in lines[at:at + 1]), ""))
        if entry is not None:
            yield start, entry


def _begins_entry(line: str) -> bool:
    indent = len(line) - len(line.lstrip(" "))
    return indent <= _DEEPEST and bool(_NAME.match(line, indent))


def _goes_on(head: str) -> bool:
    """Whether the part with the names is cut in the middle: an open bracket, or a comma at its end."""
    names = re.split(r"(?<![,\s]) {2,}", head.strip(), maxsplit=1)
    return len(names) == 1 and (names[0].endswith(",") or _depth(names[0]) > 0)


def _depth(text: str) -> int:
    return sum(text.count(letter) for letter in _OPEN) - sum(text.count(letter) for letter in _CLOSE)


def _entry(head: str, below: str) -> Optional[Entry]:
    """Return the entry whose first line is ``head``; None when what follows the dash is no flag."""
    names: List[str] = []
    values: List[str] = []
    position = 0
    while True:
        match = _NAME.match(head, position)
        if match is None:
            break
        names += _spelled(match.group(0))
        position = match.end()
        value, position = _value(head, position)
        values += [value] if value else []
        between = re.compile(r" *[,/|] *").match(head, position)
        if between is None:
            break
        position = between.end()
    if not names:
        return None
    said = head[position:].strip() or below
    choices = next((found for found in map(_choices, values) if found), ())
    return Entry(tuple(names), bool(values), choices, said.lower().startswith(_REMOVED))


def _spelled(name: str) -> List[str]:
    """Return the flags that one spelling stands for: ``--[no-]x`` is two."""
    either = _EITHER.fullmatch(name)
    if either:
        return [either.group(1) + either.group(2), f"{either.group(1)}no-{either.group(2)}"]
    return [] if "[" in name else [name]


def _value(head: str, position: int) -> Tuple[str, int]:
    """Return what stands for the value after a name, and where it ends: before two blanks, or the next name."""
    start = position
    if head[position:position + 1] == "=":
        position += 1
    while position < len(head):
        letter = head[position]
        if letter == " ":
            if _VALUE_ENDS.match(head, position):
                break
            position += 1
        elif letter in _OPEN or letter == "<":
            position = _after_bracket(head, position)
        elif letter == "," and head[position + 1:position + 2] in ("", " "):
            break
        else:
            position += 1
    return head[start:position].strip(" ="), position


def _after_bracket(head: str, position: int) -> int:
    opened = head[position]
    closing = {"(": ")", "[": "]", "{": "}", "<": ">"}[opened]
    depth = 0
    for at in range(position, len(head)):
        depth += (head[at] == opened) - (head[at] == closing)
        if depth == 0:
            return at + 1
    return len(head)


def _choices(value: str) -> Tuple[str, ...]:
    """Return the values of ``{a,b}``, ``[a|b]``, ``<0|1>`` or ``['a', 'b']``; none where others may be, too."""
    match = re.fullmatch(r"\{([^{}]+)\}", value)
    if match:
        return tuple(item.strip() for item in match.group(1).split(","))
    match = re.fullmatch(r"\[([^\[\]]+\|[^\[\]]+)\]|<([^<>]+\|[^<>]+)>", value)
    if match:
        return tuple(item.strip() for item in (match.group(1) or match.group(2)).split("|"))
    match = re.fullmatch(r"\[('[^']*'(?:, *'[^']*')*)\]", value)
    return tuple(item.strip(" '") for item in match.group(1).split(",")) if match else ()


def _truncated(lines: Sequence[str], sections: Sequence[str], count: int, last: int) -> str:
    """Return why the help looks cut. The last entry is the last line that holds a flag, and what follows it."""
    full = [line for line in lines if line.strip()]
    if not full:
        return "it is empty"
    if len(full) < _FEWEST_LINES or count < _FEWEST_FLAGS:
        return f"it is short: {len(full)} lines, {count} options"
    if not _HEADER.search("\n".join(lines)):
        return "it has no line that says how the program is used"
    absent = [section for section in sections if not any(section in line for line in lines)]
    if absent:
        return f"it does not come to {absent[0].strip(' -')!r}"
    if _depth("\n".join(lines[last:])) > 0 or full[-1].rstrip().endswith((",", "/", "(", "[", "{", "|")):
        return "it ends in the middle of an option"
    return ""
