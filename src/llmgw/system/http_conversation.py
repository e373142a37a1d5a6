"""One connection of the control API: requests one after another, each with its deadlines."""
from __future__ import annotations

import logging
import socket
import time
from typing import Callable, Dict, Iterable, Mapping, Optional, Protocol, Tuple

from llmgw.domain.errors import ApiError, LlmgwError, ParseError, TooLarge
from llmgw.system import files, http_head, tls
from llmgw.system.http_head import Head
from llmgw.system.routes import Admitted, Request, Response, error_response, json_response

log = logging.getLogger(__name__)

HEAD_SECONDS = 10.0           # from a request's first byte to the end of its head
IDLE_SECONDS = 75.0           # between two requests of one connection
FIRST_SECONDS = 10.0          # a new connection has to say something by then
BODY_SECONDS = 30.0           # plus the time that MIN_BYTES_PER_SECOND needs
WRITE_SECONDS = 60.0          # for each piece of an answer
MIN_BYTES_PER_SECOND = 32 << 10
PIECE_BYTES = 4 << 20
REASONS = {200: "OK", 201: "Created", 202: "Accepted", 204: "No Content", 206: "Partial Content",
           304: "Not Modified", 400: "Bad Request", 401: "Unauthorized", 403: "Forbidden",
           404: "Not Found", 405: "Method Not Allowed", 409: "Conflict", 413: "Content Too Large",
           416: "Range Not Satisfiable", 421: "Misdirected Request", 429: "Too Many Requests",
           500: "Internal Server Error",
           503: "Service Unavailable"}


class Gone(Exception):
    """The peer went away, or was too slow: nothing more can be said to it."""


class Owner(Protocol):
    """What a conversation asks of its server."""

    @property
    def stopping(self) -> bool: ...

    def mark_idle(self, sock: socket.socket, idle: bool) -> None: ...

    def check_host(self, head: Head) -> None: ...

    def admit(self, head: Head, address: str) -> Admitted: ...

    def count(self, pattern: str, status: int) -> None: ...


class Conversation:
    """One connection: requests one after another until somebody has had enough."""

    def __init__(self, server: Owner, sock: socket.socket, address: str) -> None:
        self._server, self._sock, self._address = server, sock, address
        self._buffer = b""

    def run(self) -> None:
        first = True
        while not self._server.stopping:
            head = self._next_head(FIRST_SECONDS if first else IDLE_SECONDS)
            if head is None or not self._answer(head) or not head.keep_alive:
                return
            first = False

    def _next_head(self, idle_seconds: float) -> Optional[Head]:
        """Return the next head; None when there is none to come. A malformed one is answered here."""
        deadline = 0.0
        try:
            while True:
                raw, self._buffer = http_head.split(self._buffer)
                if raw is not None:
                    return http_head.parse(raw)
                if self._buffer:
                    deadline = deadline or time.monotonic() + HEAD_SECONDS
                    data = self._receive(deadline)
                else:
                    self._server.mark_idle(self._sock, True)
                    data = self._receive(time.monotonic() + idle_seconds)
                    self._server.mark_idle(self._sock, False)
                if not data:
                    return None
                self._buffer += data
                if tls.is_handshake(self._buffer):
                    raise ParseError("this port speaks plain HTTP, not TLS: use http://")
        except ParseError as error:
            self._server.count("", 400)
            self._send(error_response(error), keep=False, method="GET")
            self._linger()
            return None

    def _answer(self, head: Head) -> bool:
        """Answer one request; False when the connection must end."""
        pattern = ""
        body_read = head.content_length == 0
        try:
            self._server.check_host(head)
            admitted = self._server.admit(head, self._address)
            pattern = admitted.route.pattern
            if head.content_length > admitted.route.body_bytes:
                raise TooLarge(f"{head.method} {pattern}: a body of {head.content_length} bytes, "
                               f"at most {admitted.route.body_bytes} are taken")
            body = self._read_body(head)
            body_read = True
            response = _handled(admitted.route.handler, Request(
                head.method, head.target.partition("?")[0], admitted.query, head.headers, body,
                admitted.args, admitted.caller))
        except LlmgwError as error:
            response = error_response(error)
        except (Gone, OSError):
            raise
        except Exception:
            log.exception("bug: %s %s failed", head.method, pattern or head.target.partition("?")[0])
            response = json_response({"reason": "Bug", "message": "this request failed inside the server",
                                      "hint": "the server's log has the details"}, 500)
        self._server.count(pattern, response.status)
        keep = head.keep_alive and body_read and not self._server.stopping
        try:
            keep = self._send(response, keep=keep, method=head.method, headers=head.headers,
                              chunks=not head.is_http_1_0)
        finally:
            if response.file is not None:
                response.file.close()
        if not body_read:
            self._linger()
        return keep

    def _read_body(self, head: Head) -> bytes:
        left = head.content_length
        if not left:
            return b""
        if head.expects_continue and not self._buffer:
            self._write(b"HTTP/1.1 100 Continue\r\n\r\n")
        deadline = time.monotonic() + BODY_SECONDS + left / MIN_BYTES_PER_SECOND
        body = bytearray(self._buffer[:left])
        self._buffer = self._buffer[left:]
        while len(body) < left:
            data = self._receive(deadline, min(left - len(body), 1 << 20))
            if not data:
                raise Gone()
            body += data
        return bytes(body)

    def _send(self, response: Response, *, keep: bool, method: str,
              headers: Optional[Mapping[str, str]] = None, chunks: bool = True) -> bool:
        """Send a whole answer; returns whether the connection may go on."""
        lines = {"Content-Type": response.content_type, "Cache-Control": "no-store",
                 "X-Content-Type-Options": "nosniff", **response.headers}
        status, first, count = response.status, 0, len(response.body)
        if response.file is not None:
            try:
                status, first, count = _file_part(response, headers or {}, lines)
            except ParseError as error:
                return self._send(error_response(ApiError(error.message, status=416, reason="BadRange")),
                                  keep=keep, method=method)
        elif response.pieces is not None:
            count = -1
            if chunks:
                lines["Transfer-Encoding"] = "chunked"
            keep = keep and chunks
        if status in (204, 304):
            lines.pop("Content-Type", None)
        elif count >= 0:
            lines["Content-Length"] = str(count)
        lines["Connection"] = "keep-alive" if keep else "close"
        text = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        start = f"HTTP/1.1 {status} {REASONS.get(status, 'Status')}\r\n{text}\r\n".encode("latin-1")
        if method == "HEAD" or status in (204, 304):
            self._write(start)
        elif response.file is not None:
            self._write(start)
            self._send_file(response, first, count)
        elif response.pieces is not None:
            self._write(start)
            self._send_pieces(response.pieces, chunks)
        else:
            self._write(start + response.body)
        return keep

    def _send_file(self, response: Response, first: int, count: int) -> None:
        assert response.file is not None
        while count > 0:
            piece = min(count, PIECE_BYTES)
            piece = response.pace(piece) if response.pace is not None else piece
            self._sock.settimeout(WRITE_SECONDS)
            response.file.seek(first)                     # over TLS it is read, from where it stands
            sent = self._sock.sendfile(response.file, first, piece)
            if not sent:
                raise Gone()                              # the file shrank; the length was promised
            first, count = first + sent, count - sent

    def _send_pieces(self, pieces: Iterable[bytes], chunks: bool) -> None:
        for piece in pieces:
            if piece:
                self._write(b"%x\r\n%s\r\n" % (len(piece), piece) if chunks else piece)
        if chunks:
            self._write(b"0\r\n\r\n")

    def _write(self, data: bytes) -> None:
        self._sock.settimeout(WRITE_SECONDS)               # for sendall this is the whole time
        self._sock.sendall(data)

    def _receive(self, deadline: float, size: int = 1 << 16) -> bytes:
        left = deadline - time.monotonic()
        if left <= 0:
            raise Gone()
        self._sock.settimeout(left)
        return self._sock.recv(size)

    def _linger(self) -> None:
        """Let an answer arrive before the close resets a peer that is still sending."""
        try:
            self._sock.shutdown(socket.SHUT_WR)
            deadline = time.monotonic() + 1.0
            while self._receive(deadline):
                pass
        except (OSError, Gone):
            pass


def _handled(handler: Callable[[Request], Response], request: Request) -> Response:
    """Return what the handler answers. A disk's error that it let through is told: it is none of the connection's."""
    try:
        return handler(request)
    except OSError as error:
        log.exception("bug: an error of the system was not translated: %s %s", request.method, request.path)
        raise files.storage_error("use", str(error.filename or "a file"), error) from error


def _file_part(response: Response, headers: Mapping[str, str],
               lines: Dict[str, str]) -> Tuple[int, int, int]:
    assert response.file is not None
    size = response.file.seek(0, 2)
    lines["Accept-Ranges"] = "bytes"
    etag = f'"{response.etag}"' if response.etag else ""
    if etag:
        lines["ETag"] = etag
        if headers.get("if-none-match") == etag:
            return 304, 0, 0
    asked = headers.get("range", "")
    part = None
    if asked and headers.get("if-range", etag) == etag:
        part = http_head.byte_range(asked, size)
    if part is None:
        return response.status, 0, size
    lines["Content-Range"] = f"bytes {part[0]}-{part[0] + part[1] - 1}/{size}"
    return 206, part[0], part[1]
