"""A program to run, as data."""
from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from typing import Mapping, Optional, Tuple


@dataclass(frozen=True)
class RunAs:
    """Whom a program runs as, when a process of root starts it: nothing of root's groups is kept."""

    name: str
    uid: int
    gid: int
    groups: Tuple[int, ...] = ()


@dataclass(frozen=True)
class Command:
    """``secret_env`` reaches the child and never a log; there is no shell anywhere.

    The child gets exactly ``env`` and ``secret_env``: nothing of ours is inherited.
    ``run_as`` None: as whoever starts it.
    """

    argv: Tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    secret_env: Mapping[str, str] = field(default_factory=dict, repr=False)
    cwd: Optional[str] = None
    run_as: Optional[RunAs] = None

    def __str__(self) -> str:
        shown = [f"{key}={shlex.quote(value)}" for key, value in sorted(self.env.items())]
        shown += [f"{key}=***" for key in sorted(self.secret_env)]
        return " ".join(shown + [shlex.quote(word) for word in self.argv])


@dataclass(frozen=True)
class Outcome:
    """What a finished program said; ``code`` is negative for a signal."""

    code: int
    out: str
    err: str
