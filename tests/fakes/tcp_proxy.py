"""A TCP proxy that delays, drops, half-closes, truncates and resets what passes through it."""
from __future__ import annotations

import socket
import struct
import threading
import time


class TcpProxy:
    """Between a client and 127.0.0.1:``port``. Set the attributes at any time; they count for what passes next.

    ``delay_seconds`` before each piece · ``blocked``: nothing passes, nothing closes ·
    ``cut_after``: bytes of the answer after which the connection ends (``cut`` says how:
    "close", "reset", "half") · ``refused``: new connections are closed at once.
    """

    def __init__(self, port):
        self.delay_seconds, self.blocked, self.cut_after, self.cut, self.refused = 0.0, False, None, "close", False
        self.connections = 0
        self._to = port
        self._open = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self.close()

    def close(self):
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._listener.close()
        self.drop()

    def drop(self, how="close"):
        """End every connection that passes through now."""
        for sock in list(self._open):
            _end(sock, how)

    def _accept(self):
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            if self.refused:
                _end(client, "reset")
                client.close()
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self._to), 20)
            except OSError:
                client.close()
                continue
            both = []
            for sock in (client, server):
                sock.settimeout(None)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._open.add(sock)
            for source, sink, is_answer in ((client, server, False), (server, client, True)):
                thread = threading.Thread(target=self._pump, args=(source, sink, is_answer, both), daemon=True)
                thread.start()

    def _pump(self, source, sink, is_answer, both):
        passed = 0
        try:
            while True:
                piece = source.recv(65536)
                while self.blocked:
                    time.sleep(0.01)
                if self.delay_seconds:
                    time.sleep(self.delay_seconds)
                if is_answer and self.cut_after is not None and passed + len(piece) >= self.cut_after:
                    sink.sendall(piece[:self.cut_after - passed])
                    if self.cut == "half":
                        sink.shutdown(socket.SHUT_WR)
                    else:
                        _end(sink, self.cut)
                        _end(source, self.cut)
                    return
                if not piece:
                    sink.shutdown(socket.SHUT_WR)
                    return
                sink.sendall(piece)
                passed += len(piece)
        except OSError:
            _end(sink, "close")
            _end(source, "close")
        finally:
            both.append(source)
            if len(both) == 2:
                for sock in (source, sink):
                    self._open.discard(sock)
                    sock.close()


def _end(sock, how):
    try:
        if how == "reset":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.shutdown(socket.SHUT_RD)     # a thread may be reading: the socket ends when it lets go
            sock.close()
        else:
            sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
