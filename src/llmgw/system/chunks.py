"""Bring a file of known chunks here from several sources at once, each chunk proven as it comes.

A chunk lies at its own place in the partial file. What an earlier try left is read, not trusted,
and holes are stepped over. A source that sends a wrong chunk costs that chunk, no more.
"""
from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from dataclasses import dataclass, field
from typing import Callable, Dict, List, Mapping, Optional, Protocol, Sequence, Set, Tuple

from llmgw.domain.digest import sha256_hex
from llmgw.domain.errors import DigestMismatch, DiskFull, DownloadFailed, LlmgwError, StorageError, TryAgain
from llmgw.domain.model import CHUNK_BYTES, chunk_count
from llmgw.system import failpoint
from llmgw.system.chunk_file import ChunkFile
from llmgw.system.download import PIECE_BYTES, Source, Stopped, content_range, put_in_place
from llmgw.system.files import check_space, make_dir, storage_error, storing, write_at
from llmgw.system.have import Have, forget
from llmgw.system.shares import COMING, HERE, NOTHING, Patience, Shares
from llmgw.system.stall import STALLED_SECONDS, Stall

log = logging.getLogger(__name__)

STREAMS = 4               # at once from the source
PEER_STREAMS = 2          # ... and from each peer
RUN_CHUNKS = 8            # asked for in one request
CHUNK_TRIES = 3
SPACE_CHECK_CHUNKS = 8    # 64 MiB
TURN_SECONDS = 0.5        # between two looks at what peers have, and at who they are
ANSWER_SECONDS = 6.0      # a peer that has not answered for so long after the start has nothing
PEER_SECONDS = 5.0        # of next to nothing: it is asked no more
PEER_CHUNK_SECONDS = 15.0  # in which a chunk of a peer has come, or it is asked no more
REST_SECONDS = 15.0       # a source that failed is not asked for so long, while peers go on


class Filler(Source, Protocol):
    """An answer that can be read into a buffer; system/http_client.Stream is one."""

    def read_into(self, view: memoryview) -> int: ...


class Supplier(Protocol):
    """Somebody who has the file. One that is ``spare`` is a peer: it may fail without anybody minding.

    ``open`` may raise TryAgain: it has too much to do.
    """

    name: str
    spare: bool

    def open(self, first: int, end: int) -> Filler: ...

    def look(self) -> str:
        """Return what a peer has now, a letter for each chunk; empty: it neither has nor fetches the file."""
        ...

    def dropped(self, lied: bool) -> None:
        """Take note that this peer is asked no more."""
        ...


@dataclass
class Bad:
    """A chunk that was wrong, and who sent it."""

    index: int
    supplier: str


@dataclass(frozen=True)
class Brought:
    """What went wrong on the way, and how many bytes came from whom."""

    bad: Tuple[Bad, ...] = ()
    by: Mapping[str, int] = field(default_factory=dict)


class Transfer:
    """One file. ``run`` may be called from one thread; its workers are its own.

    ``suppliers`` is asked again and again: peers may come while it runs. ``share`` tells which part, of how many,
    this node begins with; None: it is alone, and none will come.
    """

    def __init__(self, suppliers: Callable[[], Sequence[Supplier]], path: str, size: int, chunks: Sequence[str], *,
                 reserve_bytes: int = 0, streams: int = STREAMS,
                 progress: Callable[[int], None] = lambda done: None, stopping: Callable[[], bool] = lambda: False,
                 stalled_seconds: float = STALLED_SECONDS, rest_seconds: float = REST_SECONDS,
                 share: Optional[Callable[[], Tuple[int, int]]] = None, patience: Optional[Patience] = None) -> None:
        if len(chunks) != chunk_count(size):
            raise DownloadFailed(f"{os.path.basename(path)}: {len(chunks)} chunks are no file of {size} bytes")
        self._suppliers, self._path, self._size, self._share = suppliers, path, size, share
        self._chunks = [sha256_hex(chunk) for chunk in chunks]
        self._reserve, self._streams = reserve_bytes, streams
        self._progress, self._stopping = progress, stopping
        self._stalled, self._rest = stalled_seconds, rest_seconds
        self._news = threading.Condition()        # its lock is around all that follows
        self._shares = Shares(len(chunks), patience)
        self._done_bytes = 0
        self._written_chunks = 0
        self._runs = 0                            # that the source was asked for
        self._errors: List[LlmgwError] = []
        self._hired: Set[str] = set()
        self._gone: Set[str] = set()              # suppliers that are asked no more
        self._failure: Optional[LlmgwError] = None         # of the source, which has sent nothing since
        self._rests_until = 0.0
        self._bad: List[Bad] = []
        self._by: Dict[str, int] = {}
        self._place = ChunkFile(path, size, self._chunks)
        self._have: Optional[Have] = None

    def run(self, only: Optional[Sequence[int]] = None) -> Brought:
        """Bring all chunks that are not here, or ``only`` these over what is here; raises what kept it from it."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_NOFOLLOW if only is None else 0)
        with storing("open", self._path):
            self._place.open(flags)
        try:
            with storing("write", self._path):
                self._plan(only)
                self._check_space(sum(map(self._place.length, self._shares.missing)))
                self._work_all()
                os.fsync(self._place.file)
        finally:
            os.close(self._place.file)
            if self._have is not None:
                self._have.close()
        return Brought(tuple(self._bad), dict(self._by))

    def _plan(self, only: Optional[Sequence[int]]) -> None:
        if only is not None:
            self._shares.missing.update(only)
            self._place.stale.update(only)
            self._done_bytes = self._size - sum(map(self._place.length, only))
            return
        self._have = Have(self._path, self._size)
        for index in range(len(self._chunks)):
            self._halt_when_told()
            if self._place.is_here(index):
                self._count(index)
            else:
                self._shares.missing.add(index)

    def _work_all(self) -> None:
        """Work until nothing is missing; a peer that failed is not asked again in this transfer."""
        workers: List[threading.Thread] = []
        while not self._is_over():
            workers += self._hire()
            with self._news:
                self._news.wait_for(self._is_over, TURN_SECONDS)
        for worker in workers:
            worker.join()
        self._halt_when_told()
        if self._errors:
            raise self._errors[0]
        if not self._shares.is_done:
            raise self._failure or DownloadFailed(f"{os.path.basename(self._path)}: nobody had the rest of it")

    def _is_over(self) -> bool:
        with self._news:
            return bool(self._shares.is_done or self._errors or self._stopping() or
                        (self._hired and self._hired == self._gone) or
                        (self._failure is not None and not self._shares.is_hoped_for))

    def _hire(self) -> List[threading.Thread]:
        """Begin to ask whom we do not ask yet."""
        new = [supplier for supplier in self._suppliers() if supplier.name not in self._hired]
        peers = [supplier for supplier in new if supplier.spare]
        workers = [threading.Thread(target=self._work, args=(supplier,), name=f"fetch-{supplier.name}", daemon=True)
                   for supplier in new for _ in range(PEER_STREAMS if supplier.spare else self._streams)]
        with self._news:
            self._hired.update(supplier.name for supplier in new)
            for peer in peers:
                self._shares.add(peer.name)
            if self._share is not None:
                self._shares.begin(*self._share())
        for worker in workers:
            worker.start()
        for peer in peers:                        # not waited for at the end: it writes nothing
            threading.Thread(target=self._look, args=(peer,), name=f"look-{peer.name}", daemon=True).start()
        return workers

    def _look(self, peer: Supplier) -> None:
        """Learn what a peer has until it has everything."""
        began = time.monotonic()
        while not self._is_over() and peer.name not in self._gone:
            try:
                said: Optional[str] = peer.look()
            except LlmgwError as error:
                log.debug("not told by %s what it has: %s", peer.name, error.message)
                said = None
            with self._news:
                if said is not None:
                    self._shares.know(peer.name, said)
                elif self._shares.is_unknown(peer.name) and time.monotonic() - began >= ANSWER_SECONDS:
                    self._shares.know(peer.name, "")
                    peer.dropped(False)
                self._news.notify_all()
                if said == HERE * len(self._chunks):
                    return
                self._news.wait_for(self._is_over, TURN_SECONDS)

    def _work(self, supplier: Supplier) -> None:
        buffer = memoryview(bytearray(PIECE_BYTES))
        while True:
            run = self._take(supplier)
            if not run:
                return
            began, count, busy = time.monotonic(), len(run), False
            try:
                if not supplier.spare:
                    self._mark(run, COMING)
                self._bring(supplier, run, buffer)
            except TryAgain:
                busy = True
            except LlmgwError as error:
                self._give_up(supplier, run, error)
            except OSError as error:
                with self._news:
                    self._errors.append(storage_error("write", self._path, error))
            finally:
                self._mark(run, NOTHING)
                with self._news:
                    self._shares.give_back(run)
                    if not supplier.spare:
                        self._shares.source_is_done((count - len(run)) * CHUNK_BYTES, time.monotonic() - began)
                    self._news.notify_all()
                    self._news.wait_for(self._is_over, TURN_SECONDS if busy else 0)     # others may have it meanwhile

    def _take(self, supplier: Supplier) -> List[int]:
        """Return chunks that follow on each other, and are this worker's until it drops them; empty at the end."""
        with self._news:
            while not self._is_over() and supplier.name not in self._gone:
                run = self._shares.for_peer(supplier.name) if supplier.spare else self._run_of_source()
                if run:
                    self._runs += not supplier.spare
                    return run
                self._news.wait(TURN_SECONDS / 2)
            return []

    def _run_of_source(self) -> List[int]:
        now = time.monotonic()
        return self._shares.for_source(now, self._streams, self._run_chunks()) if now >= self._rests_until else []

    def _run_chunks(self) -> int:
        """A node among others begins with little: those that begin with it may not have been told of it yet."""
        return min(RUN_CHUNKS, 1 << (self._runs // self._streams)) if self._share is not None else RUN_CHUNKS

    def _bring(self, supplier: Supplier, run: List[int], buffer: memoryview) -> None:
        """Receive the chunks of ``run``, taking each out of it as it is proven and written."""
        have, digest = self._place.begun(run[0])
        first, begun = run[0] * CHUNK_BYTES + have, have > 0
        source = supplier.open(first, min((run[-1] + 1) * CHUNK_BYTES, self._size))
        try:
            _check_answer(source, first, self._size)
            watch = Stall(PEER_SECONDS, PEER_CHUNK_SECONDS) if supplier.spare else Stall(self._stalled)
            while run:
                watch.begins()
                self._receive(supplier, source, buffer, run[0], have, digest, watch)
                if not self._prove(supplier, run[0], digest.hexdigest(), begun):
                    return
                with self._news:
                    if not supplier.spare:
                        self._failure = None
                    self._shares.came()
                    self._by[supplier.name] = self._by.get(supplier.name, 0) + self._place.length(run[0]) - have
                    self._news.notify_all()
                run.pop(0)
                have, digest, begun = 0, hashlib.sha256(), False
        finally:
            source.close()

    def _receive(self, supplier: Supplier, source: Filler, buffer: memoryview, index: int, have: int,
                 digest: "hashlib._Hash", watch: Stall) -> None:
        """Write and hash a chunk piece by piece, while each piece is still in the processor's cache."""
        length, start = self._place.length(index), index * CHUNK_BYTES
        while have < length:
            self._halt_when_told()
            count = source.read_into(buffer[:min(PIECE_BYTES, length - have)])
            if not count:
                raise DownloadFailed(f"the transfer ended at {start + have} of {self._size} bytes")
            piece = buffer[:count]
            write_at(self._place.file, piece, start + have)
            digest.update(piece)
            have += count
            watch.saw(count)
            if supplier.spare:
                with self._news:
                    self._shares.peer_brought(count)
        failpoint.reach("fetch-in-the-middle")

    def _prove(self, supplier: Supplier, index: int, actual: str, begun: bool) -> bool:
        """Count a chunk that is right; ``begun``: a part of it lay here from before, and may be what is wrong."""
        if actual == self._chunks[index]:
            self._place.begin_to_write(index)
            self._count(index)
            return True
        start = index * CHUNK_BYTES
        where = f"{os.path.basename(self._path)}: bytes {start} to {start + self._place.length(index) - 1}"
        with self._news:
            self._place.stale.add(index)
            if begun:
                log.info("%s came wrong, or what lay here of it was: this chunk is fetched again", where)
                return False
            log.warning("%s came wrong from %s: this chunk is fetched again", where, supplier.name)
            self._bad.append(Bad(index, supplier.name))
            if not supplier.spare:
                self._shares.spoiled[index] += 1
            if self._shares.spoiled[index] >= CHUNK_TRIES and not self._shares.is_held(index):
                self._errors.append(DigestMismatch(f"{where}, fetched {CHUNK_TRIES} times",
                                                   expected=self._chunks[index], actual=actual))
        if supplier.spare:
            self._drop(supplier, lied=True)           # its digest would have told the truth
        return False

    def _give_up(self, supplier: Supplier, run: Sequence[int], error: LlmgwError) -> None:
        with self._news:
            if isinstance(error, (Stopped, DiskFull, StorageError)) or (
                    not supplier.spare and not self._shares.has_peers):
                self._errors.append(error)
                return
            if not supplier.spare:
                if self._failure is None:
                    log.warning("nothing comes from %s, other nodes go on: %s", supplier.name, error.message)
                self._failure, self._rests_until = error, time.monotonic() + self._rest
                return
            self._place.stale.update(run[:1])               # who goes on with it is not blamed for what came so far
            if supplier.name not in self._gone:
                log.info("no more from %s: %s", supplier.name, error.message)
        self._drop(supplier, lied=False)

    def _drop(self, supplier: Supplier, lied: bool) -> None:
        with self._news:
            self._gone.add(supplier.name)
            self._shares.drop(supplier.name)
            self._news.notify_all()
        supplier.dropped(lied)

    def _mark(self, run: Sequence[int], state: str) -> None:
        try:
            if self._have is not None:
                self._have.mark(run, state)
        except LlmgwError as error:
            with self._news:
                self._errors.append(error)

    def _count(self, index: int) -> None:
        self._mark([index], HERE)
        with self._news:
            self._done_bytes += self._place.length(index)
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


def _check_answer(source: Source, first: int, size: int) -> None:
    """Refuse an answer that does not start where it was asked to."""
    if source.status == 200 and first == 0:
        return                                    # no ranges there, and none is needed
    found = content_range(source)
    if source.status != 206 or found is None:
        raise DownloadFailed(f"asked for bytes from {first}, got status {source.status} without a range")
    if found[0] != first or found[2] != size:
        raise DownloadFailed(f"asked for bytes from {first} of {size}, got bytes from {found[0]} of {found[2]}")


def bring(suppliers: Callable[[], Sequence[Supplier]], target: str, *, size: int, chunks: Sequence[str], partial: str,
          reserve_bytes: int = 0, streams: int = STREAMS, progress: Callable[[int], None] = lambda done: None,
          stopping: Callable[[], bool] = lambda: False, stalled_seconds: float = STALLED_SECONDS,
          rest_seconds: float = REST_SECONDS, share: Optional[Callable[[], Tuple[int, int]]] = None,
          patience: Optional[Patience] = None) -> Brought:
    """Bring a whole file to ``target``."""
    make_dir(os.path.dirname(target), 0o755)
    make_dir(os.path.dirname(partial), 0o755)
    brought = Transfer(suppliers, partial, size, chunks, reserve_bytes=reserve_bytes, streams=streams,
                       progress=progress, stopping=stopping, stalled_seconds=stalled_seconds,
                       rest_seconds=rest_seconds, share=share, patience=patience).run()
    put_in_place(partial, target)
    forget(partial)
    return brought
