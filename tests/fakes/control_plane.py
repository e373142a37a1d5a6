"""A control plane that says what a test tells it to: real HTTP on loopback, the wire of api/."""
from __future__ import annotations

import collections
import hashlib
import json
import pathlib
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Callable, Deque, Dict, List, Optional
from urllib.parse import unquote, urlsplit

from llmgw.api import wire
from llmgw.domain import digest
from llmgw.domain.engine import Asset, EngineWanted
from llmgw.domain.heartbeat import HeartbeatAnswer, LogTail, NodeDesired, NodeObserved, NodeRequest
from llmgw.domain.model import CHUNK_BYTES, ModelSpec, Weights, WeightsFile
from llmgw.domain.replica import ShardWanted
from llmgw.domain.secret import Secret

TOKEN = "llmgw_node_00000000_" + "t" * 43


def sha256_of(path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as source:
        for piece in iter(lambda: source.read(1 << 20), b""):
            digest.update(piece)
    return digest.hexdigest()


def weights_of(path, name="tiny", context_train=2048) -> Weights:
    """Return the manifest of one file, as the mirror would have it."""
    data = pathlib.Path(path).read_bytes()
    chunks = tuple(hashlib.sha256(data[at:at + CHUNK_BYTES]).hexdigest()
                   for at in range(0, len(data), CHUNK_BYTES))
    file = WeightsFile(f"{name}.gguf", len(data), hashlib.sha256(data).hexdigest(), chunks)
    mark = digest.fingerprint([(file.name, file.size_bytes, file.sha256)])
    return Weights(name, mark, (file,), context_train=context_train)


def shard_of(weights, shard_id="r1.0", name="gemma", version="b10991", **model) -> ShardWanted:
    spec = ModelSpec(**{"name": name, "engine": "llama.cpp", "weights": f"mirror:{weights.name}",
                        "context_length": 512, "parallel": 2, **model})
    return ShardWanted(shard_id, shard_id.rpartition(".")[0], 0, spec, version, weights,
                       Secret(f"llmgw_infer_replica1_{shard_id}-{'k' * 30}"))


def engine_of(archive, version="b10991") -> EngineWanted:
    path = pathlib.Path(archive.path)
    return EngineWanted("llama.cpp", version, (Asset(path.name, path.stat().st_size, archive.sha256),))


class ControlPlane:
    """``desired`` is what the next heartbeat gets; ``observed`` what the last one said."""

    def __init__(self, port: int = 0) -> None:
        self.epoch, self.generation = 1, 0
        self.desired = NodeDesired()
        self.observed: Optional[NodeObserved] = None
        self.heartbeats = 0
        self.heard: Deque[NodeObserved] = collections.deque(maxlen=5000)
        self.requests: List[NodeRequest] = []
        self.log_tails: List[LogTail] = []
        self.blobs: Dict[str, pathlib.Path] = {}       # sha256 -> file
        self.assets: Dict[str, pathlib.Path] = {}      # name -> file
        self.ranges: List[str] = []                    # (path range) of each file request
        self.spoil: Callable[[str, bytes], bytes] = lambda name, data: data
        self.cut_after: Optional[int] = None           # bytes of a body, then the connection ends
        self.slow_bytes_per_second = 0
        self.holding = threading.Event()               # set: heartbeats are heard, and answered when it is cleared
        self.in_flight = 0                             # heartbeats now
        self.raw_answer: Optional[bytes] = None        # sent instead of a heartbeat's answer
        self.ranged = True
        self.cannot: List[str] = []                    # reasons why an archive cannot be given, one for each request
        self._news = threading.Condition()
        plane = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
                plane._post(self, urlsplit(self.path).path, body)

            def do_GET(self):
                plane._get(self, unquote(urlsplit(self.path).path))

            def log_message(self, *unused):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def want(self, engines=(), shards=()) -> None:
        """Desire exactly this from now on, and offer the files it names."""
        self.desired = NodeDesired(tuple(engines), tuple(shards))
        self.generation += 1

    def offer(self, *, archive=None, weights=None, path=None) -> None:
        if archive is not None:
            self.assets[pathlib.Path(archive.path).name] = pathlib.Path(archive.path)
        if weights is not None:
            self.blobs[weights.files[0].sha256] = pathlib.Path(path)

    def wait(self, condition: Callable[[NodeObserved], bool], seconds: float = 60.0) -> NodeObserved:
        """Return the first report that meets the condition; fail with the last one otherwise."""
        deadline = time.monotonic() + seconds
        with self._news:
            while True:
                if self.observed is not None and condition(self.observed):
                    return self.observed
                left = deadline - time.monotonic()
                if left <= 0 or not self._news.wait(left):
                    raise AssertionError(f"not within {seconds} seconds; last report: {self.observed}")

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _post(self, handler, path: str, body: bytes) -> None:
        if handler.headers.get("Authorization") != f"Bearer {TOKEN}":
            _send(handler, 401, b'{"reason":"Unauthorized","message":"no such token","hint":null}')
            return
        if path.endswith("/log-tails"):
            self.log_tails.append(wire.loads(wire.LOG_TAIL, body, "log tail"))
            with self._news:
                self._news.notify_all()
            _send(handler, 204, b"")
            return
        observed = wire.loads(wire.NODE_OBSERVED, body, "heartbeat")
        with self._news:
            self.observed = observed
            self.heartbeats += 1
            self._news.notify_all()
        same = (observed.epoch, observed.generation) == (self.epoch, self.generation)
        requests, self.requests = tuple(self.requests), []
        answer = HeartbeatAnswer("test", self.epoch, self.generation, 0.5, None if same else self.desired, requests)
        self.heard.append(observed)
        self._hold()
        _send(handler, 200, self.raw_answer or wire.dumps(wire.HEARTBEAT_ANSWER, answer))

    def _hold(self) -> None:
        deadline = time.monotonic() + 60
        with self._news:
            self.in_flight += 1
        while self.holding.is_set() and time.monotonic() < deadline:
            time.sleep(0.02)
        with self._news:
            self.in_flight -= 1

    def _get(self, handler, path: str) -> None:
        name = path.rsplit("/", 1)[1]
        file = self.blobs.get(name) if path.startswith("/v1/blobs/") else self.assets.get(name)
        if file is None:
            _send(handler, 404, json.dumps({"reason": "NotFound", "message": f"no file {name}"}).encode())
            return
        if self.cannot and file in self.assets.values():
            _send(handler, 503, json.dumps({"reason": self.cannot.pop(0), "message": "github is not reached"}).encode())
            return
        wanted = handler.headers.get("Range", "")
        self.ranges.append(f"{name} {wanted}")
        data = self.spoil(name, file.read_bytes())
        start = int(wanted[6:].split("-")[0]) if wanted and self.ranged else 0
        handler.send_response(206 if wanted and self.ranged else 200)
        handler.send_header("Content-Length", str(len(data) - start))
        if wanted and self.ranged:
            handler.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        handler.end_headers()
        self._body(handler, data[start:])

    def _body(self, handler, data: bytes) -> None:
        try:
            for at in range(0, len(data), 256 << 10):
                if self.cut_after is not None and at >= self.cut_after:
                    handler.close_connection = True
                    return
                piece = data[at:at + (256 << 10)]
                handler.wfile.write(piece)
                if self.slow_bytes_per_second:
                    time.sleep(len(piece) / self.slow_bytes_per_second)
        except OSError:
            handler.close_connection = True


def _send(handler, status: int, body: bytes) -> None:
    try:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body)))
        handler.send_header("Content-Type", "application/json")
        handler.end_headers()
        handler.wfile.write(body)
    except OSError:
        handler.close_connection = True
