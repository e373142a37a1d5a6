"""Answers of our own: OpenAI error objects everywhere, and the heads of what is relayed."""
from __future__ import annotations

import json
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, List, Optional, Tuple

from llmgw.parse.http1 import ResponseHead

Fields = Tuple[Tuple[bytes, bytes], ...]

_PHRASES = {status.value: status.phrase.encode("ascii") for status in HTTPStatus}
_TYPES = {401: "authentication_error", 403: "authentication_error", 429: "rate_limit_error",
          501: "invalid_request_error", 505: "invalid_request_error"}

# Of a response only these pass, and x-* and openai-* besides those that the engine and we both write:
# an upstream may reflect the key that we sent it (maximhq/bifrost#3954).
_PASSING = frozenset((b"content-type", b"content-encoding", b"content-language", b"content-disposition",
                      b"retry-after", b"cache-control", b"warning", b"etag", b"last-modified"))
_PASSING_PREFIXES = (b"x-", b"openai-")
_STOPPED = frozenset((b"x-request-id", b"x-api-key", b"x-powered-by", b"x-accel-buffering"))


class Stamp:
    """The Date and Server lines, made anew when the second changes."""

    def __init__(self) -> None:
        self.lines = b""
        self.refresh(0.0)

    def refresh(self, wall: float) -> None:
        self.lines = b"Date: " + formatdate(wall, usegmt=True).encode("ascii") + b"\r\nServer: llmgw\r\n"


class Reply:
    """A whole answer of our own."""

    __slots__ = ("status", "body", "content_type", "fields")

    def __init__(self, status: int, body: bytes = b"", content_type: bytes = b"application/json",
                 fields: Fields = ()) -> None:
        self.status, self.body, self.content_type, self.fields = status, body, content_type, fields


def json_reply(data: Any, status: int = 200, fields: Fields = ()) -> Reply:
    """Return ``data`` as an answer."""
    return Reply(status, json.dumps(data).encode("utf-8"), fields=fields)


def error_object(status: int, message: str, code: str, param: Optional[str] = None) -> Any:
    """Return the one shape that every error of ours has, in the words of OpenAI's API."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_reply(status: int, message: str, code: str, *, param: Optional[str] = None,
                retry_after: Optional[int] = None, fields: Fields = ()) -> Reply:
    """Return an error answer; every error of ours comes from here."""
    fields += ((b"X-Llmgw-Error-Code", code.encode("ascii")),)
    if status == 401:
        fields += ((b"WWW-Authenticate", b"Bearer"),)
    if retry_after is not None:
        fields += ((b"Retry-After", b"%d" % retry_after),)
    return json_reply(error_object(status, message, code, param), status, fields)


def too_large(limit_bytes: int) -> Reply:
    return error_reply(413, f"the body is larger than {limit_bytes >> 20} MiB", "body_too_large")


def no_room() -> Reply:
    return error_reply(503, "too many bytes of requests are in memory", "overloaded", retry_after=1)


def error_event(message: str, code: str) -> bytes:
    """Return the event that tells a stream's reader that it failed."""
    return b"data: " + json.dumps(error_object(502, message, code)).encode("utf-8") + b"\n\n"


def reply_bytes(reply: Reply, stamp: bytes, *, close: bool, without_body: bool = False,
                more: Fields = ()) -> bytes:
    """Return the answer as it goes over the wire."""
    parts: List[bytes] = [b"HTTP/1.1 %d %b\r\n" % (reply.status, _PHRASES.get(reply.status, b"Unknown")), stamp]
    if reply.status != 204:
        parts.append(b"Content-Type: %b\r\nContent-Length: %d\r\n" % (reply.content_type, len(reply.body)))
    parts.extend(b"%b: %b\r\n" % field for field in reply.fields + more)
    parts.append(b"Connection: close\r\n\r\n" if close else b"\r\n")
    if not without_body:
        parts.append(reply.body)
    return b"".join(parts)


def relayed_head(head: ResponseHead, stamp: bytes, *, chunked: bool, close: bool, secret: bytes = b"",
                 more: bytes = b"") -> bytes:
    """Return the head for the client of an upstream's response: hop-by-hop and unknown fields are gone."""
    passing = head.passing
    if passing is None:
        passing = head.passing = _passing(head, secret)
    if chunked:
        framing = b"Transfer-Encoding: chunked\r\n"
    elif head.length is not None and head.status != 204:
        framing = b"Content-Length: %d\r\n" % head.length
    else:
        framing = b""
    return b"%b%b%b%b%b" % (passing, framing, more, stamp, b"Connection: close\r\n\r\n" if close else b"\r\n")


def _passing(head: ResponseHead, secret: bytes) -> bytes:
    parts = [b"HTTP/1.1 %d %b\r\n" % (head.status, _PHRASES.get(head.status, b"Unknown"))]
    for name, value in head.fields:
        lower = name.lower()
        if (lower in _PASSING or (lower.startswith(_PASSING_PREFIXES) and lower not in _STOPPED)) and not (
                secret and secret in value):
            parts.append(b"%b: %b\r\n" % (name, value.strip()))
    return b"".join(parts)
