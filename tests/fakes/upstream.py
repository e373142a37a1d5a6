"""A stand-in for an engine: one thread per connection, and a function that decides every byte of the answer."""
from __future__ import annotations

import json
import socket
import struct
import threading
import time

METRICS = (b"# TYPE llamacpp:requests_processing gauge\nllamacpp:requests_processing 0\n"
           b"llamacpp:requests_deferred 0\nllamacpp:tokens_predicted_total 5\n")
DONE = b"data: [DONE]\n\n"


class Exchange:
    """One request that came, and the socket to answer on."""

    def __init__(self, sock, head, body):
        self.sock, self.head, self.body = sock, head, body
        self.line, *fields = head.decode("latin-1").split("\r\n")
        self.method, self.path, _ = self.line.split(" ")
        self.fields = [tuple(part.strip() for part in field.split(":", 1)) for field in fields if field]
        self.headers = {name.lower(): value for name, value in self.fields}
        self.kept = True
        self.first = True             # that came on its connection

    @property
    def json(self):
        return json.loads(self.body)

    def send(self, *pieces):
        for piece in pieces:
            self.sock.sendall(piece)

    def answer(self, status=200, body=b"{}", content_type="application/json", fields=()):
        head = [f"HTTP/1.1 {status} Some Words", f"Content-Type: {content_type}", f"Content-Length: {len(body)}"]
        self.send("\r\n".join(head + list(fields) + ["", ""]).encode() + body)

    def begin_stream(self, fields=()):
        head = ["HTTP/1.1 200 OK", "Content-Type: text/event-stream", "Transfer-Encoding: chunked"]
        self.send("\r\n".join(head + list(fields) + ["", ""]).encode())

    def chunk(self, payload):
        self.send(b"%x\r\n%b\r\n" % (len(payload), payload))

    def end_stream(self):
        self.send(b"0\r\n\r\n")

    def close(self):
        self.kept = False

    def reset(self):
        """Close with RST."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def wait_gone(self, seconds=20):
        """Wait until the other side has closed; return whether it did."""
        self.sock.settimeout(seconds)
        try:
            return self.sock.recv(1) == b""
        except socket.timeout:
            return False
        except OSError:
            return True
        finally:
            try:
                self.sock.settimeout(None)
            except OSError:
                pass


def event(data):
    return b"data: " + (data if isinstance(data, bytes) else json.dumps(data).encode()) + b"\n\n"


def delta(text, **more):
    return event({"id": "c", "object": "chat.completion.chunk", "model": "m",
                  "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}], **more})


def whole_answer(exchange):
    """Answer as a small engine would."""
    if exchange.json.get("stream"):
        exchange.begin_stream()
        for word in ("Paris", " is", " it"):
            exchange.chunk(delta(word))
        exchange.chunk(DONE)
        exchange.end_stream()
    else:
        exchange.answer(body=json.dumps({"object": "chat.completion", "model": "m", "choices": [
            {"index": 0, "message": {"role": "assistant", "content": "Paris"}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 7, "completion_tokens": 1}}).encode())


class Upstream:
    """Listens on a free port of loopback until closed. ``requests`` are those but for /metrics."""

    def __init__(self, answer=whole_answer, metrics=METRICS):
        self.answer, self.metrics = answer, metrics
        self.requests, self.connections, self.scrapes = [], 0, 0
        self._open = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self.close()

    def close(self):
        """Stop listening and close every connection."""
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._listener.close()
        self.drop()
        for thread in list(self._threads):
            thread.join(20)

    def drop(self):
        """Close every open connection."""
        for sock in list(self._open):
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def _accept(self):
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.connections += 1
            self._open.add(sock)
            thread = threading.Thread(target=self._serve, args=(sock,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, sock):
        data, first = b"", True
        try:
            with sock:
                while True:
                    while b"\r\n\r\n" not in data:
                        piece = sock.recv(65536)
                        if not piece:
                            return
                        data += piece
                    head, _, data = data.partition(b"\r\n\r\n")
                    length = next((int(line.split(b":")[1]) for line in head.split(b"\r\n")
                                   if line.lower().startswith(b"content-length:")), 0)
                    while len(data) < length:
                        piece = sock.recv(65536)
                        if not piece:
                            return
                        data += piece
                    exchange, data = Exchange(sock, head, data[:length]), data[length:]
                    exchange.first, first = first, False
                    if exchange.path == "/metrics":
                        self.scrapes += 1
                        exchange.answer(body=self.metrics, content_type="text/plain")
                        continue
                    self.requests.append(exchange)
                    self.answer(exchange)
                    if not exchange.kept:
                        return
        except OSError:
            pass
        finally:
            self._open.discard(sock)


def wait_for(condition, seconds=40, what="the condition"):
    """Wait until ``condition()`` is true and return its value."""
    until = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > until:
            raise AssertionError(f"{what} did not come true in {seconds} s")
        time.sleep(0.01)
