"""The control API's HTTP server: a thread per connection, everything bounded.

Every wait has a deadline, every size a cap that is checked before anything is
read, and there is one strict reader in front of all handlers (http_head).
"""
from __future__ import annotations

import ipaddress
import logging
import socket
import ssl
import threading
import time
from typing import Dict, FrozenSet, Iterable, Optional, Set, Tuple

from llmgw.domain.errors import ApiError, ConfigError, Forbidden, Unauthorized
from llmgw.parse.address import is_loopback
from llmgw.system import tls
from llmgw.system.attempts import FailedAttempts
from llmgw.system.http_conversation import Conversation, Gone
from llmgw.system.http_head import Head
from llmgw.system.ports import cannot_listen, listening
from llmgw.system.routes import Admitted, RouteTable

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 4096
STACK_BYTES = 256 << 10
BACKLOG = 512
MAX_HANDSHAKES = 64           # unfinished ones, of one address


class HttpServer:
    """Listens from the start on; ``serve`` answers until ``stop``. Port 0 picks a free one."""

    def __init__(self, host: str, port: int, table: RouteTable, *,
                 allowed_hosts: Iterable[str] = (), max_connections: int = MAX_CONNECTIONS,
                 context: Optional[ssl.SSLContext] = None) -> None:
        if context is None and not is_loopback(host):
            raise ConfigError(f"refusing to listen on {host}:{port}: off loopback llmgw listens with TLS only")
        self._table = table
        self._max = max_connections
        self._context = context
        self._failed = FailedAttempts()
        self._shaking: Dict[str, int] = {}               # address: handshakes that are not over
        self.allow_hosts(allowed_hosts, host)
        self._listener = _listen(host, port)
        self.host, self.port = host, int(self._listener.getsockname()[1])
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._idle: Set[socket.socket] = set()
        self._open = 0
        self._thread: Optional[threading.Thread] = None
        self.counts: Dict[Tuple[str, int], int] = {}     # (route pattern, status): answers

    @property
    def url(self) -> str:
        """Return where this machine reaches the server."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.host, self.host)
        scheme = "http" if self._context is None else "https"
        return f"{scheme}://[{host}]:{self.port}" if ":" in host else f"{scheme}://{host}:{self.port}"

    def allow_hosts(self, names: Iterable[str], host: str = "") -> None:
        """Answer to these names, besides localhost and every address."""
        self._hosts: FrozenSet[str] = frozenset({"localhost", (host or self.host).lower(), *map(str.lower, names)})

    @property
    def connections(self) -> int:
        return self._open

    def start(self) -> None:
        """Answer in threads of its own."""
        self._thread = threading.Thread(target=self._accept, name="http-accept", daemon=True)
        self._thread.start()

    def stop(self, grace_seconds: float = 5.0) -> None:
        """Take no new connection, let running requests finish within the grace, end the rest."""
        self._stopping.set()
        try:
            self._listener.shutdown(socket.SHUT_RDWR)     # wakes accept
        except OSError:
            pass
        self._listener.close()
        deadline = time.monotonic() + grace_seconds
        while self._open and time.monotonic() < deadline:
            with self._lock:
                for sock in self._idle:
                    _shut(sock)
            time.sleep(0.02)
        if self._thread is not None:
            self._thread.join(1.0)

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                sock, peer = self._listener.accept()
            except OSError as error:
                if self._stopping.is_set():
                    return
                log.warning("cannot accept a connection: %s", error.strerror or error)
                self._stopping.wait(0.1)                   # EMFILE: others may close theirs
                continue
            address = str(peer[0])
            with self._lock:
                full = self._open >= self._max
                crowd = self._context is not None and self._shaking.get(address, 0) >= MAX_HANDSHAKES
                if not full and not crowd:
                    self._open += 1
                    self._shaking[address] = self._shaking.get(address, 0) + 1
            if crowd:
                sock.close()                               # it comes again, or was up to no good
            elif full or not self._hand_over(sock, address):
                _refuse_full(sock)

    def _hand_over(self, sock: socket.socket, address: str) -> bool:
        previous = threading.stack_size(STACK_BYTES)
        try:
            threading.Thread(target=self._connection, args=(sock, address), name="http", daemon=True).start()
            return True
        except RuntimeError:                               # no more threads
            self._greeted(address)
            with self._lock:
                self._open -= 1
            return False
        finally:
            threading.stack_size(previous)

    def _greeted(self, address: str) -> None:
        """Note that a connection's beginning is over, well or badly."""
        with self._lock:
            left = self._shaking.pop(address, 1) - 1
            if left > 0:
                self._shaking[address] = left

    def _connection(self, sock: socket.socket, address: str) -> None:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)   # else 44 ms per answer
            try:
                if self._context is not None:
                    sock = tls.accept(sock, self._context)
            except tls.NotTls:
                _say_https(sock)
                return
            finally:
                self._greeted(address)
            Conversation(self, sock, address).run()
        except (Gone, OSError):
            pass
        except Exception:
            log.exception("connection failed")
        finally:
            sock.close()
            with self._lock:
                self._open -= 1
                self._idle.discard(sock)

    # What one conversation asks of its server.

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    def mark_idle(self, sock: socket.socket, idle: bool) -> None:
        with self._lock:
            (self._idle.add if idle else self._idle.discard)(sock)

    def check_host(self, head: Head) -> None:
        """Refuse a Host that is no name of ours (DNS rebinding) and a foreign Origin that writes."""
        if head.host and head.host not in self._hosts and not _is_address(head.host):
            raise ApiError(f"this server is not called {head.host:.100}", status=421, reason="Misdirected",
                           hint="use its address")
        origin = head.headers.get("origin")
        if origin and head.method not in ("GET", "HEAD"):
            if origin.partition("://")[2] != head.headers.get("host", ""):
                raise Forbidden(f"a page of {origin:.100} may not change anything here")

    def admit(self, head: Head, address: str) -> Admitted:
        """Return what this head opens; who shows many wrong tokens is told to wait, who shows a right one is not."""
        try:
            return self._table.admit(head.method, head.target, head.headers)
        except Unauthorized:
            over = self._failed.count(address) if head.headers.get("authorization") else 0
            if not over:
                raise
            if over == 1:
                log.warning("many wrong tokens from=%s", address)
            raise ApiError("too many wrong tokens from this network", status=429, reason="TooMany",
                           hint="wait a minute, and check the token") from None

    def count(self, pattern: str, status: int) -> None:
        with self._lock:
            self.counts[pattern, status] = self.counts.get((pattern, status), 0) + 1


def _listen(host: str, port: int) -> socket.socket:
    try:
        return listening(host, port, BACKLOG)
    except (OSError, OverflowError) as error:
        raise cannot_listen("the server", host, port, error,
                            "stop it, or choose another port with --listen HOST:PORT") from error


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _refuse_full(sock: socket.socket) -> None:
    body = b'{"reason":"Full","message":"too many connections","hint":"try again in a moment"}'
    try:
        sock.setblocking(False)
        sock.send(b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 2\r\n"
                  b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    except OSError:
        pass
    sock.close()


def _say_https(sock: socket.socket) -> None:
    body = b"this port speaks TLS: use https://\n"
    try:
        sock.settimeout(1.0)
        sock.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n"
                     b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(1 << 16):                          # or closing would reset what was said
            pass
    except OSError:
        pass


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass


