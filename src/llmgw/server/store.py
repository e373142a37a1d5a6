"""Small JSON objects with revisions: what the control plane must not forget.

The interface is the part of etcd that SQLite can give too: get, range, txn
(compare and swap over several keys) and watch. Heartbeats and gauges never
come here.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, List, Optional, Protocol, Sequence, Tuple, Union

ABSENT = 0                    # as a revision to compare with: the key must not exist


@dataclass(frozen=True)
class Entry:
    """An object as it is stored; ``revision`` is that of its last change."""

    key: str
    value: Any
    revision: int


@dataclass(frozen=True)
class Compare:
    """Holds while ``key`` was last changed at ``revision`` (ABSENT: while there is no such key)."""

    key: str
    revision: int


@dataclass(frozen=True)
class Put:
    """Write ``value`` (JSON-ready data) under ``key``."""

    key: str
    value: Any


@dataclass(frozen=True)
class Delete:
    """Remove ``key``; a missing one is removed already."""

    key: str


Operation = Union[Put, Delete]


@dataclass(frozen=True)
class Changes:
    """What changed up to ``revision``. ``whole`` false: too much was missed, read everything again."""

    revision: int
    keys: Tuple[str, ...]
    whole: bool = True


class Store(Protocol):
    """Every method may raise StorageError, DiskFull or TryAgain; then nothing was changed,
    or (only when the process or the disk died) it cannot be known: read again."""

    @property
    def revision(self) -> int:
        """Return the revision of the last change."""

    def get(self, key: str) -> Optional[Entry]:
        """Return the object, None when there is none."""

    def range(self, prefix: str) -> List[Entry]:
        """Return every object whose key starts with ``prefix``, by key."""

    def txn(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Optional[int]:
        """Do all of it and return the new revision once it is on disk; None when a compare failed."""

    def watch(self, after: int, timeout: float) -> Changes:
        """Return what changed after that revision; waits up to ``timeout`` seconds for a first change."""

    def close(self) -> None:
        """Finish what was accepted, then let go."""


def put(store: Store, key: str, value: Any) -> int:
    """Write one object, whatever was there."""
    revision = store.txn((), (Put(key, value),))
    assert revision is not None       # nothing was compared
    return revision
