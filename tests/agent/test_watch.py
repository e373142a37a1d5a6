"""A real llama-server, proven and watched: ours or not, busy or hung. Time is handed in."""
from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading

import pytest

from llmgw.agent.readiness import EngineDoor, Proof
from llmgw.agent.watch import Watch, start_sign
from llmgw.domain.secret import Secret
from llmgw.engines import registry
from llmgw.engines.base import Place
from llmgw.system import spawn
from llmgw.system.http_client import HttpClient
from tests.agent.conftest import free_block, wait_for
from tests.fakes.control_plane import shard_of

ENGINE = registry.get("llama.cpp")


class Running:
    """One llama-server as a shard would start it."""

    def __init__(self, folder, program, gemma, weights, port):
        self.shard = shard_of(weights)
        (folder / "key").write_text(self.shard.key.reveal() + "\n")
        place = Place(str(program), (), str(gemma), str(folder), str(folder / "key"), "", port)
        self.log = str(folder / "log")
        self.marker = ("LLMGW_TEST_WATCH", str(folder))
        self.identity = spawn.start(ENGINE.programs(self.shard, place)[0].command, self.marker, self.log)
        self.port = port
        self.door = self.door_with(self.shard.model, self.shard.key)

    def door_with(self, model, key):
        return EngineDoor(ENGINE, model, key, self.port)

    def prove(self, door=None):
        try:
            return wait_for(lambda: next((found for found in [(door or self.door).prove(self.identity)]
                                          if found.proof is not Proof.NOT_YET), None), what="a proof")
        finally:
            (door or self.door).close()


@pytest.fixture(scope="module")
def running(tmp_path_factory, llama_server, gemma, gemma_weights):
    made = Running(tmp_path_factory.mktemp("watch"), llama_server, gemma, gemma_weights, free_block())
    yield made
    spawn.stop(made.marker, grace_seconds=5.0)
    spawn.leave_all()


def test_a_started_engine_is_proven_and_its_start_shows_signs(running):
    assert running.prove().proof is Proof.READY
    sign = start_sign(running.identity.pid, running.log)
    assert sign.log_bytes > 0 and sign.memory_bytes > 100 << 20 and sign.page_faults > 1000


def test_another_model_another_key_and_another_process_are_not_ours(running):
    assert running.prove().proof is Proof.READY
    other = dataclasses.replace(running.shard.model, name="other")
    assert "serves gemma instead of other" in running.prove(running.door_with(other, running.shard.key)).message
    wrong = running.prove(running.door_with(running.shard.model, Secret("not-the-key")))
    assert (wrong.proof, wrong.message) == (Proof.WRONG, "refuses its own key")
    stranger = dataclasses.replace(running.identity, marker_value="somebody else")
    found = running.door.prove(stranger)
    running.door.close()
    assert found.proof is Proof.WRONG and "somebody else listens" in found.message


def test_a_server_that_takes_every_key_is_refused(tmp_path, running):
    code = ("import http.server, json\n"
            "class H(http.server.BaseHTTPRequestHandler):\n"
            "    def do_GET(self):\n"
            "        body = json.dumps({'data': [{'id': 'gemma'}]}).encode()\n"
            "        self.send_response(200); self.send_header('Content-Length', str(len(body)))\n"
            "        self.end_headers(); self.wfile.write(body)\n"
            "s = http.server.HTTPServer(('127.0.0.1', 0), H); print(s.server_port, flush=True); s.serve_forever()\n")
    marker = ("LLMGW_TEST_OPEN", str(tmp_path))
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                             env={**os.environ, marker[0]: marker[1]}, start_new_session=True)
    try:
        door = EngineDoor(ENGINE, running.shard.model, running.shard.key, int(child.stdout.readline()))
        found = door.prove(spawn.find(marker))
        door.close()
        assert found.proof is Proof.WRONG and "accepts a wrong key" in found.message
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def test_a_busy_engine_is_well_through_a_long_answer(running):
    running.prove()
    watch = Watch(ENGINE, running.door, running.identity.pid)
    client = HttpClient(f"http://127.0.0.1:{running.port}", timeout=300)
    body = json.dumps({"prompt": "Once upon a time", "max_tokens": 60, "ignore_eos": True}).encode()
    asking = threading.Thread(target=client.request, args=("POST", "/v1/completions"), kwargs={
        "body": body, "headers": {"Authorization": f"Bearer {running.shard.key.reveal()}"}})
    asking.start()
    looks, work, tokens = 0, -1.0, set()
    while asking.is_alive():
        page = running.door.metrics() or b""
        if ENGINE.gauges(page).running and ENGINE.work(page) != work:
            looks, work = looks + 1, ENGINE.work(page)
            tokens.add(ENGINE.gauges(page).generated_tokens)
            assert watch.turn(looks * 70.0) == ""   # as if more than a minute lay between two looks
        asking.join(0.05)
    client.close()
    running.door.close()
    assert looks > 2 and len(tokens) == 1, "the token counter is only moved at a request's end"


def test_an_engine_that_has_stopped_working_is_hung_after_a_minute_and_well_again_when_it_works(running):
    running.prove()
    watch = Watch(ENGINE, running.door, running.identity.pid)
    assert watch.turn(0.0) == ""
    os.kill(running.identity.pid, signal.SIGSTOP)
    try:
        said = [watch.turn(at) for at in (10.0, 50.0, 80.0)]
        assert said[:2] == ["", ""] and "answers nothing" in said[2]
        assert not watch.must_restart(139.0) and watch.must_restart(140.0)
    finally:
        os.kill(running.identity.pid, signal.SIGCONT)
    running.door.close()
    assert wait_for(lambda: watch.turn(200.0 + 10 * len(said)) == "" or said.append(""), what="well again")
    wait_for(lambda: watch._probe is None or not watch._probe.is_alive(), what="the last probe")
    running.door.close()


def test_a_log_is_where_the_command_was_told(running):
    assert "listening" in pathlib.Path(running.log).read_text()
