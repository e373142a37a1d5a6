"""Bring a file here whole and proven, however often the transfer is cut: resume, verify, rename."""
from __future__ import annotations

import collections
import hashlib
import os
import re
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Callable, Deque, Mapping, Optional, Protocol, Sequence, Tuple

from llmgw.domain.digest import sha256_hex
from llmgw.domain.errors import DigestMismatch, DownloadFailed
from llmgw.domain.model import CHUNK_BYTES, chunk_count
from llmgw.system import failpoint
from llmgw.system.files import check_space, fsync_dir, make_dir, remove, storage_error, storing, write_at
from llmgw.system.stall import STALLED_SECONDS, Stall

PIECE_BYTES = 256 << 10
SPACE_CHECK_BYTES = 64 << 20
CHUNK_TRIES = 3
AHEAD = 2                         # chunks received and not yet proven, and proven and not yet hashed
_RANGE = re.compile(r"bytes (\d{1,15})-(\d{1,15})/(\d{1,15})")


class Source(Protocol):
    """An HTTP answer that is read in pieces; system/http_client.Stream is one."""

    status: int

    @property
    def headers(self) -> Mapping[str, str]: ...

    def read(self, size: int) -> bytes: ...

    def close(self) -> None: ...


class Stopped(DownloadFailed):
    """Asked to stop; what has come so far is kept."""

    reason = "Stopped"


def fetch(open_at: Callable[[int], Source], target: str, *, sha256: str, size: int,
          chunks: Sequence[str] = (), partial: str = "", reserve_bytes: int = 0,
          progress: Callable[[int], None] = lambda done: None,
          stopping: Callable[[], bool] = lambda: False,
          stalled_seconds: float = STALLED_SECONDS) -> None:
    """Bring the file that ``open_at(offset)`` reads to ``target``; its digest decides whether it is.

    Each 8 MiB piece is checked as it comes when ``chunks`` are known, and only a
    bad one is fetched again. What has come survives in ``partial`` and is read,
    not trusted, when fetching goes on. DigestMismatch removes it.
    """
    partial = partial or target + ".part"
    make_dir(os.path.dirname(target), 0o755)
    make_dir(os.path.dirname(partial), 0o755)
    job = _Fetch(open_at, partial, sha256_hex(sha256), size, chunks, reserve_bytes, progress, stopping,
                 stalled_seconds)
    try:
        job.run()
    finally:
        job.close()
    put_in_place(partial, target)


def put_in_place(partial: str, target: str) -> None:
    """Give a file that is whole and proven its name, for good."""
    failpoint.reach("fetch-before-rename")
    with storing("rename", partial):
        os.replace(partial, target)
        fsync_dir(os.path.dirname(target))
    failpoint.reach("fetch-after-rename")


class _Fetch:
    """One transfer. The file is worked through chunk by chunk, each from disk or from the source."""

    def __init__(self, open_at: Callable[[int], Source], partial: str, sha256: str, size: int,
                 chunks: Sequence[str], reserve_bytes: int, progress: Callable[[int], None],
                 stopping: Callable[[], bool], stalled_seconds: float) -> None:
        self._open_at, self._partial = open_at, partial
        self._sha256, self._size = sha256, size
        # a list that does not cover the file proves nothing about it
        self._chunks = tuple(chunks) if len(chunks) == chunk_count(size) else ()
        self._reserve = reserve_bytes
        self._progress, self._stopping = progress, stopping
        self._stalled_seconds = stalled_seconds
        self._source: Optional[Source] = None
        self._source_at = -1
        self._unchecked_bytes = 0
        self._watch = Stall(stalled_seconds)
        self._told = 0
        self._whole = hashlib.sha256()
        self._received: Deque[Tuple[int, Future[Tuple[bytes, str]]]] = collections.deque()
        self._hashing: Deque[Future[None]] = collections.deque()
        with storing("open", partial):
            self._file = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)

    def run(self) -> None:
        """Receive, prove and hash at once: while one chunk comes, those before it are looked at."""
        with storing("write", self._partial):
            have = min(os.fstat(self._file).st_size, self._size)
            os.ftruncate(self._file, have)
            self._check_space(self._size - have)
            with ThreadPoolExecutor(1, "chunk-sha256") as prover, ThreadPoolExecutor(1, "file-sha256") as hasher:
                self._prover, self._hasher = prover, hasher
                for start in range(0, self._size, CHUNK_BYTES):
                    end = min(start + CHUNK_BYTES, self._size)
                    self._received.append((start, self._receive(start, end, min(max(have - start, 0), end - start))))
                    self._settle(AHEAD)
                self._settle(0)
            actual = self._whole.hexdigest()
            if actual != self._sha256:
                remove(self._partial)
                raise DigestMismatch(os.path.basename(self._partial), expected=self._sha256, actual=actual)
            os.fsync(self._file)

    def _receive(self, start: int, end: int, have: int) -> "Future[Tuple[bytes, str]]":
        """Return a chunk, of which ``have`` bytes lie on disk, and the digest it turns out to have."""
        data = bytearray(os.pread(self._file, have, start) if have else b"")
        self._tell(start + have)
        self._bring(data, start, end)
        return self._prover.submit(_digest, bytes(data), bool(self._chunks))

    def _settle(self, ahead: int) -> None:
        """Prove the oldest chunks until only ``ahead`` are open; a bad one is fetched again, and only that one."""
        while len(self._received) > ahead:
            start, pending = self._received.popleft()
            data, actual = pending.result()
            end = start + len(data)
            for _ in range(CHUNK_TRIES - 1):
                if self._is_good(start, actual):
                    break
                self._close_source()
                data, actual = self._receive(start, end, 0).result()
            if not self._is_good(start, actual):
                raise DigestMismatch(f"{os.path.basename(self._partial)}: bytes {start} to {end - 1}, "
                                     f"fetched {CHUNK_TRIES} times",
                                     expected=self._chunks[start // CHUNK_BYTES], actual=actual)
            self._hashing.append(self._hasher.submit(self._whole.update, data))
            while len(self._hashing) > AHEAD or (not ahead and self._hashing):
                self._hashing.popleft().result()

    def _tell(self, done: int) -> None:
        self._told = max(self._told, done)        # fetching a bad chunk again is no step back
        self._progress(self._told)

    def _is_good(self, start: int, actual: str) -> bool:
        return not self._chunks or actual == sha256_hex(self._chunks[start // CHUNK_BYTES])

    def _bring(self, data: bytearray, start: int, end: int) -> None:
        """Fill ``data`` up to the chunk's end from the source, writing what comes to disk."""
        while start + len(data) < end:
            at = start + len(data)
            piece = self._read(at, min(PIECE_BYTES, end - at))
            write_at(self._file, piece, at)
            data += piece
            self._check_while_writing(len(piece))
            self._tell(at + len(piece))

    def _read(self, at: int, size: int) -> bytes:
        if self._stopping():
            raise Stopped(f"{os.path.basename(self._partial)}: stopped at {at} of {self._size} bytes")
        if self._source is None or self._source_at != at:
            self._open(at)
        assert self._source is not None
        piece = self._source.read(size)
        if not piece:
            raise DownloadFailed(f"the transfer ended at {at} of {self._size} bytes")
        self._source_at += len(piece)
        self._watch.saw(len(piece))
        return piece

    def _open(self, at: int) -> None:
        self._close_source()
        source = self._source = self._open_at(at)
        self._watch = Stall(self._stalled_seconds)
        if source.status == 200:
            length = source.headers.get("content-length", "")
            if re.fullmatch("[0-9]{1,15}", length) and int(length) != self._size:
                raise DownloadFailed(f"the file has {int(length)} bytes at its source, {self._size} are expected")
            self._source_at = 0
            self._skip(at)                    # no Range there: it starts at 0, and so does reading
            return
        found = content_range(source)
        if source.status != 206 or found is None:
            raise DownloadFailed(f"asked for bytes from {at}, got status {source.status} without a range")
        first, _, total = found
        if first != at or total != self._size:
            raise DownloadFailed(f"asked for bytes from {at} of {self._size}, "
                                 f"got bytes from {first} of {total}")
        self._source_at = at

    def _skip(self, count: int) -> None:
        assert self._source is not None
        while count > 0:
            piece = self._source.read(min(PIECE_BYTES, count))
            if not piece:
                raise DownloadFailed(f"the transfer ended before byte {self._source_at + count}")
            count -= len(piece)
            self._source_at += len(piece)
            self._watch.saw(len(piece))

    def _check_while_writing(self, count: int) -> None:
        self._unchecked_bytes += count
        if self._unchecked_bytes >= SPACE_CHECK_BYTES:
            self._unchecked_bytes = 0
            self._check_space(0)
            failpoint.reach("fetch-in-the-middle")

    def _check_space(self, needed: int) -> None:
        check_space(os.path.dirname(self._partial), needed, self._reserve)

    def _close_source(self) -> None:
        if self._source is not None:
            self._source.close()
            self._source = None

    def close(self) -> None:
        self._close_source()
        os.close(self._file)


def content_range(source: Source) -> Optional[Tuple[int, int, int]]:
    """Return (first, last, total) of a partial answer, None when it says nothing of the kind."""
    match = _RANGE.fullmatch(source.headers.get("content-range", ""))
    return (int(match.group(1)), int(match.group(2)), int(match.group(3))) if match else None


def _digest(data: bytes, needed: bool) -> Tuple[bytes, str]:
    return data, hashlib.sha256(data).hexdigest() if needed else ""


def damage(path: str, size: int, chunks: Sequence[str], sha256: str) -> str:
    """Return what is wrong with a file that should be whole, in words; empty when nothing is."""
    try:
        with open(path, "rb") as source:
            if os.fstat(source.fileno()).st_size != size:
                return f"{os.path.basename(path)} has {os.fstat(source.fileno()).st_size} bytes, not {size}"
            whole = hashlib.sha256()
            for piece in iter(lambda: source.read(CHUNK_BYTES), b""):
                whole.update(piece)
    except FileNotFoundError:
        return f"{os.path.basename(path)} is gone"
    except OSError as error:
        raise storage_error("read", path, error) from error
    return "" if whole.hexdigest() == sha256_hex(sha256) else f"{os.path.basename(path)} has changed on disk"
