"""Why apt-get, dnf, yum or zypper installed nothing, out of what it printed."""
from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Tuple


class Why(str, enum.Enum):
    """What stands in the way."""

    LOCKED = "locked"             # another program installs: wait
    STALE = "stale"               # the lists of packages are absent or old: fetch them
    OFFLINE = "offline"
    UNKNOWN_PACKAGE = "unknown package"
    BROKEN = "broken"             # an earlier install was interrupted, or packages contradict each other
    READ_ONLY = "read-only"
    FULL = "full"
    NOT_ROOT = "not root"
    OTHER = "other"


@dataclass(frozen=True)
class Problem:
    """``detail`` is the package manager's own line."""

    why: Why
    detail: str
    pid: int = 0                  # who holds the lock, where it is said


_PID = re.compile(r"(?:(?:process|pid|PID)[: ]+(?:with pid )?|already locked by )(\d{1,9})")
_PATTERNS: Tuple[Tuple[Why, "re.Pattern[str]"], ...] = tuple((why, re.compile(text, re.IGNORECASE)) for why, text in (
    (Why.NOT_ROOT, r"are you root\?|has to be run (with|under) .*(superuser|root)|requires superuser|"
                   r"root privileges are required|you need to be root"),
    (Why.LOCKED, r"could not get lock|unable to acquire the dpkg (frontend )?lock|unable to lock (the )?(directory|"
                 r"administration|list)|another app is currently holding|existing lock .* another copy is running|"
                 r"failed to obtain (the |rpm )?transaction lock|waiting for process with pid|"
                 r"system management is locked|can't create transaction lock|already locked by"),
    (Why.BROKEN, r"dpkg was interrupted|unmet dependencies|held broken packages|"
                 r"rpmdb open failed|error: rpmdb|sub-process /usr/bin/dpkg returned an error"),
    (Why.FULL, r"don't have enough free space|no space left on device|at least .* more space needed|"
               r"not enough (free )?space"),
    (Why.READ_ONLY, r"read-only file ?system|transactional-update"),
    (Why.OFFLINE, r"temporary failure (in name resolution|resolving)|could not resolve|couldn't resolve host|"
                  r"could not connect|couldn't connect to server|cannot initiate the connection|connection timed out|"
                  r"network is unreachable|cannot find a valid baseurl|failed to download metadata|"
                  r"timeout was reached|download \(curl\) error"),
    (Why.STALE, r"unable to locate package|has no installation candidate|404 +not found|hash sum mismatch|"
                r"the package lists or status file could not be parsed"),
    (Why.UNKNOWN_PACKAGE, r"no match for argument|unable to find a match|no package .* available|no provider of|"
                          r"nothing to do"),
))


def problem(text: str) -> Problem:
    """Return why nothing was installed: the weightiest of the known lines, else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for why, pattern in _PATTERNS:
        for line in lines:
            if pattern.search(line):
                return Problem(why, _short(line), _pid(line))
    errors = [line for line in lines if re.match(r"(E|error|err):? ", line, re.IGNORECASE)]
    return Problem(Why.OTHER, _short((errors or lines or [""])[-1]))


def _pid(line: str) -> int:
    match = _PID.search(line)
    return int(match.group(1)) if match else 0


def _short(line: str) -> str:
    return re.sub(r"^(E|Error|Err)(:\d+)?:? +", "", line)[:300]
