"""What an engine answers to ``--version``, on whichever of stdout and stderr it chose."""
from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Optional, Tuple

from llmgw.domain.errors import ParseError

MIN_LLAMA_BUILD = 8146    # older builds overflow on a hostile GGUF header: CVE-2026-27940
_NEW = re.compile(r"version: (\S+) \(build ([0-9]{1,9}), commit (\S+)\)")
_OLD = re.compile(r"version: ([0-9]{1,9}) \(([0-9a-f]+|unknown)\)")


@dataclass(frozen=True)
class EngineVersion:
    """``build`` is llama.cpp's release number, 0 in a build that was not told its own."""

    text: str
    build: Optional[int] = None


def llama_cpp(out: str, err: str) -> EngineVersion:
    """Return llama-server's version: text on stderr, old form ``version: N (hash)`` too."""
    for line in (err + "\n" + out).splitlines():
        match = _NEW.match(line.strip())
        if match:
            return EngineVersion(match.group(0), int(match.group(2)))
        match = _OLD.match(line.strip())
        if match:
            return EngineVersion(match.group(0), int(match.group(1)))
    said = next((line.strip() for line in reversed((out + "\n" + err).splitlines()) if line.strip()), "")
    raise ParseError(f"no version in what --version printed: {said[:200]!r}")


def has_known_holes(says: str) -> bool:
    """Whether llama-server calls itself a build that is too old; one that was not told its number is not judged."""
    match = _NEW.match(says) or _OLD.match(says)
    build = int(match.group(2 if match.re is _NEW else 1)) if match else 0
    return 0 < build < MIN_LLAMA_BUILD


def devices(out: str) -> Tuple[str, ...]:
    """Return the device lines of ``--list-devices``; empty when it names none."""
    lines = out.splitlines()
    for number, line in enumerate(lines):
        if line.strip() == "Available devices:":
            named = [entry.strip() for entry in lines[number + 1:] if entry.startswith((" ", "\t"))]
            return tuple(entry for entry in named if entry and entry != "(none)")
    return ()
