"""What ldd says a program lacks. It exits 0 with libraries missing: only its text decides."""
from __future__ import annotations

import re
from typing import Dict, Iterable, List, Tuple

from llmgw.domain.requirement import Library

_VERSION = re.compile(r".*?/?([^/\s:]+): version [`']([A-Za-z]+[A-Za-z0-9_]*?)_?([0-9][0-9.]{0,40})' not found")
_MISSING = re.compile(r"\s*(\S+) => not found")
_MUSL = re.compile(r"Error loading shared library (\S+): .*")
_RUN = re.compile(r".*error while loading shared libraries: (\S+): cannot open shared object file.*")
_CACHE_LINE = re.compile(r"\s*(\S+) \(.*\) => /\S+")
# the loader dies of a file that was cut, and ldd tells how
_NO_LIBRARY = re.compile(r"\s*(not a dynamic executable|ldd: exited with unknown exit code .*)\s*")

# A CUDA build looks for the driver's own libraries, also on nodes that have no driver loaded.
DRIVER_LIBRARIES = frozenset({"libcuda.so.1", "libnvidia-ml.so.1"})
LINE_CHARACTERS = 4096
# libstdc++ may lack versions of several kinds: the first of these is the one that people look up
_TELLING = ("GLIBCXX", "GLIBC")


def lacks(text: str) -> Tuple[Library, ...]:
    """Return the libraries that are missing or too old, each once, from ldd's stdout and stderr together.

    An old library is told by the newest version asked of it; symbols that musl
    could not relocate are left out, its missing libraries are the reason.
    """
    found: List[Library] = []
    for line in text.splitlines():
        if len(line) > LINE_CHARACTERS:       # no line of ldd's; the patterns would take long to say so
            continue
        match = _MISSING.match(line) or _MUSL.match(line) or _RUN.match(line)
        if match:
            found.append(Library(match.group(1).rsplit("/", 1)[-1]))
            continue
        match = _VERSION.match(line)
        if match:
            found.append(Library(match.group(1), f"{match.group(2)}_{match.group(3)}"))
    return merged(found)


def merged(found: Iterable[Library]) -> Tuple[Library, ...]:
    """Return each library once, the missing ones first: files differ in what they ask of it."""
    absent: Dict[str, Library] = {}
    old: Dict[str, Dict[str, str]] = {}
    for library in found:
        if not library.needs:
            absent.setdefault(library.name, library)
            continue
        kind, version = library.needs.rsplit("_", 1)
        newest = old.setdefault(library.name, {})
        if kind not in newest or _number(version) > _number(newest[kind]):
            newest[kind] = version
    return tuple(absent.values()) + tuple(
        Library(name, _most_telling(old[name])) for name in sorted(old) if name not in absent)


def missing(text: str) -> Tuple[str, ...]:
    """Return one sentence per library that is missing or too old."""
    return tuple(library.sentence for library in lacks(text))


def no_library(text: str) -> bool:
    """Say whether ldd finds that the file is no dynamic program or library, or no whole one."""
    return any(_NO_LIBRARY.fullmatch(line) for line in text.splitlines())


def cached(text: str) -> Tuple[str, ...]:
    """Return the libraries in what ``ldconfig -p`` prints."""
    return tuple(match.group(1) for match in map(_CACHE_LINE.match, text.splitlines()) if match)


def _most_telling(newest: Dict[str, str]) -> str:
    kind = next((kind for kind in _TELLING if kind in newest), sorted(newest)[0])
    return f"{kind}_{newest[kind]}"


def _number(version: str) -> Tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part)
