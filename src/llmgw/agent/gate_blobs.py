"""What other nodes of the fleet may read through the gate: ranges of blobs, by digest, a few at once; nothing else.

Files are opened and read in two threads of their own: requests to the engines go on meanwhile.
"""
from __future__ import annotations

import asyncio
import functools
import hashlib
import hmac
import os
import re
import stat
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Dict, NamedTuple, Optional, Tuple

from llmgw.agent.layout import Layout
from llmgw.domain.errors import LlmgwError, NotFound, ParseError
from llmgw.domain.gate import GateTable, PeerDoor
from llmgw.domain.model import CHUNK_BYTES, chunk_count
from llmgw.relay.reply import Reply, error_reply, json_reply
from llmgw.relay.server import Request
from llmgw.system import have
from llmgw.system.files import storage_error
from llmgw.system.http_head import byte_range
from llmgw.system.shares import HERE

PREFIX = b"/peer/blobs/"
PIECE_BYTES = 256 << 10
MOST_READERS = 4              # answers under way; the engines of this node come first
BUSY_SECONDS = 1
_PATH = re.compile(rb"/peer/blobs/([0-9a-f]{64})(/chunks)?")


class Part(NamedTuple):
    """An open file, and what of it was asked for."""

    file: int
    first: int
    length: int
    size: int
    whole: bool               # no range was asked for


class BlobDoor:
    """Who may read, and how many do."""

    def __init__(self) -> None:
        self._doors: Dict[str, PeerDoor] = {}          # by the key's sha256
        self._root = ""
        self._pool = ThreadPoolExecutor(2, "blobs")
        self.readers = 0

    def swap(self, table: GateTable) -> None:
        self._doors, self._root = {door.key_sha256: door for door in table.peers}, table.root

    def _lets_in(self, key: bytes) -> bool:
        digest = hashlib.sha256(key).hexdigest()
        door = self._doors.get(digest) if key and self._root else None
        return door is not None and hmac.compare_digest(digest, door.key_sha256)

    def check(self, request: Request, key: bytes) -> Optional[Reply]:
        """Return why this is refused, or None."""
        head = request.head
        if not self._lets_in(key):
            reply = error_reply(401, "no node with this key may read here", "invalid_peer_key")
            return request.connection.listener.wrong_key(request, reply, wait_seconds=1) if key else reply
        match = _PATH.fullmatch(head.target)
        if match is None or head.method != b"GET":
            return error_reply(404, "the gate does not let this path through", "path_not_allowed")
        if head.length or head.chunked:
            return error_reply(400, "a question for a blob has no body", "bad_request")
        if not match.group(2) and self.readers >= MOST_READERS:
            return error_reply(503, "enough nodes read here already", "busy", retry_after=BUSY_SECONDS)
        return None

    def serve(self, request: Request, key: bytes) -> None:
        """Answer a request that ``check`` let through."""
        reply = self.check(request, key)
        if reply is not None:                          # the table changed meanwhile
            request.reply(reply)
            return
        match = _PATH.fullmatch(request.head.target)
        assert match is not None
        digest, layout = match.group(1).decode("ascii"), Layout(self._root)
        if match.group(2):
            _Answer(self, request, counts=0).begin(functools.partial(chunks_here, layout, digest))
        else:
            asked = request.head.headers.get(b"range", b"").decode("latin-1")
            _Answer(self, request).begin(functools.partial(open_part, layout, digest, asked))

    def work(self, what: Callable[[], Any], then: "Callable[[asyncio.Future[Any]], None]") -> None:
        asyncio.get_running_loop().run_in_executor(self._pool, what).add_done_callback(then)

    def close(self) -> None:
        self._pool.shutdown(wait=False)


class _Answer:
    """One answer, owner of its request: a piece is read when the one before has been taken."""

    def __init__(self, door: BlobDoor, request: Request, counts: int = 1) -> None:
        self._door, self._request, self._counts = door, request, counts
        self._part: Optional[Part] = None
        self._at = self._end = 0
        self._reading = self._paused = self._gone = False
        request.owner = self

    def begin(self, opening: Callable[[], Any]) -> None:
        self._door.readers += self._counts
        self._reading = True
        self._door.work(opening, self._opened)

    def _opened(self, done: "asyncio.Future[Any]") -> None:
        self._reading = False
        problem = done.exception()
        found = None if problem is not None else done.result()
        if isinstance(found, Part):
            self._part, self._at, self._end = found, found.first, found.first + found.length
        if self._gone:
            self._end_it()
        elif problem is not None:
            self._end_it()
            self._request.reply(_refusal(problem))
        elif self._part is None:
            self._end_it()
            self._request.reply(json_reply({"chunks": found}))
        else:
            self._request.begin(self._head(self._part), chunked=False)
            self._read()

    def _head(self, part: Part) -> bytes:
        lines = [b"HTTP/1.1 200 OK" if part.whole else b"HTTP/1.1 206 Partial Content",
                 b"Content-Type: application/octet-stream", b"Content-Length: %d" % part.length]
        if not part.whole:
            lines.append(b"Content-Range: bytes %d-%d/%d" % (part.first, part.first + part.length - 1, part.size))
        if self._request.close:
            lines.append(b"Connection: close")
        return b"\r\n".join(lines) + b"\r\n" + self._request.connection.listener.stamp.lines + b"\r\n"

    def _read(self) -> None:
        if self._reading or self._paused or self._gone or self._part is None:
            return
        self._reading = True
        self._door.work(functools.partial(os.pread, self._part.file, min(PIECE_BYTES, self._end - self._at), self._at),
                        self._have_read)

    def _have_read(self, done: "asyncio.Future[bytes]") -> None:
        self._reading = False
        piece = b"" if done.exception() is not None else done.result()
        self._at += len(piece)
        if self._gone:
            self._end_it()
        elif not piece:                                # the disk failed, or the file shrank: the length was promised
            self._end_it()
            self._request.abort()
        elif self._at >= self._end:
            self._end_it()
            self._request.finish(piece)
        else:
            self._request.send(piece)                  # may pause us
            self._read()

    def _end_it(self) -> None:
        self._door.readers -= self._counts
        part, self._part, self._gone = self._part, None, True
        if part is not None:
            os.close(part.file)

    # What the connection tells.

    def client_gone(self) -> None:
        if self._gone:
            return
        if self._reading:
            self._gone = True                          # the thread still has the file
        else:
            self._end_it()

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self._read()

    def sweep(self, now: float) -> None:
        pass


def chunks_here(layout: Layout, digest: str) -> str:
    """Return a letter for each chunk of a blob, whole or still coming; empty when there is nothing of it."""
    try:
        seen = os.stat(layout.blob(digest), follow_symlinks=False)
        return HERE * chunk_count(seen.st_size) if stat.S_ISREG(seen.st_mode) else ""
    except FileNotFoundError:
        known = have.read(layout.partial(digest))
        return known[1] if known is not None else ""
    except OSError as error:
        raise storage_error("read", layout.blob(digest), error) from error


def open_part(layout: Layout, digest: str, asked: str) -> Part:
    """Open a blob for the range in a header; what still comes only where every chunk of it is proven."""
    for path, is_whole in ((layout.blob(digest), True), (layout.partial(digest), False), (layout.blob(digest), True)):
        known = None if is_whole else have.read(path)
        if not is_whole and known is None:
            continue
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            continue                                   # it may have come whole just now
        except OSError as error:
            raise storage_error("read", path, error) from error
        try:
            return _part(file, known, asked)
        except BaseException:
            os.close(file)
            raise
    raise NotFound("this node has nothing of that blob")


def _part(file: int, known: Optional[Tuple[int, str]], asked: str) -> Part:
    seen = os.fstat(file)
    if not stat.S_ISREG(seen.st_mode):
        raise NotFound("this node has nothing of that blob")
    size = seen.st_size if known is None else known[0]
    part = byte_range(asked, size)
    first, count = part if part is not None else (0, size)
    if known is not None and set(known[1][first // CHUNK_BYTES:chunk_count(first + count)]) != {HERE}:
        raise NotFound("this node has not all of that yet")
    return Part(file, first, count, size, part is None)


def _refusal(problem: BaseException) -> Reply:
    if isinstance(problem, ParseError):
        return error_reply(416, problem.message, "bad_range")
    if isinstance(problem, NotFound):
        return error_reply(404, problem.message, "blob_not_here")
    message = problem.message if isinstance(problem, LlmgwError) else "the file cannot be read"
    return error_reply(500, message, "blob_not_read")
