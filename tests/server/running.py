"""A real server process, and nodes and routers that are only heartbeats (stand-ins)."""
from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

from llmgw.api import paths, wire
from llmgw.api.client import ControlClient
from llmgw.domain.engine import EngineObserved, EnginePhase
from llmgw.domain.heartbeat import NodeObserved
from llmgw.domain.model import Weights, WeightsFile
from llmgw.domain.node import NodeFacts, NodeIdentity
from llmgw.domain.replica import ShardObserved, ShardState
from llmgw.domain.route import Gauges, RouterReport
from llmgw.domain.secret import Secret

DEADLINE = 40.0
CONFIG = """
cluster: test
engines:
  llama.cpp: {version: b10991}
models:
  - name: m
    engine: llama.cpp
    weights: mirror:m
    replicas: %d
    context_length: 2048
"""


def until(condition, what="it", deadline=DEADLINE):
    """Wait for ``condition`` to give something true, and return that."""
    end = time.monotonic() + deadline
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < end, f"{what} did not happen in time"
        time.sleep(0.05)


class RunningServer:
    """Owns a folder with server.yaml and the data; may be started again and again."""

    def __init__(self, folder, config=CONFIG % 1):
        self.folder = folder
        self.data = folder / "data"
        self.config = folder / "server.yaml"
        self.log = folder / "server.log"
        self.process = None
        self._clients = []
        self.write(config)

    def write(self, text):
        scratch = self.folder / "server.yaml.new"
        scratch.write_text(text)
        os.replace(scratch, self.config)

    def command(self, *more):
        return [sys.executable, "-W", "error", "-m", "llmgw", "server", "--config", str(self.config),
                "--data-dir", str(self.data), "--listen", "127.0.0.1:0", *more]

    def start(self, **environment):
        endpoint = self.data / "endpoint.json"
        if endpoint.exists():
            endpoint.unlink()
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                self.command(), stdout=log, stderr=log,
                env={**os.environ, "LLMGW_GITHUB_API": "http://127.0.0.1:9", **environment})
        until(lambda: endpoint.exists() or self.process.poll() is not None, "the start")
        assert self.process.poll() is None, self.log.read_text()[-3000:]
        self.url = json.loads(endpoint.read_text())["url"]
        return self

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(DEADLINE)

    def stop(self):
        for client in self._clients:
            client.close()
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(DEADLINE)
        return self.process.returncode if self.process is not None else None

    def client(self, role="admin"):
        made = ControlClient([self.url], Secret((self.data / "tokens" / role).read_text().strip()), timeout=DEADLINE)
        self._clients.append(made)
        return made

    def import_model(self, name="m", data=b"weights of a model that nobody runs"):
        """Bring weights in through the door that ctl uses."""
        digest = upload(self.client(), data)
        given = Weights(name, "", (WeightsFile(f"{name}.bin", len(data), digest),), format="raw")
        return self.client().call("PUT", paths.fill(paths.MIRROR_MODEL, model=name), send=wire.WEIGHTS, value=given,
                                  receive=wire.WEIGHTS)


def upload(client, data):
    digest = hashlib.sha256(data).hexdigest()
    where = paths.fill(paths.UPLOAD, digest=digest)
    at = client.json("GET", where)["received_bytes"]
    if at < len(data):
        client.request("PUT", f"{where}?offset={at}", body=data[at:], content_type="application/octet-stream")
    client.json("POST", paths.fill(paths.UPLOAD_FINISH, digest=digest), {"size_bytes": len(data)})
    return digest


class StandInNode:
    """Says what a well node would say: everything that is wanted runs at once, unless ``state`` says otherwise."""

    def __init__(self, server, name, memory=1 << 36):
        self.server, self.name = server, name
        self.client = server.client("node")
        self.state = ShardState.READY
        self.first_failure = None
        self.desired = None
        self.answer = None
        self.incarnations = {}
        self.observed = NodeObserved(
            NodeIdentity(name, "0.1.0", f"boot-{name}", "127.0.0.1", 7802, {}),
            NodeFacts(arch="x86_64", memory_total_bytes=memory, memory_available_bytes=memory,
                      disk_total_bytes=1 << 40, disk_free_bytes=1 << 39), True,
            engines=(EngineObserved("llama.cpp", "b10991", EnginePhase.INSTALLED, usable=True),))

    def beat(self):
        shards = ()
        if self.desired is not None:
            shards = tuple(ShardObserved(shard.id, self.state, message="", port=7900, pid=1,
                                         incarnation=self.incarnations.setdefault(shard.id, 1),
                                         first_failure=self.first_failure)
                           for shard in self.desired.shards)
        self.observed = replace(self.observed, shards=shards, clock=time.time())
        answer = self.client.call("POST", paths.fill(paths.HEARTBEAT, node=self.name), send=wire.NODE_OBSERVED,
                                  value=self.observed, receive=wire.HEARTBEAT_ANSWER)
        assert (answer.epoch, answer.generation) >= (self.observed.epoch, self.observed.generation)
        if answer.desired is not None:
            self.desired = answer.desired
            self.observed = replace(self.observed, epoch=answer.epoch, generation=answer.generation)
        self.answer = answer
        return answer


class StandInRouter:
    def __init__(self, server, name="r"):
        self.client, self.name, self.table = server.client("router"), name, None

    def poll(self, wait=0):
        after = self.table.revision if self.table is not None else -1
        path = f"{paths.ROUTES}?wait={wait}" + (f"&after={after}" if self.table is not None else "")
        table = self.client.call("GET", path, receive=wire.ROUTE_TABLE)
        self.table = table if table is not None else self.table
        return self.table

    def report(self, in_flight=None, answering=()):
        replicas = {row.id: Gauges(0.0, 0.0, None, None, (in_flight or {}).get(row.id, 0))
                    for model in self.table.models for row in model.replicas}
        made = RouterReport(self.name, self.table.revision, replicas, answering)
        self.client.call("POST", paths.fill(paths.ROUTER_REPORT, router=self.name), send=wire.ROUTER_REPORT, value=made)
