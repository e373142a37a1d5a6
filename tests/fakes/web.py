"""A small HTTP server on loopback that can misbehave in every way a download has met."""
from __future__ import annotations

import socket
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Callable, Dict, List, Optional


@dataclass
class Reply:
    status: int = 200
    body: bytes = b""
    headers: Dict[str, str] = field(default_factory=dict)
    cut_after: Optional[int] = None       # send so many bytes of the body, then close
    stall_after: Optional[int] = None     # send so many, then say nothing until the server stops
    ranges: bool = True                   # False: ignore Range
    close: bool = False                   # end the connection after the body, whatever length was promised


class FakeWeb:
    """Answers what ``answer(path, headers)`` returns; use it in ``with``. ``requests`` has what was asked."""

    def __init__(self, answer: Callable[[str, Dict[str, str]], Reply]) -> None:
        self.requests: List[Dict[str, str]] = []
        self._answer = answer
        self._stopping = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True
            timeout = 60

            def do_GET(self) -> None:
                headers = {name.lower(): value for name, value in self.headers.items()}
                outer.requests.append({"path": self.path, **headers})
                outer._send(self, outer._answer(self.path, headers), headers.get("range", ""))

            def do_CONNECT(self) -> None:
                outer.requests.append({"path": self.path, "method": "CONNECT"})
                self.send_error(502)

            def log_message(self, *unused: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, *unused: object) -> None:     # clients that go away
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def paths(self) -> List[str]:
        return [request["path"] for request in self.requests]

    def _send(self, handler: BaseHTTPRequestHandler, reply: Reply, asked: str) -> None:
        body, status, headers = reply.body, reply.status, dict(reply.headers)
        if status == 200 and reply.ranges and asked.startswith("bytes="):
            first = int(asked[6:].partition("-")[0])
            headers["Content-Range"] = f"bytes {first}-{len(body) - 1}/{len(body)}"
            body, status = body[first:], 206
        handler.send_response(status)
        headers.setdefault("Content-Type", "application/octet-stream")
        headers.setdefault("Content-Length", str(len(body)))
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        limit = min(len(body) if limit is None else limit for limit in (reply.cut_after, reply.stall_after))
        handler.wfile.write(body[:limit])
        handler.wfile.flush()
        if reply.stall_after is not None:
            self._stopping.wait(120)
        if limit < len(body) or reply.close:
            handler.close_connection = True
            handler.connection.shutdown(socket.SHUT_RDWR)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._stopping.set()
        self._server.shutdown()
        self._thread.join(10)
        self._server.server_close()
