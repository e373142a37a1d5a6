"""What ldd says a program lacks. It exits 0 with libraries missing: only its text decides."""
from __future__ import annotations

import re
from typing import Dict, List, Tuple

_VERSION = re.compile(r".*?/?([^/\s:]+): version [`']([A-Za-z]+[A-Za-z0-9_]*?)_?([0-9][0-9.]*)' not found")
_MISSING = re.compile(r"\s*(\S+) => not found")
_MUSL = re.compile(r"Error loading shared library (\S+): .*")
_RUN = re.compile(r".*error while loading shared libraries: (\S+): cannot open shared object file.*")

# A CUDA build looks for the driver's own library on nodes that have no driver loaded.
DRIVER_LIBRARIES = frozenset({"libcuda.so.1", "libnvidia-ml.so.1"})


def missing(text: str) -> Tuple[str, ...]:
    """Return one sentence per library that is missing or too old, from ldd's stdout and stderr together.

    An old library is told by the newest version asked of it; symbols that musl
    could not relocate are left out, its missing libraries are the reason.
    """
    absent: List[str] = []
    too_old: Dict[Tuple[str, str], str] = {}
    for line in text.splitlines():
        match = _MISSING.match(line) or _MUSL.match(line) or _RUN.match(line)
        if match:
            name = match.group(1).rsplit("/", 1)[-1]
            if name not in absent:
                absent.append(name)
            continue
        match = _VERSION.match(line)
        if match:
            key = (match.group(1), match.group(2))
            if key not in too_old or _number(match.group(3)) > _number(too_old[key]):
                too_old[key] = match.group(3)
    return tuple(f"{name} is missing" for name in absent) + _old_sentences(too_old)


def _old_sentences(too_old: Dict[Tuple[str, str], str]) -> Tuple[str, ...]:
    by_library: Dict[str, List[str]] = {}
    for (library, kind), version in sorted(too_old.items()):
        by_library.setdefault(library, []).append(f"{kind}_{version}")
    # libstdc++ may lack both GLIBCXX_ and CXXABI_ versions: the package is one, so is the sentence
    return tuple(f"{library} is too old (needs {_most_telling(needs)})"
                 for library, needs in by_library.items())


def _most_telling(needs: List[str]) -> str:
    for prefix in ("GLIBCXX_", "GLIBC_"):
        for need in needs:
            if need.startswith(prefix):
                return need
    return needs[0]


def _number(version: str) -> Tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part)
