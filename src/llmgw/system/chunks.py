"""Bring a file of known chunks here from several sources at once, each chunk proven as it comes.

A chunk lies at its own place in the partial file. What an earlier try left is read, not trusted,
and holes are stepped over. A source that sends a wrong chunk costs that chunk, no more.
"""
from __future__ import annotations

import collections
import errno
import hashlib
import logging
import os
import threading
import time
from dataclasses import dataclass
from typing import Callable, Deque, Dict, List, Optional, Protocol, Sequence, Set, Tuple

from llmgw.domain.digest import sha256_hex
from llmgw.domain.errors import DigestMismatch, DownloadFailed, LlmgwError, Unreachable
from llmgw.domain.model import CHUNK_BYTES
from llmgw.system import failpoint
from llmgw.system.download import (
    PIECE_BYTES,
    STALLED_BYTES,
    STALLED_SECONDS,
    Source,
    Stopped,
    content_range,
    put_in_place,
)
from llmgw.system.files import check_space, make_dir, storage_error, storing

log = logging.getLogger(__name__)

STREAMS = 4               # at once from the control plane, and from each peer
RUN_CHUNKS = 8            # asked for in one request
CHUNK_TRIES = 3
SPACE_CHECK_CHUNKS = 8    # 64 MiB


class Filler(Source, Protocol):
    """An answer that can be read into a buffer; system/http_client.Stream is one."""

    def read_into(self, view: memoryview) -> int: ...


class Supplier(Protocol):
    """Somebody who has the file. One that is ``spare`` may fail without anybody minding."""

    name: str
    spare: bool

    def open(self, first: int, end: int) -> Filler: ...


@dataclass
class Bad:
    """A chunk that was wrong, and who sent it."""

    index: int
    supplier: str


class Transfer:
    """One file. ``run`` may be called from one thread; its workers are its own."""

    def __init__(self, suppliers: Sequence[Supplier], path: str, size: int, chunks: Sequence[str], *,
                 reserve_bytes: int = 0, streams: int = STREAMS,
                 progress: Callable[[int], None] = lambda done: None, stopping: Callable[[], bool] = lambda: False,
                 stalled_seconds: float = STALLED_SECONDS) -> None:
        if len(chunks) != -(-size // CHUNK_BYTES):
            raise DownloadFailed(f"{os.path.basename(path)}: {len(chunks)} chunks are no file of {size} bytes")
        self._suppliers, self._path, self._size = list(suppliers), path, size
        self._chunks = [sha256_hex(chunk) for chunk in chunks]
        self._reserve, self._streams = reserve_bytes, streams
        self._progress, self._stopping, self._stalled = progress, stopping, stalled_seconds
        self._lock = threading.Lock()
        self._missing: Deque[int] = collections.deque()
        self._done_bytes = 0
        self._written_chunks = 0
        self._tries: Dict[int, int] = {}
        self._stale: Set[int] = set()             # chunks whose place holds nothing to go on with
        self._errors: List[LlmgwError] = []
        self._gone: Set[str] = set()              # suppliers that are asked no more
        self.bad: List[Bad] = []
        self._file = -1

    def run(self, only: Optional[Sequence[int]] = None) -> None:
        """Bring all chunks that are not here, or ``only`` these over what is here; raises what kept it from it."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_NOFOLLOW if only is None else 0)
        with storing("open", self._path):
            self._file = os.open(self._path, flags, 0o644)
        try:
            with storing("write", self._path):
                os.ftruncate(self._file, min(os.fstat(self._file).st_size, self._size))
                self._plan(only)
                self._check_space(sum(self._length(index) for index in self._missing))
                self._rounds()
                os.fsync(self._file)
        finally:
            os.close(self._file)

    def _plan(self, only: Optional[Sequence[int]]) -> None:
        if only is not None:
            self._missing.extend(only)
            self._stale.update(only)
            self._done_bytes = self._size - sum(map(self._length, only))
            return
        for index in range(len(self._chunks)):
            self._halt_when_told()
            if self._is_here(index):
                self._count(self._length(index))
            else:
                self._missing.append(index)

    def _rounds(self) -> None:
        """Work until nothing is missing; a supplier that failed is not asked again in this transfer."""
        while self._missing:
            live = [supplier for supplier in self._suppliers if supplier.name not in self._gone]
            if not live:
                break
            workers = [threading.Thread(target=self._work, args=(supplier,), name=f"fetch-{supplier.name}", daemon=True)
                       for supplier in live for _ in range(self._streams)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            if self._errors or self._stopping():
                break
        self._halt_when_told()
        if self._errors:
            raise self._errors[0]
        if self._missing:
            raise DownloadFailed(f"{os.path.basename(self._path)}: nobody had the rest of it")

    def _work(self, supplier: Supplier) -> None:
        buffer = memoryview(bytearray(PIECE_BYTES))
        while True:
            run = self._take(supplier)
            if not run:
                return
            try:
                self._bring(supplier, run, buffer)
            except LlmgwError as error:
                self._give_up(supplier, error)
                return
            except OSError as error:
                with self._lock:
                    self._errors.append(storage_error("write", self._path, error))
                return
            finally:
                if run:
                    with self._lock:
                        self._missing.extendleft(reversed(run))

    def _take(self, supplier: Supplier) -> List[int]:
        """Return the next chunks that follow on each other; they are this worker's until it drops them."""
        with self._lock:
            if self._errors or supplier.name in self._gone:
                return []
            share = -(-len(self._missing) // max(1, self._streams * len(self._suppliers)))
            run: List[int] = []
            while self._missing and len(run) < min(RUN_CHUNKS, max(1, share)):
                if run and self._missing[0] != run[-1] + 1:
                    break
                run.append(self._missing.popleft())
            return run

    def _bring(self, supplier: Supplier, run: List[int], buffer: memoryview) -> None:
        """Receive the chunks of ``run``, taking each out of it as it is proven and written."""
        have, digest = self._begun(run[0])
        first = run[0] * CHUNK_BYTES + have
        source = supplier.open(first, min((run[-1] + 1) * CHUNK_BYTES, self._size))
        try:
            _check_answer(source, first, self._size)
            watch = _Stall(self._stalled)
            while run:
                self._receive(source, buffer, run[0], have, digest, watch)
                if not self._prove(supplier, run[0], digest.hexdigest()):
                    return
                run.pop(0)
                have, digest = 0, hashlib.sha256()
        finally:
            source.close()

    def _receive(self, source: Filler, buffer: memoryview, index: int, have: int, digest: "hashlib._Hash",
                 watch: "_Stall") -> None:
        """Write and hash a chunk piece by piece, while each piece is still in the processor's cache."""
        length, start = self._length(index), index * CHUNK_BYTES
        while have < length:
            self._halt_when_told()
            count = source.read_into(buffer[:min(PIECE_BYTES, length - have)])
            if not count:
                raise DownloadFailed(f"the transfer ended at {start + have} of {self._size} bytes")
            piece = buffer[:count]
            os.pwrite(self._file, piece, start + have)
            digest.update(piece)
            have += count
            watch.saw(count)
        failpoint.reach("fetch-in-the-middle")

    def _prove(self, supplier: Supplier, index: int, actual: str) -> bool:
        length = self._length(index)
        if actual == self._chunks[index]:
            self._count(length)
            return True
        start = index * CHUNK_BYTES
        where = f"{os.path.basename(self._path)}: bytes {start} to {start + length - 1}"
        log.warning("%s came wrong from %s: this chunk is fetched again", where, supplier.name)
        with self._lock:
            self._stale.add(index)
            self.bad.append(Bad(index, supplier.name))
            self._tries[index] = self._tries.get(index, 0) + (not supplier.spare)
            if supplier.spare:
                self._gone.add(supplier.name)     # its digest would have told the truth
            elif self._tries[index] >= CHUNK_TRIES:
                self._errors.append(DigestMismatch(f"{where}, fetched {CHUNK_TRIES} times",
                                                   expected=self._chunks[index], actual=actual))
        return False

    def _give_up(self, supplier: Supplier, error: LlmgwError) -> None:
        with self._lock:
            if supplier.spare and not isinstance(error, Stopped):
                if supplier.name not in self._gone:
                    log.info("no more from %s: %s", supplier.name, error.message)
                self._gone.add(supplier.name)
            else:
                self._errors.append(error)

    # The file.

    def _length(self, index: int) -> int:
        return min(CHUNK_BYTES, self._size - index * CHUNK_BYTES)

    def _begun(self, index: int) -> Tuple[int, "hashlib._Hash"]:
        """Return how much an earlier try received of a chunk, and the hash of it so far."""
        have = 0 if index in self._stale else min(self._extent(index), self._length(index) - 1)
        kept = os.pread(self._file, have, index * CHUNK_BYTES) if have else b""
        return len(kept), hashlib.sha256(kept)

    def _extent(self, index: int) -> int:
        """Return how many bytes lie at the start of a chunk without a hole."""
        start = index * CHUNK_BYTES
        try:
            if os.lseek(self._file, start, os.SEEK_DATA) != start:
                return 0
            return min(os.lseek(self._file, start, os.SEEK_HOLE) - start, self._length(index))
        except OSError as error:
            if error.errno == errno.ENXIO:        # behind the end of the file
                return 0
            raise

    def _is_here(self, index: int) -> bool:
        length = self._length(index)
        if self._extent(index) < length:
            return False
        data = os.pread(self._file, length, index * CHUNK_BYTES)
        if hashlib.sha256(data).hexdigest() == self._chunks[index]:
            return True
        self._stale.add(index)
        return False

    def _count(self, more: int) -> None:
        with self._lock:
            self._done_bytes += more
            self._written_chunks += 1
            done, look = self._done_bytes, self._written_chunks % SPACE_CHECK_CHUNKS == 0
        self._progress(done)
        if look:
            self._check_space(0)

    def _check_space(self, needed: int) -> None:
        check_space(os.path.dirname(self._path), needed, self._reserve)

    def _halt_when_told(self) -> None:
        if self._stopping():
            raise Stopped(f"{os.path.basename(self._path)}: stopped at {self._done_bytes} of {self._size} bytes")


class _Stall:
    """Raises when a source sends next to nothing for too long."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._since, self._bytes = seconds, time.monotonic(), 0

    def saw(self, count: int) -> None:
        self._bytes += count
        now = time.monotonic()
        if self._bytes >= STALLED_BYTES:
            self._since, self._bytes = now, 0
        elif now - self._since > self._seconds:
            raise Unreachable(f"the transfer has stalled: {self._bytes} bytes in {now - self._since:.0f} seconds")


def _check_answer(source: Source, first: int, size: int) -> None:
    """Refuse an answer that does not start where it was asked to."""
    if source.status == 200 and first == 0:
        return                                    # no ranges there, and none is needed
    found = content_range(source)
    if source.status != 206 or found is None:
        raise DownloadFailed(f"asked for bytes from {first}, got status {source.status} without a range")
    if found[0] != first or found[2] != size:
        raise DownloadFailed(f"asked for bytes from {first} of {size}, got bytes from {found[0]} of {found[2]}")




def bring(suppliers: Sequence[Supplier], target: str, *, size: int, chunks: Sequence[str], partial: str,
          reserve_bytes: int = 0, streams: int = STREAMS, progress: Callable[[int], None] = lambda done: None,
          stopping: Callable[[], bool] = lambda: False, stalled_seconds: float = STALLED_SECONDS) -> List[Bad]:
    """Bring a whole file to ``target`` and return the chunks that came wrong on the way."""
    make_dir(os.path.dirname(target), 0o755)
    make_dir(os.path.dirname(partial), 0o755)
    job = Transfer(suppliers, partial, size, chunks, reserve_bytes=reserve_bytes, streams=streams, progress=progress,
                   stopping=stopping, stalled_seconds=stalled_seconds)
    job.run()
    put_in_place(partial, target)
    return job.bad


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
        raise storage_error("write", path, error) from error
