"""What uv says while it works, and when it fails (checked against 0.13.9)."""
from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field, replace
from typing import Mapping, Optional, Tuple

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_SIZE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?(B|KiB|MiB|GiB|TiB)")
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_STARTS = re.compile(r"Downloading (\S+)(?: \(download\))? \(([^)]*)\)")
_ENDS = re.compile(r"Downloaded (\S+)")
_COUNTS = re.compile(r"(Resolved|Prepared|Installed) ([0-9]{1,9}) packages?")


@dataclass(frozen=True)
class Progress:
    """How far an install is. Sizes are those of the files that uv found worth naming, which is nearly all."""

    resolved: int = 0
    started: Mapping[str, int] = field(default_factory=dict)      # bytes by package
    ended: Tuple[str, ...] = ()
    prepared: bool = False

    @property
    def total_bytes(self) -> int:
        return sum(self.started.values())

    @property
    def done_bytes(self) -> int:
        return sum(self.started.get(name, 0) for name in self.ended)


def progress(before: Progress, line: str) -> Progress:
    """Return how far it is after ``line``; most lines say nothing of it."""
    text = _ANSI.sub("", line).strip()
    match = _STARTS.match(text)
    if match:
        return replace(before, started={**before.started, match.group(1): _bytes(match.group(2))})
    match = _ENDS.match(text)
    if match and match.group(1) not in before.ended:
        return replace(before, ended=(*before.ended, match.group(1)))
    match = _COUNTS.match(text)
    if match:
        return replace(before, resolved=int(match.group(2)), prepared=before.prepared or match.group(1) != "Resolved")
    return before


def _bytes(text: str) -> int:
    match = _SIZE.fullmatch(text)
    return int(float(match.group(1)) * _UNITS[match.group(2)]) if match else 0


class Trouble(str, enum.Enum):
    """Why uv failed, as far as that changes what is to be done."""

    DISK_FULL = "disk full"
    WRONG_HASH = "wrong hash"
    NO_HASH = "no hash"
    GONE = "gone"                 # a file or a version that the list names is not offered any more
    NO_DATES = "no dates"         # the index does not say when files were uploaded
    UNREACHABLE = "unreachable"
    REFUSED = "refused"           # the index wants a login
    UNSOLVABLE = "unsolvable"
    OTHER = "other"


@dataclass(frozen=True)
class Problem:
    """``what`` is the package, address or text that the trouble is about."""

    trouble: Trouble
    what: str = ""


_FULL = re.compile(r"No space left on device|Disk quota exceeded")
_WRONG = re.compile(r"Hash mismatch for `([^`]{1,200})`")
_NONE = re.compile(r"no trusted hash was provided for: `([^`]{1,200})`|none were provided for: (\S{1,200})")
_STATUS = re.compile(r"HTTP status (?:client|server) error \(([0-9]{3})[^)]*\) for url \(([^)]{1,500})\)")
_LOGIN = re.compile(r"An index URL \(([^)]{1,500})\) could not be queried due to a lack of valid authentication")
_DATES = re.compile(r"`([^`]{1,300})` is missing an upload date")
_ADDRESS = re.compile(r"(?:Failed to fetch|Failed to download|error sending request for url)[: (]+`?(https?://[^\s`)]{1,500})")
_NETWORK = re.compile(r"dns error|Connection refused|operation timed out|connection closed|client error \(|"
                      r"Connection reset|error sending request|request or response body error|tls|certificate",
                      re.IGNORECASE)
_ABSENT = re.compile(r"there is no version of (\S+)|(\S+) was not found in the package registry|"
                     r"(\S+) has no usable wheels|(\S+) was yanked")
_UNSOLVED = re.compile(r"No solution found")


def problem(text: str) -> Problem:
    """Return what is the matter, from all that uv printed; a login in an address is left out."""
    text = _without_login(_ANSI.sub("", text))
    for trouble, pattern in ((Trouble.DISK_FULL, _FULL), (Trouble.WRONG_HASH, _WRONG), (Trouble.NO_HASH, _NONE)):
        match = pattern.search(text)
        if match:
            return Problem(trouble, _first(match))
    match = _STATUS.search(text)
    if match:
        return _by_status(match.group(1), match.group(2))
    match = _LOGIN.search(text)
    if match:
        return Problem(Trouble.REFUSED, _host(match.group(1)))
    if _UNSOLVED.search(text):
        match = _DATES.search(text)
        if match:
            return Problem(Trouble.NO_DATES, match.group(1))
        match = _ABSENT.search(text)
        return Problem(Trouble.GONE, _first(match)) if match else Problem(Trouble.UNSOLVABLE, _error(text))
    match = _ADDRESS.search(text)
    if match or _NETWORK.search(text):
        return Problem(Trouble.UNREACHABLE, _why_unreachable(text, match.group(1) if match else ""))
    return Problem(Trouble.OTHER, _error(text))


def _by_status(status: str, url: str) -> Problem:
    if status in ("401", "403", "407"):
        return Problem(Trouble.REFUSED, f"{_host(url)} (HTTP {status})")
    if status in ("404", "410"):
        return Problem(Trouble.GONE, url.rpartition("/")[2] or url)
    return Problem(Trouble.UNREACHABLE, f"{_host(url)} has a fault of its own (HTTP {status})")


def _why_unreachable(text: str, url: str) -> str:
    last = [line.strip() for line in text.splitlines() if line.strip().startswith("cause:")]
    why = last[-1].partition("cause:")[2].strip() if last else _error(text)
    why = re.sub(r" \(os error [0-9]+\)$", "", why)
    return f"{_host(url)}: {why}"[:300] if url else why[:300]


def _host(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}"


def _without_login(url: str) -> str:
    return re.sub(r"://[^/@]*@", "://", url)


def _first(match: "re.Match[str]") -> str:
    return next((group for group in match.groups() if group), match.group(0))


def _error(text: str) -> str:
    """Return the first line that calls itself an error with its last cause, else the last that says anything."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said: Optional[str] = next((line for line in lines if line.startswith("error:")), None)
    found = said.partition("error:")[2].strip() if said else (lines[-1] if lines else "it said nothing")
    causes = [line.partition("cause:")[2].strip() for line in lines if line.startswith("cause:")] if said else []
    return ": ".join([found, *causes[-1:]])[:300]
