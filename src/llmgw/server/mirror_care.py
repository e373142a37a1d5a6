"""Look after the mirror: read blobs again, and find what nobody needs any more."""
from __future__ import annotations

import contextlib
import logging
import os
import time
from dataclasses import dataclass
from typing import Iterable, Iterator, List, Sequence, Set, Tuple

from llmgw.domain.errors import NotFound
from llmgw.domain.model import CHUNK_BYTES, Weights
from llmgw.server.mirror import Mirror
from llmgw.system import files, hashing

log = logging.getLogger(__name__)

# Younger blobs may belong to an import that has not ended; it names them in its last step.
BLOB_AGE_SECONDS = 3600.0
PART_AGE_SECONDS = 24 * 3600.0


@dataclass(frozen=True)
class Leftover:
    """A file of the mirror that nothing names. ``what`` is blob, upload or download."""

    path: str                 # below the mirror's folder
    size_bytes: int
    what: str


class Care:
    """Works on the mirror's own files only."""

    def __init__(self, mirror: Mirror) -> None:
        self._mirror = mirror

    def verify(self, digest: str, needed: Iterable[Weights]) -> str:
        """Return what is wrong with a blob, empty when nothing is. A damaged one is not served any more."""
        if not self._mirror.has(digest):
            raise NotFound(f"no such blob in the mirror: {digest}")
        path = self._mirror.path(digest)
        actual, chunks, size = hashing.hash_file(path)
        if actual == digest:
            return ""
        good = _good_bytes(chunks, self._known_chunks(digest, needed))
        log.error("blob damaged digest=%s size_bytes=%d good_bytes=%d", digest, size, good)
        self._mirror.retire(digest, good)
        return (f"its sha256 is {actual}; it is not served any more"
                + (f", and the next import of it goes on at byte {good}" if good else ""))

    def _known_chunks(self, digest: str, needed: Iterable[Weights]) -> Sequence[str]:
        return next((file.chunks for weights in [*self._mirror.models(), *needed] for file in weights.files
                     if file.sha256 == digest and file.chunks), ())

    def unused(self, needed: Iterable[Weights]) -> List[Leftover]:
        """Return what neither a name of the mirror nor ``needed`` needs, and is old enough to be nobody's work."""
        kept: Set[str] = self._mirror.named_digests() | {
            file.sha256 for weights in needed for file in weights.files}
        found = [Leftover(path, size, "blob") for path, name, size, age in self._files("blobs/sha256")
                 if name not in kept and age >= BLOB_AGE_SECONDS]
        for folder, what in (("uploads", "upload"), ("blobs/partial", "download")):
            found += [Leftover(path, size, what) for path, _, size, age in self._files(folder)
                      if age >= PART_AGE_SECONDS]
        return found

    def _files(self, folder: str) -> Iterator[Tuple[str, str, int, float]]:
        top = os.path.join(self._mirror.folder, *folder.split("/"))
        for name in sorted(os.listdir(top)) if os.path.isdir(top) else ():
            with contextlib.suppress(FileNotFoundError):
                stat = os.stat(os.path.join(top, name))
                yield f"{folder}/{name}", name, stat.st_size, time.time() - stat.st_mtime

    def remove(self, leftovers: Iterable[Leftover]) -> None:
        """Remove what ``unused`` found."""
        for leftover in leftovers:
            log.info("removed from the mirror what=%s path=%s size_bytes=%d", leftover.what, leftover.path,
                     leftover.size_bytes)
            files.remove(os.path.join(self._mirror.folder, leftover.path))


def _good_bytes(found: Sequence[str], known: Sequence[str]) -> int:
    """Return how many bytes at the start are as they should be, in whole chunks."""
    good = 0
    for actual, expected in zip(found, known):
        if actual != expected:
            break
        good += 1
    return good * CHUNK_BYTES if len(known) > good else 0
