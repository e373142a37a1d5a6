"""The head of a request, read strictly: what could be framed in two ways is refused.

http.server accepts two lengths, a length beside chunks, bare LF and blanks before
the colon, and int() accepts ``+5`` and ``5_0``; each of these has smuggled a request
through some server (CVE-2024-1135). Bodies of the control API always carry a length.
"""
from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Dict, List, Mapping, Optional, Tuple

from llmgw.domain.errors import ParseError

MAX_HEAD_BYTES = 32 << 10
MAX_HEADERS = 100
_REQUEST_LINE = re.compile(rb"([A-Z]{1,20}) (/[\x21\x23-\x7e]{0,8000}) HTTP/1\.([01])")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}):[ \t]*([\x20-\x7e\x80-\xff\t]*?)[ \t]*")
_LENGTH = re.compile(r"[0-9]{1,15}")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253})(?::[0-9]{1,5})?")
_ONCE = ("content-length", "host", "authorization", "transfer-encoding", "content-range", "range")


@dataclass(frozen=True)
class Head:
    """A request's first part. Header names are lower-case; ``host`` is without its port."""

    method: str
    target: str
    headers: Mapping[str, str]
    host: str
    content_length: int
    keep_alive: bool
    expects_continue: bool
    is_http_1_0: bool


def split(data: bytes) -> Tuple[Optional[bytes], bytes]:
    """Return (head without its blank line, rest), or (None, data) while it is not whole."""
    end = data.find(b"\r\n\r\n")
    if end < 0 and len(data) <= MAX_HEAD_BYTES:
        return None, data
    if end < 0 or end > MAX_HEAD_BYTES:
        raise ParseError(f"the head of the request is larger than {MAX_HEAD_BYTES} bytes")
    return data[:end], data[end + 4:]


def parse(raw: bytes) -> Head:
    """Return the head in ``raw``; ParseError for anything that is not exactly HTTP/1.x."""
    lines = raw.split(b"\r\n")
    match = _REQUEST_LINE.fullmatch(lines[0])
    if match is None:
        raise ParseError(f"not a request line: {lines[0][:80].decode('latin-1')!r}")
    method, target, minor = match.group(1).decode(), match.group(2).decode(), match.group(3)
    headers = _headers(lines[1:])
    if "transfer-encoding" in headers:
        raise ParseError("Transfer-Encoding is not taken here, send a Content-Length")
    is_1_0 = minor == b"0"
    options = headers.get("connection", "").lower().replace(" ", "").split(",")
    return Head(method=method, target=target, headers=headers, host=_host(headers, is_1_0),
                content_length=_length(headers),
                keep_alive="keep-alive" in options if is_1_0 else "close" not in options,
                expects_continue=headers.get("expect", "").lower() == "100-continue" and not is_1_0,
                is_http_1_0=is_1_0)


def _headers(lines: List[bytes]) -> Dict[str, str]:
    if len(lines) > MAX_HEADERS:
        raise ParseError(f"more than {MAX_HEADERS} header lines")
    headers: Dict[str, str] = {}
    for line in lines:
        match = _HEADER.fullmatch(line)        # refuses bare CR and LF, folding, and a blank before the colon
        if match is None:
            raise ParseError(f"not a header line: {line[:80].decode('latin-1')!r}")
        name, value = match.group(1).decode().lower(), match.group(2).decode("latin-1")
        if name in headers and name in _ONCE:
            raise ParseError(f"the header {name} came twice")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


def _length(headers: Mapping[str, str]) -> int:
    text = headers.get("content-length", "0")
    if not _LENGTH.fullmatch(text):
        raise ParseError(f"not a Content-Length: {text!r:.50}")
    return int(text)


def _host(headers: Mapping[str, str], is_1_0: bool) -> str:
    text = headers.get("host")
    if text is None and is_1_0:
        return ""
    match = _HOST.fullmatch(text or "")
    if match is None:
        raise ParseError("no Host header" if text is None else f"not a Host: {text!r:.80}")
    return match.group(1).strip("[]").lower()


def byte_range(text: str, size: int) -> Optional[Tuple[int, int]]:
    """Return (first, count) of a single ``bytes=`` range, None when there is none to honour.

    Raises ParseError for a range outside the file (416). Several ranges are not honoured.
    """
    match = re.fullmatch(r"bytes=([0-9]{0,15})-([0-9]{0,15})", text.strip())
    if match is None or match.group(0) == "bytes=-":
        return None
    first, last = match.groups()
    if not first:
        count = min(int(last), size)
        start = size - count
    else:
        start = int(first)
        end = min(int(last), size - 1) if last else size - 1
        if last and int(last) < start:
            return None
        count = end - start + 1
    if start >= size or count <= 0:
        raise ParseError(f"the range {text:.60} is outside of the {size} bytes")
    return start, count
