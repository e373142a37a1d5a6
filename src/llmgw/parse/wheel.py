"""Names of wheels: does one fit CPython 3.12 on a processor type, from a version of glibc on?"""
from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Sequence, Tuple

from llmgw.domain.digest import sha256_hex
from llmgw.domain.errors import ParseError
from llmgw.parse.lock import Pin

PYTHON_MINOR = 12
MAX_FILES = 20_000
_NAME = re.compile(r"[A-Za-z0-9._]+-[A-Za-z0-9._+!]+(?:-[0-9][A-Za-z0-9._]*)?"
                   r"-([a-z0-9._]+)-([a-z0-9._]+)-([a-z0-9._]+)\.whl")
_OLDER = {"manylinux1": (2, 5), "manylinux2010": (2, 12), "manylinux2014": (2, 17)}
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!-]{0,199}")


@dataclass(frozen=True)
class Listed:
    """A file of a package as its index lists it."""

    name: str
    url: str
    sha256: str
    size_bytes: int               # 0: the index does not say


def fits(name: str, machine: str, glibc: Tuple[int, int]) -> bool:
    """Say whether the wheel runs on CPython 3.12, ``machine`` and that glibc."""
    match = _NAME.fullmatch(name)
    if match is None:
        return False
    pythons, abis, platforms = (group.split(".") for group in match.groups())
    return (any(_python_fits(python, abi) for python in pythons for abi in abis)
            and any(_platform_fits(platform, machine, glibc) for platform in platforms))


def _python_fits(python: str, abi: str) -> bool:
    if abi == "none":
        return python in ("py3", f"py3{PYTHON_MINOR}", f"cp3{PYTHON_MINOR}")
    match = re.fullmatch(r"cp3([0-9]{1,2})", python)
    if match is None:
        return False
    return abi == f"cp3{PYTHON_MINOR}" == python or (abi == "abi3" and 2 <= int(match.group(1)) <= PYTHON_MINOR)


def _platform_fits(platform: str, machine: str, glibc: Tuple[int, int]) -> bool:
    if platform == "any":
        return True
    match = re.fullmatch(r"manylinux_([0-9]{1,2})_([0-9]{1,3})_(.+)", platform)
    if match:
        return match.group(3) == machine and (int(match.group(1)), int(match.group(2))) <= glibc
    stem, _, arch = platform.partition("_")
    return stem in _OLDER and arch == machine and _OLDER[stem] <= glibc


def listed(data: Any, name: str) -> Tuple[Listed, ...]:
    """Return the files in an index's JSON for a package; ParseError when it is none."""
    if not isinstance(data, dict) or not isinstance(data.get("files"), list) or len(data["files"]) > MAX_FILES:
        raise ParseError(f"the package index has no JSON list of the files of {name:.100}")
    found = []
    for entry in data["files"]:
        try:
            file, url, digest, size = entry["filename"], entry["url"], entry["hashes"]["sha256"], entry.get("size", 0)
        except (TypeError, KeyError):
            continue              # a file without a sha256 is of no use here
        if isinstance(file, str) and _FILE.fullmatch(file) and isinstance(url, str) and isinstance(size, int):
            found.append(Listed(file, url, sha256_hex(digest), max(0, size)))
    return tuple(found)


def choose(pin: Pin, files: Sequence[Listed], machine: str, glibc: Tuple[int, int]) -> Tuple[Listed, ...]:
    """Return the wheels of a package that the list names and that fit; ParseError when there is none."""
    named = [file for file in files if file.sha256 in pin.hashes]
    found = tuple(file for file in named if fits(file.name, machine, glibc))
    if not found:
        raise ParseError(f"{pin}: the package index has no wheel of it for {machine} with the sha256 of the list",
                         hint="it may have been withdrawn" if not named else None)
    return found
