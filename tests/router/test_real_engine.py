"""Router and gate before two real llama-servers with a real model, asked by the real client."""
from __future__ import annotations

import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import openai
import pytest

from llmgw.api import wire
from llmgw.domain.gate import GateEntry, GateTable
from llmgw.domain.route import RoutedReplica
from llmgw.domain.secret import Secret
from llmgw.system import files
from tests.fakes.raw_client import ask
from tests.fakes.router_process import KEY, RouterProcess, chat, model, table
from tests.fakes.upstream import wait_for

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


class RealEngine:
    def __init__(self, number, folder, llama_server, gemma, template):
        self.key, self.port = f"replica-key-{number}", free_port()
        key_file = folder / f"key{number}"
        key_file.write_text(self.key)
        key_file.chmod(0o600)
        self.log = open(folder / f"engine{number}.log", "wb")
        self.process = subprocess.Popen(
            [str(llama_server), "--model", str(gemma), "--alias", "m", "--host", "127.0.0.1", "--port", str(self.port),
             "--ctx-size", "4096", "--parallel", "4", "--metrics", "--api-key-file", str(key_file), "--threads", "1",
             "--chat-template-file", str(template)], stdout=self.log, stderr=self.log)

    def is_ready(self):
        assert self.process.poll() is None
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).status == 200
        except (OSError, urllib.error.URLError):
            return False

    def stop(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(40)
        self.log.close()


@pytest.fixture
def cluster(tmp_path, ends, llama_server, gemma, qa_template):
    """Return (router, gate's process, engines)."""
    engines = [RealEngine(number, tmp_path, llama_server, gemma, qa_template) for number in range(2)]
    for engine in engines:
        ends.callback(engine.stop)
    gate_port = free_port()
    path = str(tmp_path / "gate.json")
    entries = tuple(GateEntry(f"m-{number}", hashlib.sha256(engine.key.encode()).hexdigest(), "llama.cpp", engine.port)
                    for number, engine in enumerate(engines))
    files.write_atomic(path, wire.dumps(wire.GATE_TABLE, GateTable("127.0.0.1", gate_port, entries)))
    gate = subprocess.Popen([sys.executable, "-W", "error", "-m", "llmgw", "gate", "--table", path])
    ends.callback(gate.wait, 40)
    ends.callback(gate.kill)
    for engine in engines:
        wait_for(engine.is_ready, 120, "the engine")
    replicas = [RoutedReplica(f"m-{number}", "n", "127.0.0.1", gate_port, Secret(engine.key), "llama.cpp", slots=4)
                for number, engine in enumerate(engines)]
    folder = tmp_path / "router"
    folder.mkdir()
    router = RouterProcess(folder, table(model(*replicas)))
    ends.callback(router.stop)
    return router, gate_port, engines


def client_of(router):
    return openai.OpenAI(base_url=f"{router.url}/v1", api_key=KEY, max_retries=0, timeout=300)


def test_plain_and_streamed_answers_of_the_real_model(cluster):
    router, gate_port, engines = cluster
    with client_of(router) as client:
        assert [item.id for item in client.models.list()] == ["m"]
        plain = client.chat.completions.create(model="m", messages=QUESTION, temperature=0, stop=["\n"], max_tokens=24)
        assert "Paris" in plain.choices[0].message.content
        stream = client.chat.completions.create(model="m", messages=QUESTION, temperature=0, stop=["\n"], max_tokens=24,
                                                stream=True, stream_options={"include_usage": True})
        pieces = list(stream)
        text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
        assert "Paris" in text and pieces[-1].usage.completion_tokens > 0
        assert client.completions.create(model="m", prompt="The capital of France is", temperature=0,
                                         max_tokens=6).choices[0].text
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "word " * 20000}])
        assert "context" in str(caught.value)
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="unknown", messages=QUESTION)
    wait_for(lambda: sum("engine_running" in name for name in router.metrics()) == 2, what="gauges through the gate")
    assert router.metrics()['llmgw_router_tokens_total{model="m",kind="completion"}'] > 0
    # the gate: another engine's paths, and other keys
    assert ask(gate_port, "GET", "/slots", key=engines[0].key).status == 200
    assert ask(gate_port, "POST", "/slots/0?action=erase", key=engines[0].key).status == 404
    assert ask(gate_port, "POST", "/v1/chat/completions", chat(), key="wrong").status == 401


def test_killing_a_real_engine_under_load_fails_no_request_that_had_no_byte_yet(cluster, nothing_in_flight):
    router, _, engines = cluster
    outcomes, begun = [], threading.Semaphore(0)

    def plain(number):
        with client_of(router) as client:
            answer = client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": f"Count to {number}"}], max_tokens=8, temperature=0)
            outcomes.append(answer.choices[0].finish_reason)
            begun.release()

    def streamed(number):
        got = 0
        with client_of(router) as client:
            try:
                for _ in client.chat.completions.create(
                        model="m", messages=[{"role": "user", "content": f"A story of {number}"}], max_tokens=60,
                        temperature=0, stream=True, extra_body={"ignore_eos": True}):
                    got += 1
                    if got == 1:
                        begun.release()
                outcomes.append("whole")
            except openai.APIError as error:
                assert got and "middle of its answer" in str(error)
                outcomes.append("cut")

    threads = [threading.Thread(target=streamed, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(4):
        assert begun.acquire(timeout=120)
    late = [threading.Thread(target=plain, args=(number,)) for number in range(6)]
    for thread in late:
        thread.start()
    wait_for(lambda: router.in_flight() == 10)
    os.kill(engines[0].process.pid, signal.SIGKILL)
    for thread in threads + late:
        thread.join(300)
    assert len(outcomes) == 10 and outcomes.count("cut") < 4
    assert outcomes.count("cut") >= 1
    nothing_in_flight(router)
