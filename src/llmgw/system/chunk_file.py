"""A file of known chunks on this disk: what of it is here, and what is not what it was."""
from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from typing import Callable, List, Sequence, Set, Tuple

from llmgw.domain.digest import sha256_hex
from llmgw.domain.model import CHUNK_BYTES
from llmgw.system.files import storage_error


class ChunkFile:
    """One file that is written chunk by chunk, in any order. Who opens it closes ``file``."""

    def __init__(self, path: str, size: int, chunks: Sequence[str]) -> None:
        self._path, self._size, self._chunks = path, size, chunks
        self.stale: Set[int] = set()              # chunks whose place holds nothing to go on with
        self.file = -1

    def open(self, flags: int) -> None:
        self.file = os.open(self._path, flags, 0o644)
        os.ftruncate(self.file, min(os.fstat(self.file).st_size, self._size))

    def length(self, index: int) -> int:
        return min(CHUNK_BYTES, self._size - index * CHUNK_BYTES)

    def begin_to_write(self, index: int) -> None:
        """Let the kernel write a chunk to the disk from now on; what waits for the end makes that last.

        Linux starts to write the dirty pages of the range and drops clean ones (mm/fadvise.c); these are all dirty.
        """
        with contextlib.suppress(OSError):        # advice: it fails later, where it matters
            os.posix_fadvise(self.file, index * CHUNK_BYTES, self.length(index), os.POSIX_FADV_DONTNEED)

    def begun(self, index: int) -> Tuple[int, "hashlib._Hash"]:
        """Return how much an earlier try received of a chunk, and the hash of it so far."""
        have = 0 if index in self.stale else min(self._extent(index), self.length(index) - 1)
        kept = os.pread(self.file, have, index * CHUNK_BYTES) if have else b""
        return len(kept), hashlib.sha256(kept)

    def _extent(self, index: int) -> int:
        """Return how many bytes lie at the start of a chunk without a hole."""
        start = index * CHUNK_BYTES
        try:
            if os.lseek(self.file, start, os.SEEK_DATA) != start:
                return 0
            return min(os.lseek(self.file, start, os.SEEK_HOLE) - start, self.length(index))
        except OSError as error:
            if error.errno == errno.ENXIO:        # behind the end of the file
                return 0
            raise

    def is_here(self, index: int) -> bool:
        """Return whether the right bytes lie at a chunk's place; wrong ones are not gone on with."""
        length = self.length(index)
        if self._extent(index) < length:
            return False
        data = os.pread(self.file, length, index * CHUNK_BYTES)
        if hashlib.sha256(data).hexdigest() == self._chunks[index]:
            return True
        self.stale.add(index)
        return False


def wrong(path: str, size: int, chunks: Sequence[str], *,
          pause: Callable[[int], None] = lambda count: None) -> List[int]:
    """Return which chunks of a file that should be whole are not what they were; every one when it is not there.

    ``pause`` is called with the bytes of each chunk that was read: a slow reader waits there.
    """
    try:
        with open(path, "rb") as source:
            if os.fstat(source.fileno()).st_size != size:
                return list(range(len(chunks)))
            bad = []
            for index, chunk in enumerate(chunks):
                data = source.read(CHUNK_BYTES)
                if hashlib.sha256(data).hexdigest() != sha256_hex(chunk):
                    bad.append(index)
                pause(len(data))
            return bad
    except FileNotFoundError:
        return list(range(len(chunks)))
    except OSError as error:
        if error.errno == errno.EIO:              # the disk itself says that it cannot be read
            return list(range(len(chunks)))
        raise storage_error("read", path, error) from error
