"""What an engine needs of a node, and what a node was found to have of it."""
from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Tuple


class Status(str, enum.Enum):
    """How one requirement stands. A warning stops nothing."""

    OK = "ok"
    WARNING = "warning"
    MISSING = "missing"
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True)
class Requirement:
    """One thing that an engine needs, as it stands on this node, and what to do about it."""

    name: str
    status: Status
    message: str
    hint: str = ""


@dataclass(frozen=True)
class Library:
    """A shared library that is not there, or too old: then ``needs`` is the newest version asked of it."""

    name: str
    needs: str = ""

    @property
    def sentence(self) -> str:
        return f"{self.name} is too old (needs {self.needs})" if self.needs else f"{self.name} is missing"


@dataclass(frozen=True)
class Needs:
    """What an engine needs of a node, as data. What is empty is not asked for."""

    processors: Tuple[str, ...] = ()     # as uname says
    gpu: bool = False                    # without one the engine is skipped
    driver: str = ""                     # the oldest NVIDIA driver
    compute_capability: str = ""         # the lowest
    free_bytes: int = 0                  # on data_dir, while installing
    free_bytes_with_gpu: int = 0         # the same, where the build for GPUs is taken
    glibc: str = ""                      # the oldest
    libraries: Tuple[str, ...] = ()      # asked for while nothing is installed that ldd could be asked about
    own: Tuple[str, ...] = ()            # what the names of its own libraries begin with
    compiler: bool = False               # gcc and the C library's headers
    avx2: bool = False                   # runs without, much slower
