"""What a request looks like on its way to an engine: an allow-list, and a key of ours."""
from __future__ import annotations

import itertools
import os
import re
from typing import Dict, Optional

from llmgw.parse.address import joined
from llmgw.parse.http1 import RequestHead

# Everything else a client sent stays here: cookies, other keys, hop-by-hop fields, Expect.
_FORWARDED = ((b"content-type", b"Content-Type: "), (b"accept", b"Accept: "), (b"user-agent", b"User-Agent: "),
              (b"traceparent", b"Traceparent: "), (b"tracestate", b"Tracestate: "),
              (b"x-session-id", b"X-Session-Id: "))
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_prefix = b"req-" + os.urandom(6).hex().encode("ascii")
_count = itertools.count(1)


def request_id(headers: Dict[bytes, bytes]) -> bytes:
    """Return the client's request id when it is a harmless one, else a new one."""
    given = headers.get(b"x-request-id")
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given
    return b"%b-%x" % (_prefix, next(_count))


def target_lines(host: str, port: int, key: str) -> bytes:
    """Return the lines that every request to one replica has: its own Host, its own key."""
    return (f"Host: {joined(host, port)}\r\nAccept-Encoding: identity\r\n"
            f"Authorization: Bearer {key}\r\n").encode("latin-1")


def request_bytes(method: bytes, path: bytes, target: bytes, head: Optional[RequestHead], identity: bytes,
                  body: bytes) -> bytes:
    """Return the request as it goes to an engine; ``target`` are the lines of ``target_lines``."""
    if head is None:
        return b"%b %b HTTP/1.1\r\n%bContent-Length: 0\r\n\r\n" % (method, path, target)
    forwarded = head.forwarded
    if forwarded is None:
        forwarded = head.forwarded = _forwarded(head.headers)
    return b"%b %b HTTP/1.1\r\n%b%bX-Request-Id: %b\r\nContent-Length: %d\r\n\r\n%b" % (
        method, path, target, forwarded, identity, len(body), body)


def _forwarded(headers: Dict[bytes, bytes]) -> bytes:
    if b"content-type" not in headers:            # the body was read as JSON, and vLLM demands to be told so
        headers = {**headers, b"content-type": b"application/json"}
    return b"".join(b"%b%b\r\n" % (shown, headers[name]) for name, shown in _FORWARDED if name in headers)
