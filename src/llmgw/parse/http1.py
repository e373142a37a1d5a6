"""HTTP/1.1 heads and body framing, strictly, from bytes that somebody else wrote.

Stricter than RFC 9112 where two readers could disagree about where a message
ends: bare LF, obs-fold, space before a colon, repeated or signed lengths, both
framings at once and any transfer coding but ``chunked`` are refused.
"""
from __future__ import annotations

import re
from typing import Any, Dict, List, Optional, Tuple

from llmgw.domain.errors import ParseError

MAX_HEAD_BYTES = 64 << 10
MAX_FIELDS = 100
MAX_CHUNK_LINE_BYTES = 4 << 10
NO_BODY_STATUSES = frozenset((204, 304))

_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_TEXT = rb"[\t\x20-\x7e\x80-\xff]"
_REQUEST_LINE = re.compile(rb"([A-Z]{1,20}) ([\x21-\x7e]{1,16384}) HTTP/1\.([01])\r\n")
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9][0-9])(?: " + _TEXT + rb"*)?\r\n")
_FIELD = re.compile(rb"(" + _TOKEN + rb"):(" + _TEXT + rb"*)\r\n")
_BARE_LF = re.compile(rb"(?:^|[^\r])\n")
_LENGTH_LINE = re.compile(rb"\r\ncontent-length: ?([0-9]{1,15})\r\n", re.IGNORECASE)
_LENGTH = re.compile(rb"[0-9]{1,15}")
_HOST = re.compile(rb"[A-Za-z0-9._~:\[\]%-]{0,255}")
# Digits by regex before conversion: int(x, 16) takes "0x1", "1_0", "+1" and " 1" (apache/trafficserver#10580).
_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})(?:;" + _TEXT + rb"*)?\r\n")
PLAIN_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,16})\r\n")
_ONCE = frozenset((b"host", b"content-length", b"transfer-encoding", b"authorization", b"content-type"))


class MalformedHttp(ParseError):
    """Bytes that are not the HTTP we accept; ``status`` is what a server answers before it closes."""

    reason = "MalformedHttp"

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class RequestHead:
    """A request's head. Header names are lower-case; repeated ones are joined by a comma."""

    __slots__ = ("method", "target", "path", "minor", "headers", "length", "chunked", "keep_alive", "expects",
                 "forwarded", "memo")

    method: bytes
    target: bytes
    path: bytes               # the target without its query
    minor: int
    headers: Dict[bytes, bytes]
    length: int               # of the body; 0 when chunked
    chunked: bool
    keep_alive: bool
    expects: bool             # the client waits for 100 Continue
    forwarded: Optional[bytes]  # for the relay: the lines that pass on, worked out once
    memo: Any                 # for the application: what it has worked out from this head


class ResponseHead:
    """A response's head. ``fields`` holds every field in order, repeated ones too."""

    __slots__ = ("status", "minor", "fields", "headers", "length", "chunked", "keep_alive", "passing")

    status: int
    minor: int
    fields: List[Tuple[bytes, bytes]]
    headers: Dict[bytes, bytes]
    length: Optional[int]     # None: chunked, or until the connection closes
    chunked: bool
    keep_alive: bool
    passing: Optional[bytes]  # for the relay: the lines that pass on, worked out once


def head_end(data: bytes, start: int = 0) -> int:
    """Return where the head's blank line begins (-1: not here yet); refuse a line ended by LF alone."""
    end = data.find(b"\r\n\r\n", start)
    if end < 0:
        if _BARE_LF.search(data, max(0, start - 1)):
            raise MalformedHttp("a line of the head ends without CR")
        if len(data) > MAX_HEAD_BYTES:
            raise MalformedHttp(f"the head is larger than {MAX_HEAD_BYTES} bytes", 431)
    elif end > MAX_HEAD_BYTES:
        raise MalformedHttp(f"the head is larger than {MAX_HEAD_BYTES} bytes", 431)
    return end


def parse_request(head: bytes) -> RequestHead:
    """Return the request in ``head``: its lines, each with CRLF, without the blank line."""
    line = _REQUEST_LINE.match(head)
    if line is None:
        raise _bad_request_line(head)
    request = RequestHead()
    request.method, request.target, minor = line.groups()
    request.path = request.target.partition(b"?")[0]
    request.minor = 1 if minor == b"1" else 0
    request.forwarded = request.memo = None
    request.headers = headers = _joined(_fields(head, line.end()))
    host = headers.get(b"host")
    if host is None:
        if request.minor:
            raise MalformedHttp("a request of HTTP/1.1 without Host")
    elif not _HOST.fullmatch(host):
        raise MalformedHttp("the Host header is not a host")
    request.chunked = _is_chunked(headers, request.minor)
    request.length = 0
    if b"content-length" in headers:
        if request.chunked:
            raise MalformedHttp("both Content-Length and Transfer-Encoding")
        request.length = _content_length(headers[b"content-length"])
    request.keep_alive = request.minor == 1 and not _says_close(headers)
    request.expects = False
    if b"expect" in headers:
        if headers[b"expect"].lower() != b"100-continue":
            raise MalformedHttp("an expectation other than 100-continue", 417)
        request.expects = request.minor == 1
    return request


def parse_response(head: bytes, to_head: bool = False) -> ResponseHead:
    """Return the response in ``head``; ``to_head``: it answers a HEAD request and has no body."""
    line = _STATUS_LINE.match(head)
    if line is None:
        raise MalformedHttp("not a status line of HTTP/1", 502)
    response = ResponseHead()
    response.passing = None
    response.minor = 1 if line.group(1) == b"1" else 0
    response.status = int(line.group(2))
    response.fields = _fields(head, line.end())
    response.headers = headers = _joined(response.fields)
    response.chunked = _is_chunked(headers, response.minor)
    response.keep_alive = response.minor == 1 and not _says_close(headers)
    if to_head or response.status < 200 or response.status in NO_BODY_STATUSES:
        response.chunked, response.length = False, 0
    elif response.chunked:
        response.length = None
        if b"content-length" in headers:      # stale: the chunks decide (envoyproxy/ai-gateway#2392), and no reuse
            response.keep_alive = False
    elif b"content-length" in headers:
        response.length = _content_length(headers[b"content-length"])
    else:
        response.length, response.keep_alive = None, False
    return response


class RequestReader:
    """``parse_request`` for one connection. Clients repeat their head but for the length of the body:

    such a head is known to be good by comparing bytes, and the same value comes back with the new length.
    """

    __slots__ = ("_before", "_after", "_last")

    def __init__(self) -> None:
        self._before, self._after = b"", b""      # what stands around the digits of Content-Length
        self._last: Optional[RequestHead] = None

    def read(self, head: bytes) -> RequestHead:
        last = self._last
        if last is not None and head.startswith(self._before) and head.endswith(self._after):
            digits = head[len(self._before):len(head) - len(self._after)]
            if digits.isdigit() and len(digits) <= 15:
                last.length = int(digits)
                return last
        last = parse_request(head)
        around = _around_length(head, last.headers)
        if around is None:
            self._last = None
        else:
            self._last = last
            self._before, self._after = around
        return last


class ResponseReader:
    """``parse_response`` for one connection, in the same way."""

    __slots__ = ("_before", "_after", "_last")

    def __init__(self) -> None:
        self._before, self._after = b"", b""
        self._last: Optional[ResponseHead] = None

    def read(self, head: bytes) -> ResponseHead:
        last = self._last
        if last is not None and head.startswith(self._before) and head.endswith(self._after):
            digits = head[len(self._before):len(head) - len(self._after)]
            if digits.isdigit() and len(digits) <= 15:
                last.length = int(digits)
                return last
        last = parse_response(head)
        around = _around_length(head, last.headers) if last.length else None
        if around is None:
            self._last = None
        else:
            self._last = last
            self._before, self._after = around
        return last


def _around_length(head: bytes, headers: Dict[bytes, bytes]) -> Optional[Tuple[bytes, bytes]]:
    """Return what stands before and after the digits of the one Content-Length, None without it."""
    if b"content-length" not in headers:
        return None
    match = _LENGTH_LINE.search(head)
    return (head[:match.start(1)], head[match.end(1):]) if match is not None else None


def _fields(head: bytes, start: int) -> List[Tuple[bytes, bytes]]:
    fields: List[Tuple[bytes, bytes]] = _FIELD.findall(head, start)
    size = start + 3 * len(fields)                 # ":" and CRLF of each
    for name, value in fields:
        size += len(name) + len(value)
    if size != len(head):                          # something between the matches is no field
        raise _bad_field(head, start)
    if len(fields) > MAX_FIELDS:
        raise MalformedHttp(f"more than {MAX_FIELDS} header fields", 431)
    return fields


def _joined(fields: List[Tuple[bytes, bytes]]) -> Dict[bytes, bytes]:
    headers: Dict[bytes, bytes] = {}
    for name, value in fields:
        name = name.lower()
        if name not in headers:
            headers[name] = value.strip()
        elif name in _ONCE:
            raise MalformedHttp(f"more than one {name.decode('ascii')} header")
        else:
            headers[name] += b", " + value.strip()
    return headers


def _is_chunked(headers: Dict[bytes, bytes], minor: int) -> bool:
    coding = headers.get(b"transfer-encoding")
    if coding is None:
        return False
    if minor == 0:
        raise MalformedHttp("Transfer-Encoding in HTTP/1.0")
    if coding.lower() != b"chunked":
        raise MalformedHttp("a Transfer-Encoding other than chunked", 501)
    return True


def _content_length(value: bytes) -> int:
    if not _LENGTH.fullmatch(value):
        raise MalformedHttp("Content-Length is not a number")
    return int(value)


def _says_close(headers: Dict[bytes, bytes]) -> bool:
    connection = headers.get(b"connection")
    if connection is None:
        return False
    return b"close" in [word.strip() for word in connection.lower().split(b",")]


def _bad_request_line(head: bytes) -> MalformedHttp:
    if head.startswith(b"\x16\x03"):
        return MalformedHttp("a TLS handshake on a port that speaks plain HTTP")
    line = head.split(b"\r\n", 1)[0]
    if re.search(rb" HTTP/(?!1\.[01]$)[0-9.]+$", line):
        return MalformedHttp("a version of HTTP other than 1.0 and 1.1", 505)
    if len(line) > 16384:
        return MalformedHttp("the request's target is too long", 414)
    return MalformedHttp("not a request line")


def _bad_field(head: bytes, start: int) -> MalformedHttp:
    """Say what is wrong with the first line that is no header field."""
    for line in head[start:].split(b"\r\n")[:-1]:
        if _FIELD.fullmatch(line + b"\r\n"):
            continue
        if line[:1] in (b" ", b"\t"):
            return MalformedHttp("a folded header line")
        if re.match(_TOKEN + rb"[ \t]+:", line):
            return MalformedHttp("white space before the colon of a header")
        if b"\n" in line or b"\r" in line:
            return MalformedHttp("a line of the head ends without CR")
        if b"\x00" in line:
            return MalformedHttp("a NUL in a header")
        break
    return MalformedHttp("a line of the head is no header field")


_SIZE, _DATA, _DATA_END, _TRAILER, _DONE = range(5)


class ChunkDecoder:
    """Takes a chunked body in pieces cut anywhere; ``rest`` is what follows the body's end."""

    __slots__ = ("done", "rest", "_state", "_left", "_tail", "_trailer_bytes")

    def __init__(self) -> None:
        self.done = False
        self.rest = b""
        self._state = _SIZE
        self._left = 0            # bytes of the chunk that are still to come
        self._tail = b""          # an unfinished line
        self._trailer_bytes = 0

    @property
    def between_chunks(self) -> bool:
        """Whether the next byte begins a chunk."""
        return self._state == _SIZE and not self._tail

    def feed(self, data: bytes) -> bytes:
        """Return the payload in ``data``; MalformedHttp when the framing is broken."""
        if self._tail:
            data, self._tail = self._tail + data, b""
        at, end = 0, len(data)
        pieces = []
        while at < end and not self.done:
            if self._state == _DATA:
                piece = data[at:at + self._left]
                pieces.append(piece)
                at += len(piece)
                self._left -= len(piece)
                if not self._left:
                    self._state = _DATA_END
            elif self._state == _DATA_END:
                if data[at:at + 2] != b"\r\n":
                    if data[at:] == b"\r":
                        break
                    raise MalformedHttp("a chunk does not end where its size says")
                at += 2
                self._state = _SIZE
            else:
                after = self._line(data, at)
                if not after:
                    break
                at = after
        if self.done:
            self.rest = data[at:]
        else:
            self._tail = data[at:]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _line(self, data: bytes, at: int) -> int:
        """Take one size or trailer line; return where the next begins, 0 when it is not whole."""
        end = data.find(b"\n", at, at + MAX_CHUNK_LINE_BYTES)
        if end < 0:
            if len(data) - at >= MAX_CHUNK_LINE_BYTES:
                raise MalformedHttp("a chunk's line is too long")
            return 0
        end += 1
        if self._state == _SIZE:
            match = _CHUNK_LINE.fullmatch(data, at, end)
            if match is None:
                raise MalformedHttp("not a chunk size")
            self._left = int(match.group(1), 16)
            self._state = _DATA if self._left else _TRAILER
        elif data[at:end] == b"\r\n":
            self._state, self.done = _DONE, True
        else:
            self._trailer_bytes += end - at
            if not _FIELD.fullmatch(data, at, end) or self._trailer_bytes > MAX_HEAD_BYTES:
                raise MalformedHttp("a broken trailer after the last chunk")
        return end


def chunk(payload: bytes) -> bytes:
    """Return ``payload`` (not empty) as one chunk."""
    return b"%x\r\n%b\r\n" % (len(payload), payload)


LAST_CHUNK = b"0\r\n\r\n"
