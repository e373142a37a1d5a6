"""A router as a process, with a table in a folder of its own, and a stand-in for the control plane."""
from __future__ import annotations

import dataclasses
import hashlib
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
from urllib.parse import parse_qs, urlsplit

from llmgw.api import wire
from llmgw.domain.model import Task
from llmgw.domain.route import RoutedKey, RoutedModel, RoutedReplica, RouteTable
from llmgw.domain.secret import Secret
from llmgw.system import files
from tests.fakes.raw_client import RawClient, ask, request
from tests.fakes.upstream import wait_for

KEY = "llmgw_infer_00000000_a-users-key"
REPLICA_KEY = "replica-key-of-m"


def replica(port, name="m-1", **more):
    return RoutedReplica(name, "node", "127.0.0.1", port, Secret(REPLICA_KEY), "llama.cpp", **{"slots": 4, **more})


def model(*ports, name="m", task=Task.CHAT, **more):
    """One model with a replica at each port (or as given)."""
    replicas = tuple(port if isinstance(port, RoutedReplica) else replica(port, f"{name}-{index}")
                     for index, port in enumerate(ports))
    return RoutedModel(name, "llama.cpp", task=task, replicas=replicas, created=1700000000, **more)


def table(*models, revision=1, keys=((KEY, ()),)):
    return RouteTable("test", 1, revision, models, tuple(
        RoutedKey(f"k{index}", hashlib.sha256(key.encode()).hexdigest(), tuple(names))
        for index, (key, names) in enumerate(keys)))


def chat(content="hi", **more):
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": content}], **more}).encode()


class RouterProcess:
    """Started with ``routes`` as its kept table (None: without one)."""

    def __init__(self, folder, routes=None, *options, env=None, through=()):
        self.folder = str(folder)
        if routes is not None:
            files.write_atomic(os.path.join(self.folder, "table.json"), wire.dumps(wire.ROUTE_TABLE, routes))
        self.log_path = os.path.join(self.folder, "router.log")
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                [*through, sys.executable, "-W", "error", "-m", "llmgw", "router", "--listen", "127.0.0.1:0", "--data-dir", self.folder,
                 *options], stderr=log, env={**os.environ, **(env or {})})
        wait_for(self._listens, what="the router")

    def _listens(self):
        assert self.process.poll() is None, self.log()
        try:
            with open(os.path.join(self.folder, "endpoint.json"), encoding="ascii") as source:
                endpoint = json.load(source)
        except (OSError, ValueError):
            return False
        if endpoint["pid"] != self.process.pid:
            return False
        self.url = endpoint["url"]
        self.port = urlsplit(self.url).port
        return True

    def log(self):
        with open(self.log_path, encoding="utf-8", errors="replace") as source:
            return source.read()

    def ask(self, method="POST", path="/v1/chat/completions", body=None, key=KEY, fields=()):
        return ask(self.port, method, path, (chat() if body is None else body) if method == "POST" else b"", key, fields)

    def open(self, body=None, path="/v1/chat/completions", key=KEY, fields=()):
        """Send a request on a connection of its own and return the connection."""
        client = RawClient(self.port)
        client.send(request("POST", path, chat() if body is None else body, key, fields))
        return client

    def metrics(self):
        """Return {sample line without value: value}."""
        lines = ask(self.port, "GET", "/metrics").body.decode().splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}

    def in_flight(self):
        return sum(value for name, value in self.metrics().items() if name.startswith("llmgw_router_inflight"))

    def terminate(self):
        self.process.send_signal(signal.SIGTERM)

    def stop(self):
        if self.process.poll() is None:
            self.process.kill()
        return self.process.wait(40)


class StandInControlPlane:
    """Answers the router's two calls from ``self.table``; keeps the reports."""

    def __init__(self, first=None):
        self._changed = threading.Condition()
        self.table, self.reports, self.calls = first, [], 0
        self.status = 200
        plane = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True
            timeout = 60

            def log_message(self, *unused):
                pass

            def do_GET(self):
                plane.calls += 1
                asked = {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}
                after = int(asked.get("after", -1))
                with plane._changed:
                    plane._changed.wait_for(lambda: plane.table is not None and plane.table.revision != after,
                                            float(asked.get("wait", 0)))
                    found = plane.table
                if plane.status != 200:
                    self.answer(plane.status, b"")
                elif found is None or found.revision == after:
                    self.answer(304, b"")
                else:
                    self.answer(200, wire.dumps(wire.ROUTE_TABLE, found))

            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                plane.reports.append(wire.loads(wire.ROUTER_REPORT, body, "report"))
                self.answer(204, b"")

            def answer(self, status, body):
                self.send_response(status)
                if status == 200:
                    self.send_header("Content-Length", str(len(body)))
                elif status not in (204, 304):
                    self.send_header("Content-Length", "0")
                self.end_headers()
                self.wfile.write(body)

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False        # a long poll may be waiting

            def handle_error(self, *unused):
                pass                      # a router that is gone does not take its answer

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def publish(self, routes):
        with self._changed:
            revision = (self.table.revision if self.table else 0) + 1
            self.table = dataclasses.replace(routes, revision=revision)
            self._changed.notify_all()
        return revision

    def close(self):
        self._server.shutdown()
        self._server.server_close()
