"""A client that writes any bytes and reads what comes back."""
from __future__ import annotations

import json
import socket


class RawAnswer:
    def __init__(self, head, body, whole):
        self.head, self.body, self.whole = head, body, whole
        lines = head.decode("latin-1").split("\r\n")
        self.status = int(lines[0].split(" ")[1])
        self.fields = [tuple(part.strip() for part in line.split(":", 1)) for line in lines[1:] if line]
        self.headers = {name.lower(): value for name, value in self.fields}

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def error(self):
        return self.json["error"]


class RawClient:
    """One connection."""

    def __init__(self, port, seconds=40):
        self.sock = socket.create_connection(("127.0.0.1", port), seconds)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.data = b""

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self.sock.close()

    def send(self, data):
        self.sock.sendall(data)

    def more(self):
        """Read once; False at the end of the connection."""
        try:
            piece = self.sock.recv(65536)
        except ConnectionResetError:
            piece = b""
        self.data += piece
        return bool(piece)

    def until(self, mark):
        """Read until ``mark`` is there and return what came up to its end."""
        while mark not in self.data:
            assert self.more(), f"the connection ended before {mark!r}: {self.data!r}"
        end = self.data.index(mark) + len(mark)
        taken, self.data = self.data[:end], self.data[end:]
        return taken

    def rest(self):
        """Read to the end of the connection."""
        while self.more():
            pass
        taken, self.data = self.data, b""
        return taken

    def closed(self):
        """Whether the connection ends without another byte."""
        return self.rest() == b""

    def answer(self, to_head=False):
        """Read one response, by its framing. ``whole`` is False when it was cut off."""
        head = self.until(b"\r\n\r\n")[:-4]
        found = RawAnswer(head, b"", True)
        if to_head or found.status in (204, 304) or found.status < 200:
            return found
        if found.headers.get("transfer-encoding") == "chunked":
            found.body, found.whole = self._chunks()
        elif "content-length" in found.headers:
            length = int(found.headers["content-length"])
            while len(self.data) < length and self.more():
                pass
            found.body, self.data = self.data[:length], self.data[length:]
            found.whole = len(found.body) == length
        else:
            found.body = self.rest()
        return found

    def _line(self):
        while b"\r\n" not in self.data:
            if not self.more():
                return None
        line, _, self.data = self.data.partition(b"\r\n")
        return line

    def _chunks(self):
        body = bytearray()
        while True:
            line = self._line()
            if line is None:
                return bytes(body), False
            missing = int(line, 16) + 2 - len(self.data)
            last = int(line, 16) == 0
            pieces = [self.data]
            while missing > 0:
                piece = self.sock.recv(min(missing, 1 << 20))
                if not piece:
                    return bytes(body) + b"".join(pieces), False
                pieces.append(piece)
                missing -= len(piece)
            data = b"".join(pieces)
            size = int(line, 16)
            body += data[:size]
            self.data = data[size + 2:]
            if last:
                return bytes(body), True



def request(method, path, body=b"", key=None, fields=(), version="1.1"):
    """Return the bytes of a request."""
    lines = [f"{method} {path} HTTP/{version}", "Host: test"]
    if key:
        lines.append(f"Authorization: Bearer {key}")
    if body or method == "POST":
        lines += [f"Content-Length: {len(body)}", "Content-Type: application/json"]
    return ("\r\n".join(lines + list(fields)) + "\r\n\r\n").encode("latin-1") + body


def ask(port, method, path, body=b"", key=None, fields=()):
    """Send one request on a connection of its own and return the answer."""
    with RawClient(port) as client:
        client.send(request(method, path, body, key, fields))
        return client.answer()
