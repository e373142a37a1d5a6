"""Bring a file here whole and proven, however often the transfer is cut: resume, verify, rename."""
from __future__ import annotations

import hashlib
import os
import re
import time
from typing import Callable, Mapping, Optional, Protocol, Sequence

from llmgw.domain.digest import sha256_hex
from llmgw.domain.errors import DigestMismatch, DiskFull, DownloadFailed, Unreachable
from llmgw.domain.model import CHUNK_BYTES
from llmgw.system import failpoint
from llmgw.system.files import free_bytes, fsync_dir, make_dir, remove, storage_error, storing

PIECE_BYTES = 256 << 10
SPACE_CHECK_BYTES = 64 << 20
CHUNK_TRIES = 3
STALLED_SECONDS = 60.0
STALLED_BYTES = 64 << 10          # less than this in STALLED_SECONDS is a stalled peer
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
        self._chunks = tuple(chunks) if len(chunks) == -(-size // CHUNK_BYTES) else ()
        self._reserve = reserve_bytes
        self._progress, self._stopping = progress, stopping
        self._stalled_seconds = stalled_seconds
        self._source: Optional[Source] = None
        self._source_at = -1
        self._unchecked_bytes = 0
        self._mark = (0.0, 0)                 # (time, bytes since) of the stall watch
        with storing("open", partial):
            self._file = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)

    def run(self) -> None:
        with storing("write", self._partial):
            have = min(os.fstat(self._file).st_size, self._size)
            os.ftruncate(self._file, have)
            self._check_space(self._size - have)
            whole = hashlib.sha256()
            for index, start in enumerate(range(0, self._size, CHUNK_BYTES)):
                end = min(start + CHUNK_BYTES, self._size)
                data = self._chunk(index, start, end, min(max(have - start, 0), end - start))
                whole.update(data)
                self._progress(end)
            if whole.hexdigest() != self._sha256:
                remove(self._partial)
                raise DigestMismatch(os.path.basename(self._partial), expected=self._sha256,
                                     actual=whole.hexdigest())
            os.fsync(self._file)

    def _chunk(self, index: int, start: int, end: int, have: int) -> bytes:
        """Return the proven bytes of one chunk, of which ``have`` lie on disk."""
        actual = ""
        for _ in range(CHUNK_TRIES):
            data = bytearray(os.pread(self._file, have, start) if have else b"")
            have = len(data)
            self._bring(data, start, end)
            actual = hashlib.sha256(data).hexdigest() if self._chunks else ""
            if not self._chunks or actual == sha256_hex(self._chunks[index]):
                return bytes(data)
            self._close_source()
            have = 0
        raise DigestMismatch(f"{os.path.basename(self._partial)}: bytes {start} to {end - 1}, "
                             f"fetched {CHUNK_TRIES} times", expected=self._chunks[index], actual=actual)

    def _bring(self, data: bytearray, start: int, end: int) -> None:
        """Fill ``data`` up to the chunk's end from the source, writing what comes to disk."""
        while start + len(data) < end:
            at = start + len(data)
            piece = self._read(at, min(PIECE_BYTES, end - at))
            os.pwrite(self._file, piece, at)
            data += piece
            self._check_while_writing(len(piece))
            self._progress(at + len(piece))

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
        self._watch_for_stall(len(piece))
        return piece

    def _open(self, at: int) -> None:
        self._close_source()
        source = self._source = self._open_at(at)
        self._mark = (time.monotonic(), 0)
        if source.status == 200:
            self._source_at = 0
            self._skip(at)                    # no Range there: it starts at 0, and so does reading
            return
        match = _RANGE.fullmatch(source.headers.get("content-range", ""))
        if source.status != 206 or match is None:
            raise DownloadFailed(f"asked for bytes from {at}, got status {source.status} without a range")
        first, _, total = (int(text) for text in match.groups())
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
            self._watch_for_stall(len(piece))

    def _watch_for_stall(self, count: int) -> None:
        since, bytes_since = self._mark
        bytes_since += count
        now = time.monotonic()
        if bytes_since >= STALLED_BYTES:
            self._mark = (now, 0)
        elif now - since > self._stalled_seconds:
            raise Unreachable(f"the transfer has stalled: {bytes_since} bytes in "
                              f"{now - since:.0f} seconds")
        else:
            self._mark = (since, bytes_since)

    def _check_while_writing(self, count: int) -> None:
        self._unchecked_bytes += count
        if self._unchecked_bytes >= SPACE_CHECK_BYTES:
            self._unchecked_bytes = 0
            self._check_space(0)
            failpoint.reach("fetch-in-the-middle")

    def _check_space(self, needed: int) -> None:
        folder = os.path.dirname(self._partial)
        free = free_bytes(folder)
        if free < needed + self._reserve:
            raise DiskFull(
                f"{folder}: {needed} bytes are needed and {self._reserve} kept free, {free} are left",
                hint="free some space there, or choose another data folder")

    def _close_source(self) -> None:
        if self._source is not None:
            self._source.close()
            self._source = None

    def close(self) -> None:
        self._close_source()
        os.close(self._file)


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
