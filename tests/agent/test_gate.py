"""The gate as a process of its own, on real sockets."""
from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from llmgw.api import wire
from llmgw.domain.gate import GateEntry, GateTable
from llmgw.system import files
from llmgw.system.attempts import MOST_ON_LOOPBACK
from tests.fakes.raw_client import RawClient, ask, request
from tests.fakes.upstream import DONE, Upstream, delta, wait_for

KEY = "llmgw_replica_00000000_aaaa"
BODY = b'{"model": "m", "messages": []}'


def sha256(text):
    return hashlib.sha256(text.encode()).hexdigest()


def entry(port, key=KEY, engine="llama.cpp", incarnation=1):
    return GateEntry("m-1", sha256(key), engine, port, incarnation)


class GateProcess:
    """A gate with a table in a folder of its own."""

    def __init__(self, folder, *entries):
        with socket.create_server(("127.0.0.1", 0)) as sock:
            self.port = sock.getsockname()[1]
        self.path = os.path.join(str(folder), "table.json")
        self.write(*entries)
        self.process = subprocess.Popen([sys.executable, "-W", "error", "-m", "llmgw", "gate", "--table", self.path])
        wait_for(self.is_up, what="the gate")

    def write(self, *entries):
        files.write_atomic(self.path, wire.dumps(wire.GATE_TABLE, GateTable("127.0.0.1", self.port, entries)))

    def is_up(self):
        assert self.process.poll() is None
        try:
            return ask(self.port, "GET", "/healthz").status == 200
        except OSError:
            return False

    def take(self, *entries):
        """Write a table and wait until the gate has it."""
        self.write(*entries)
        with open(self.path, "rb") as source:
            wanted = hashlib.sha256(source.read()).hexdigest()
        wait_for(lambda: ask(self.port, "GET", "/healthz").json["table_sha256"] == wanted)

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(40)


@pytest.fixture
def gate(tmp_path):
    running = []

    def start(*entries):
        running.append(GateProcess(tmp_path, *entries))
        return running[-1]

    yield start
    for process in running:
        process.stop()


def test_health_needs_no_key_and_tells_pid_and_table(gate):
    door = gate()
    answer = ask(door.port, "GET", "/healthz")
    assert answer.json["status"] == "ok" and answer.json["pid"] == door.process.pid
    with open(door.path, "rb") as source:
        assert answer.json["table_sha256"] == hashlib.sha256(source.read()).hexdigest()


def test_the_replicas_key_opens_its_stand_in_engine_and_reaches_it(gate):
    with Upstream() as engine:
        door = gate(entry(engine.port))
        answer = ask(door.port, "POST", "/v1/chat/completions", BODY, KEY, ["Cookie: a=b", "X-Session-Id: s"])
        assert answer.status == 200 and answer.json["choices"]
        (seen,) = engine.requests
        assert seen.body == BODY
        assert seen.headers["authorization"] == f"Bearer {KEY}"
        assert seen.headers["x-session-id"] == "s" and "cookie" not in seen.headers
        assert seen.headers["host"] == f"127.0.0.1:{engine.port}"


@pytest.mark.parametrize("key", [None, "wrong", KEY + "x"])
def test_another_key_opens_nothing_of_the_stand_in(gate, key):
    with Upstream() as engine:
        door = gate(entry(engine.port))
        answer = ask(door.port, "POST", "/v1/chat/completions", BODY, key)
        assert answer.status == 401 and answer.error["code"] == "invalid_replica_key"
        assert not engine.requests


def test_many_wrong_keys_are_slowed_down_and_the_right_one_never(gate):
    with Upstream() as engine:
        door = gate(entry(engine.port))
        with RawClient(door.port) as client:
            client.send(request("GET", "/v1/models", key="wrong") * (MOST_ON_LOOPBACK + 1))
            assert {client.answer().status for _ in range(MOST_ON_LOOPBACK)} == {401}
            last = client.answer()
            assert last.status == 429 and last.error["code"] == "too_many_wrong_keys" and client.closed()
            assert last.headers["retry-after"] == "1", "a router whose key is not here yet comes back"
        assert ask(door.port, "POST", "/v1/chat/completions", BODY, KEY).status == 200
        assert ask(door.port, "POST", "/v1/chat/completions", BODY).status == 401 and len(engine.requests) == 1


@pytest.mark.parametrize("method, path", [
    ("POST", "/slots/0?action=erase"), ("POST", "/props"), ("GET", "/v1/chat/completions"), ("GET", "/"),
    ("POST", "/v1/chat/completions/"), ("POST", "//v1/chat/completions"), ("POST", "/v1/chat%2Fcompletions"),
    ("POST", "/v1/../v1/chat/completions"), ("POST", "/completion")])
def test_a_path_that_is_not_on_the_list_stays_closed(gate, method, path):
    with Upstream() as engine:
        door = gate(entry(engine.port))
        answer = ask(door.port, method, path, b"", KEY)
        assert answer.status == 404 and answer.error["code"] == "path_not_allowed"
        assert not engine.requests


def test_an_engine_that_does_not_listen_is_a_502(gate):
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    answer = ask(gate(entry(port)).port, "POST", "/v1/chat/completions", BODY, KEY)
    assert answer.status == 502 and answer.headers["x-llmgw-error-code"] == "engine_refused"


def test_a_stand_in_that_closes_without_an_answer_is_a_502(gate):
    with Upstream(answer=lambda exchange: exchange.close()) as engine:
        answer = ask(gate(entry(engine.port)).port, "POST", "/v1/chat/completions", BODY, KEY)
        assert answer.status == 502 and answer.headers["x-llmgw-error-code"] == "engine_reset"


def test_an_engine_this_version_does_not_know_has_no_open_path(gate):
    with Upstream() as engine:
        door = gate(entry(engine.port, engine="newer-engine"))
        assert ask(door.port, "POST", "/v1/chat/completions", BODY, KEY).status == 404


def test_a_new_table_is_taken_and_an_unreadable_one_is_not(gate):
    with Upstream() as engine:
        door = gate()
        assert ask(door.port, "POST", "/v1/chat/completions", BODY, KEY).status == 401
        door.take(entry(engine.port))
        assert ask(door.port, "POST", "/v1/chat/completions", BODY, KEY).status == 200
        files.write_atomic(door.path, b"{not json")
        door.take(entry(engine.port, incarnation=2))
        assert ask(door.port, "POST", "/v1/chat/completions", BODY, KEY).status == 200
        door.take()
        assert ask(door.port, "POST", "/v1/chat/completions", BODY, KEY).status == 401


def test_a_stand_in_stream_that_dies_is_cut_and_not_completed(gate):
    def answer(exchange):
        exchange.begin_stream()
        exchange.chunk(delta("a"))
        exchange.reset()

    with Upstream(answer) as engine, RawClient(gate(entry(engine.port)).port) as client:
        client.send(request("POST", "/v1/chat/completions", BODY, KEY))
        answered = client.answer()
        assert answered.status == 200 and not answered.whole
        assert answered.body == delta("a")


def test_the_stand_in_sees_at_once_that_the_client_is_gone(gate):
    gone = []

    def answer(exchange):
        gone.append(exchange.wait_gone())
        exchange.close()

    with Upstream(answer) as engine:
        door = gate(entry(engine.port))
        with RawClient(door.port) as client:
            client.send(request("POST", "/v1/chat/completions", BODY, KEY))
            wait_for(lambda: engine.requests)
        wait_for(lambda: gone)
        assert gone == [True]


def test_sigterm_lets_a_running_stand_in_stream_finish(gate):
    def answer(exchange):
        exchange.begin_stream()
        exchange.chunk(delta("a"))
        door.process.send_signal(signal.SIGTERM)
        wait_for(lambda: not listens(door.port))
        exchange.chunk(DONE)
        exchange.end_stream()

    with Upstream(answer) as engine:
        door = gate(entry(engine.port))
        answered = ask(door.port, "POST", "/v1/chat/completions", BODY, KEY)
        assert answered.whole and answered.body == delta("a") + DONE
        assert door.process.wait(40) == 0


def test_off_loopback_the_gate_refuses_to_listen(tmp_path):
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"host": "0.0.0.0", "port": 0, "entries": []}))
    ended = subprocess.run([sys.executable, "-m", "llmgw", "gate", "--table", str(path)], capture_output=True,
                           text=True, timeout=60)
    assert ended.returncode == 78 and "needs TLS" in ended.stderr


def listens(port):
    try:
        socket.create_connection(("127.0.0.1", port), 5).close()
    except OSError:
        return False
    return True
