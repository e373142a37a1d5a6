"""A real agent as a process, a control plane that a test holds in its hand, and what ends both."""
from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from llmgw.agent.keep_gate import MARKER as GATE_MARKER
from llmgw.agent.shard_row import OWNER
from llmgw.domain.model import CHUNK_BYTES
from llmgw.domain.replica import ShardState
from llmgw.system import proc, spawn
from llmgw.system.ports import is_free
from tests.fakes.control_plane import TOKEN, ControlPlane, engine_of, shard_of, weights_of


def wait_for(condition, seconds=60.0, what="condition"):
    """Return the condition's first true value."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"{what}: not within {seconds} seconds"
        time.sleep(0.02)


class Node:
    """One data folder, and the agent processes that work on it one after the other."""

    def __init__(self, tmp_path, plane, first_port):
        self.plane, self.data = plane, tmp_path / "data"
        self.gate_port, self.engine_ports = first_port, first_port + 10
        self.token = tmp_path / "token"
        self.token.write_text(TOKEN + "\n")
        self.log_path = tmp_path / "agent.log"
        self.process = None

    def start(self, *words, **env):
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "llmgw", "--debug", "agent", "--server", self.plane.url, "--token-file",
                 str(self.token), "--node", "n1", "--data-dir", str(self.data), "--gate-port", str(self.gate_port),
                 "--engine-ports", str(self.engine_ports), *words],
                env={**os.environ, **env}, stdout=log, stderr=log)
        return self

    def kill9(self):
        self.process.kill()
        self.process.wait(30)

    def terminate(self):
        self.process.terminate()
        return self.process.wait(90)

    def ended(self, seconds=60):
        return self.process.wait(seconds)

    def engines(self):
        """The pids of running engines of this node's data folder."""
        return sorted(process.pid for process in proc.marked(OWNER, str(self.data)))

    def gate(self):
        found = spawn.find((GATE_MARKER, str(self.data)))
        return found.pid if found else None

    def log(self):
        return self.log_path.read_text()

    def ready(self, shard="r1.0", seconds=90.0, after=-1):
        """Wait until the shard is ready in an incarnation later than ``after``; return what is said of it."""
        def condition(observed):
            return observed.identity.gate_port and any(
                seen.id == shard and seen.state is ShardState.READY and seen.incarnation > after
                for seen in observed.shards)
        return self.seen(self.plane.wait(condition, seconds), shard)

    @staticmethod
    def seen(observed, shard="r1.0"):
        return next((item for item in observed.shards if item.id == shard), None)

    def ask(self, key, body=None, path="/v1/completions", timeout=30.0):
        """Send one request through the gate; return (status, data)."""
        data = json.dumps(body or {"prompt": "Question: What is the capital of France?\nAnswer:", "max_tokens": 4,
                                   "temperature": 0, "stop": ["\n"]}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.gate_port}{path}", data=data, headers={
            "Authorization": f"Bearer {key}", "Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def close(self):
        if self.process is not None and self.process.poll() is None:
            self.kill9()
        for _ in range(2):           # what the agent had begun to start when it was killed shows a moment later
            for pid in self.engines() + [self.gate()]:
                if pid:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)


def free_block(size=30):
    """Return the first of some free ports, below those that the system gives to outgoing connections."""
    for first in range(20000 + os.getpid() % 80 * 140, 32000, size):
        if all(is_free("127.0.0.1", port) for port in range(first, first + size)):
            return first
    raise AssertionError("no free block of ports")


@pytest.fixture
def plane():
    served = ControlPlane()
    yield served
    served.close()


@pytest.fixture
def node(tmp_path, plane):
    made = Node(tmp_path, plane, free_block())
    yield made
    made.close()


@pytest.fixture(scope="session")
def gemma_weights(gemma):
    return weights_of(gemma, "gemma", context_train=32768)


@pytest.fixture
def seeded(node, gemma, gemma_weights):
    """The node's data folder holds the blob of gemma already: most tests are not about fetching it."""
    blob = node.data / "blobs" / "sha256" / gemma_weights.files[0].sha256
    blob.parent.mkdir(parents=True)
    blob.symlink_to(gemma)


@pytest.fixture
def served(seeded, node, plane, llama_archive, gemma, gemma_weights):
    """A node that serves gemma, and the shard that was wanted of it."""
    shard = shard_of(gemma_weights)
    plane.offer(archive=llama_archive, weights=gemma_weights, path=pathlib.Path(gemma))
    plane.want([engine_of(llama_archive)], [shard])
    node.start()
    node.ready()
    return shard


@pytest.fixture
def gguf_weights(tmp_path):
    """(path, weights) of a file of three chunks that is no model of any use."""
    path = tmp_path / "three.gguf"
    path.write_bytes(os.urandom(2 * CHUNK_BYTES + 5000))
    return path, weights_of(path, "three")
