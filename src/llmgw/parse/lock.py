"""A list of packages as uv resolves it: exact versions with the sha256 of their files, and nothing else.

Only what is read here is ever written for uv to install: uv obeys --index-url and
--find-links lines inside a list, and takes addresses and folders as packages.
"""
from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Dict, Iterable, Iterator, List, Sequence, Set, Tuple

from llmgw.domain.errors import ParseError

MAX_BYTES = 4 << 20
MAX_PINS = 3000
SHOWN = 5                         # differences that are named; the rest is counted

_PIN = re.compile(
    r"([A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9])?)"                  # name
    r"[ \t]*==[ \t]*([A-Za-z0-9][A-Za-z0-9.!+_]{0,98})"                   # version, local parts too
    r"(?:[ \t]*;[ \t]*([A-Za-z0-9_.,<>=!~()'\" \t]{1,500}?))?"            # marker: no dash, so no option
    r"((?:[ \t]+--hash=sha256:[0-9a-f]{64})+)")
_HASH = re.compile(r"[0-9a-f]{64}")
_COMMENT = re.compile(r"(?:^|[ \t])#.*")


@dataclass(frozen=True)
class Pin:
    """One package. ``line`` is where it stood, for messages."""

    name: str                     # as package indexes compare it
    version: str
    hashes: Tuple[str, ...]       # sorted
    marker: str = ""
    line: int = 0

    def __str__(self) -> str:
        return f"{self.name}=={self.version}" + (f" ; {self.marker}" if self.marker else "")


Pins = Tuple[Pin, ...]


def read(text: str, what: str) -> Pins:
    """Return the packages of a list, by name. ParseError names the first line that is none of its business.

    ``what`` names the list in messages. Every line is ``name==version [; marker] --hash=sha256:HEX...``.
    """
    if len(text) > MAX_BYTES:
        raise ParseError(f"{what}: a list of packages of {len(text)} bytes")
    found: Dict[Tuple[str, str], Pin] = {}
    for number, line in _logical(text):
        pin = _pin(line, number, what)
        if (pin.name, pin.marker) in found:
            raise ParseError(f"{what}: line {number}: {pin.name} is named twice")
        found[pin.name, pin.marker] = pin
        if len(found) > MAX_PINS:
            raise ParseError(f"{what}: a list of more than {MAX_PINS} packages")
    if not found:
        raise ParseError(f"{what}: holds no package")
    return tuple(found[key] for key in sorted(found))


def _pin(line: str, number: int, what: str) -> Pin:
    match = _PIN.fullmatch(line)
    if match is None:
        raise ParseError(f"{what}: line {number}: only NAME==VERSION --hash=sha256:HEX may stand here, "
                         f"not {line[:100]!r}", hint="every package needs the hash of its files")
    name, version, marker, hashes = match.groups()
    return Pin(re.sub(r"[-_.]+", "-", name).lower(), version, tuple(sorted(set(_HASH.findall(hashes)))),
               " ".join((marker or "").split()), number)


def _logical(text: str) -> Iterator[Tuple[int, str]]:
    """Yield (number of its first line, text) of every line; a backslash at the end continues it."""
    parts: List[str] = []
    first = 0
    for number, raw in enumerate(text.split("\n"), 1):
        first = first or number
        line = raw[:-1] if raw.endswith("\r") else raw
        continued = line.endswith("\\")
        parts.append(_COMMENT.sub("", line[:-1] if continued else line).strip(" \t"))
        if continued:
            continue
        joined = " ".join(part for part in parts if part)
        if joined:
            yield first, joined
        parts, first = [], 0
    if parts:                         # it ends in the middle of a line
        yield first, " ".join(parts) + " \\"


def write(pins: Iterable[Pin]) -> str:
    """Return the one text of a list: equal lists have equal texts."""
    lines = []
    for pin in sorted(pins, key=lambda pin: (pin.name, pin.marker)):
        lines.append(" \\\n".join([str(pin)] + [f"    --hash=sha256:{digest}" for digest in sorted(pin.hashes)]))
    return "\n".join(lines) + "\n"


def digest(pins: Iterable[Pin]) -> str:
    """Return the sha256 that names a list."""
    return hashlib.sha256(write(pins).encode("ascii")).hexdigest()


def differences(theirs: Sequence[Pin], ours: Sequence[Pin]) -> Tuple[str, ...]:
    """Return a sentence for every line of ``theirs`` that is not as this node found it itself (``ours``)."""
    found = {(pin.name, pin.marker): pin for pin in ours}
    told = [sentence for pin in theirs for sentence in _difference(pin, found.get((pin.name, pin.marker)))]
    named: Set[Tuple[str, str]] = {(pin.name, pin.marker) for pin in theirs}
    return tuple(told + [f"{pin} is not in the list" for key, pin in sorted(found.items()) if key not in named])


def _difference(pin: Pin, ours: "Pin | None") -> List[str]:
    where = f"line {pin.line}: {pin}"
    if ours is None:
        return [f"{where} is not what this node finds: no such package is needed"]
    if pin.version != ours.version:
        return [f"{where}, this node finds {ours.version}"]
    strange = sorted(set(pin.hashes) - set(ours.hashes))
    lacking = sorted(set(ours.hashes) - set(pin.hashes))
    said = []
    if strange:
        said.append(f"{where}: this node finds no file with sha256 {strange[0][:16]}…{_others(strange)}")
    if lacking:
        said.append(f"{where}: the file with sha256 {lacking[0][:16]}…{_others(lacking)} is not listed")
    return said


def _others(hashes: Sequence[str]) -> str:
    return f" and {len(hashes) - 1} more" if len(hashes) > 1 else ""


def sentence(told: Sequence[str]) -> str:
    """Return the first differences as one text, and how many more there are."""
    rest = len(told) - SHOWN
    return "; ".join(told[:SHOWN]) + (f"; and {rest} more" if rest > 0 else "")
