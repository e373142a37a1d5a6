"""HTTP to the cluster's own servers: deadlines, size caps, no proxy, no redirects.

For the internet (proxies, redirects) see internet.py.
"""
from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
import time
from dataclasses import dataclass
from typing import Dict, Iterator, List, Mapping, Optional
from urllib.parse import urlsplit

from llmgw.domain.errors import ConfigError, Unreachable
from llmgw.system import tls

MAX_BODY_BYTES = 64 << 20
MAX_IDLE = 4                      # kept connections


@dataclass(frozen=True)
class Answer:
    """A whole answer. Header names are lower-case; of a repeated one, the last counts."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Stream:
    """An answer whose body is read piece by piece. Close it, or use it in ``with``."""

    def __init__(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse,
                 where: str) -> None:
        self._connection, self._response, self._where = connection, response, where
        self.status = response.status
        self.headers = _headers(response)
        length = self.headers.get("content-length", "")
        self._left = int(length) if length.isdigit() else None

    def read(self, size: int) -> bytes:
        """Return up to ``size`` bytes, b"" at the end; Unreachable when the body stops early."""
        try:
            data = b"" if self._left == 0 else self._response.read1(
                size if self._left is None else min(size, self._left))
        except (OSError, http.client.HTTPException) as error:
            raise _unreachable(self._where, error) from error
        if self._left is not None:
            self._left -= len(data)
            if not data and self._left > 0:     # http.client hides a truncated body
                raise Unreachable(f"{self._where}: the connection ended {self._left} bytes early")
        return data

    def read_into(self, view: memoryview) -> int:
        """Fill ``view`` as far as the body reaches and return how much came; Unreachable when it stops early."""
        wanted = len(view) if self._left is None else min(len(view), self._left)
        try:
            count = self._response.readinto(view[:wanted]) if wanted else 0
        except (OSError, http.client.HTTPException) as error:
            raise _unreachable(self._where, error) from error
        if self._left is not None:
            self._left -= count
            if count < wanted:
                raise Unreachable(f"{self._where}: the connection ended {self._left} bytes early")
        return count

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()


class _TlsConnection(http.client.HTTPSConnection):
    """Its certificate may be for another name than the one that is dialled."""

    server_name = ""

    def connect(self) -> None:
        http.client.HTTPConnection.connect(self)
        context: ssl.SSLContext = self._context  # type: ignore[attr-defined]
        self.sock = context.wrap_socket(self.sock, server_hostname=self.server_name)


class HttpClient:
    """Requests to one server, from any thread. Idle connections are kept; ``timeout`` covers a whole request.

    With https, ``ca_pem`` is all that is trusted (else what the machine trusts), and the certificate must be for
    the host in the address, or for ``server_name``.
    """

    def __init__(self, url: str, *, ca_pem: str = "", server_name: str = "",
                 context: Optional[ssl.SSLContext] = None, timeout: float = 10.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"):
            raise ConfigError(f"not a server address: {url!r:.200}",
                              hint="write it as https://HOST:PORT")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._host, self._port = parts.hostname, parts.port
        self._context: Optional[ssl.SSLContext] = None
        self._server_name = server_name
        if parts.scheme == "https":
            self._context = context or tls.client_context(ca_pem)
        self._timeout = timeout
        self._idle: List[http.client.HTTPConnection] = []
        self._lock = threading.Lock()

    def request(self, method: str, path: str, *, body: bytes = b"",
                headers: Optional[Mapping[str, str]] = None, timeout: Optional[float] = None,
                max_body: int = MAX_BODY_BYTES) -> Answer:
        """Return the whole answer, whatever its status. Unreachable when there is none in time.

        A kept connection that turns out closed before any byte of the answer came
        is replaced once; the request is then sent again.
        """
        limit = self._timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is not None:
            try:
                return self._finish(connection, method, path, body, headers, deadline, max_body)
            except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError):
                connection.close()
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                raise _unreachable(self.url, error) from error
        connection = self._connect(limit)
        try:
            return self._finish(connection, method, path, body, headers, deadline, max_body)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise _unreachable(self.url, error) from error
        except BaseException:
            connection.close()
            raise

    def stream(self, method: str, path: str, *, body: bytes = b"",
               headers: Optional[Mapping[str, str]] = None, timeout: Optional[float] = None,
               head_seconds: Optional[float] = None) -> Stream:
        """Return an answer whose body is still to be read; ``timeout`` is for each read of it.

        ``head_seconds`` is for its whole head, of somebody who may send that byte by byte for ever.
        """
        connection = self._connect(self._timeout if timeout is None else timeout)
        try:
            connection.request(method, path, body=body or None, headers=dict(headers or {}))
            with _cut_after(connection.sock, head_seconds):
                response = connection.getresponse()
            return Stream(connection, response, self.url)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise _unreachable(self.url, error) from error

    def close(self) -> None:
        """Close what is idle; a later request opens anew."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _keep(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if len(self._idle) < MAX_IDLE:
                self._idle.append(connection)
                return
        connection.close()

    def _connect(self, timeout: float) -> http.client.HTTPConnection:
        if self._context is not None:
            connection = _TlsConnection(self._host, self._port, timeout=timeout, context=self._context)
            connection.server_name = self._server_name or self._host
            return connection
        return http.client.HTTPConnection(self._host, self._port, timeout=timeout)

    def _finish(self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes,
                headers: Optional[Mapping[str, str]], deadline: float, max_body: int) -> Answer:
        if connection.sock is not None:
            connection.sock.settimeout(max(0.001, deadline - time.monotonic()))
        connection.request(method, path, body=body or None, headers=dict(headers or {}))
        sock = connection.sock
        response = connection.getresponse()
        data = _read_all(response, sock, deadline, max_body, self.url)
        if response.will_close:
            connection.close()
        else:
            self._keep(connection)
        return Answer(response.status, _headers(response), data)


@contextlib.contextmanager
def _cut_after(sock: Optional[socket.socket], seconds: Optional[float]) -> Iterator[None]:
    """End the connection when what is done in here takes longer: who reads from it wakes up."""
    if sock is None or seconds is None:
        yield
        return

    def cut() -> None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
    timer = threading.Timer(seconds, cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _read_all(response: http.client.HTTPResponse, sock: Optional[socket.socket], deadline: float,
              max_body: int, where: str) -> bytes:
    pieces, size = [], 0
    length = response.length
    while length is None or size < length:
        left = deadline - time.monotonic()
        if left <= 0:
            raise socket.timeout("the whole answer did not come in time")
        if sock is not None and not response.isclosed():
            sock.settimeout(left)
        # read(n) would wait for all n bytes, each within the socket's timeout
        piece = response.read1(1 << 16 if length is None else min(1 << 16, length - size))
        if not piece:
            break
        pieces.append(piece)
        size += len(piece)
        if size > max_body:
            raise Unreachable(f"{where}: an answer of more than {max_body} bytes")
    if length is not None and size < length:
        raise http.client.IncompleteRead(b"", length - size)
    response.close()                  # 3.9's read1 does not notice the end by itself
    return b"".join(pieces)


def _headers(response: http.client.HTTPResponse) -> Dict[str, str]:
    return {name.lower(): value for name, value in response.getheaders()}


def _unreachable(where: str, error: Exception) -> Unreachable:
    if isinstance(error, (socket.timeout, TimeoutError)):
        why = "no answer in time"
    elif isinstance(error, ConnectionRefusedError):
        why = "connection refused"
    elif isinstance(error, ssl.SSLCertVerificationError):
        why = f"its certificate is not trusted: {error.verify_message}"
    elif isinstance(error, ssl.SSLError) and error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):
        why = "it does not speak TLS: is its address http://?"
    elif isinstance(error, socket.gaierror):
        why = "the name cannot be resolved"
    elif isinstance(error, http.client.IncompleteRead):
        why = "the answer was cut off"
    else:
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return Unreachable(f"{where}: {why}", hint="is it running, and is this its address?")
