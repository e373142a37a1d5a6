"""The gate of another node, as a test wants it: one that has a blob, a part of it, lies, hangs, cuts or drips."""
from __future__ import annotations

import contextlib
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from llmgw.domain.heartbeat import Peer
from llmgw.domain.secret import Secret

KEY = "the-key-of-this-pair"


class PeerGate:
    """``fault``: "", "lies", "hangs", "cuts", "drips", "drips its head", "is busy", "refuses", "is not there"."""

    def __init__(self, data, fault="", chunks=None):
        self.data, self.fault, self.chunks = data, fault, chunks or "1" * -(-len(data) // (8 << 20))
        self.sent_bytes, self.asked, self.looked = 0, 0, 0
        self._end = threading.Event()
        gate = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                with contextlib.suppress(OSError):
                    gate._get(self)

            def log_message(self, *unused):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()
        if fault == "is not there":
            self.close()

    def peer(self, fingerprint, node="b"):
        return Peer(node, "127.0.0.1", self.port, Secret(KEY), (fingerprint,))

    def close(self):
        self._end.set()
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()

    def _get(self, handler):
        if handler.headers["Authorization"] != f"Bearer {KEY}" or self.fault == "refuses":
            _send(handler, 401, b"{}")
        elif handler.path.endswith("/chunks"):
            self.looked += 1
            _send(handler, 200, json.dumps({"chunks": self.chunks}).encode())
        elif self.fault == "is busy":
            _send(handler, 503, b"{}")
        elif self.fault == "drips its head":
            self._drip(handler, b"HTTP/1.1 206 Partial Content\r\nX-A: " + b"a" * 100000)
        else:
            self.asked += 1
            self._blob(handler)

    def _blob(self, handler):
        first, last = map(int, handler.headers["Range"][6:].split("-"))
        data = self.data[first:last + 1]
        if self.fault == "lies":
            data = bytes([data[0] ^ 1]) + data[1:]
        handler.send_response(206)
        handler.send_header("Content-Length", str(len(data)))
        handler.send_header("Content-Range", f"bytes {first}-{last}/{len(self.data)}")
        handler.end_headers()
        handler.close_connection = True
        if self.fault == "hangs":
            self._end.wait(120)
        elif self.fault == "drips":
            self._drip(handler, data)
        elif self.fault == "cuts":
            handler.wfile.write(data[:len(data) // 2])
            handler.connection.shutdown(socket.SHUT_RDWR)
        else:
            handler.wfile.write(data)
            self.sent_bytes += len(data)

    def _drip(self, handler, data):
        handler.close_connection = True
        for at in range(len(data)):
            handler.wfile.write(data[at:at + 1])
            handler.wfile.flush()
            if self._end.wait(0.2):
                break


def _send(handler, status, body):
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)
