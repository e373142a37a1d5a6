"""An agent with the real llama-server: installs, serves, survives, and says what is wrong."""
from __future__ import annotations

import json
import os
import pathlib
import signal
import socket
import stat

import pytest

from llmgw.domain.engine import EnginePhase
from llmgw.domain.heartbeat import NodeRequest
from llmgw.domain.model import Task, WeightsPhase
from llmgw.domain.replica import ShardState
from llmgw.system import proc
from tests.agent.conftest import wait_for
from tests.fakes.control_plane import engine_of, shard_of


def test_a_node_installs_fetches_proves_and_serves_through_its_gate(served, node, plane):
    observed = plane.observed
    assert observed.probed and observed.facts.cpu_count > 0 and observed.facts.arch
    (engine,) = observed.engines
    assert engine.phase is EnginePhase.INSTALLED and engine.usable and "10991" in engine.message
    assert [item.phase for item in observed.weights] == [WeightsPhase.WHOLE]
    key = served.key.reveal()
    status, answer = node.ask(key)
    assert status == 200 and answer["choices"][0]["text"].strip() == "Paris"
    assert node.ask("wrong" * 10)[0] == 401
    assert node.ask(key, path="/v1/props")[0] == 404
    folder = node.data / "shards" / "r1.0"
    assert stat.S_IMODE(os.stat(folder / "key").st_mode) == 0o600
    pid = node.seen(observed).pid
    assert key.encode() not in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    assert key not in node.log() and "PYTHONPATH" not in proc.environ(pid)
    assert json.loads((folder / "state.json").read_text())["program"] == os.readlink(f"/proc/{pid}/exe"), "its files stay"
    assert not (node.data / "blobs" / "sha256" / engine.name).exists()


def test_engines_listen_on_loopback_only(served, node, plane):
    port = node.seen(plane.observed).port
    inodes = proc.listening_inodes(port)
    lines = pathlib.Path("/proc/net/tcp").read_text().splitlines()[1:]
    assert inodes and all(line.split()[1].startswith("0100007F:") for line in lines if line.split()[9] in inodes)
    assert f":{port:04X} " not in pathlib.Path("/proc/net/tcp6").read_text()


def test_a_killed_agent_leaves_engines_and_gate_and_the_next_one_adopts_them(served, node, plane):
    before = node.seen(plane.observed)
    gate = node.gate()
    node.kill9()
    assert node.engines() == [before.pid] and node.gate() == gate
    assert node.ask(served.key.reveal())[0] == 200
    plane.observed = None
    node.start()
    after = node.seen(plane.wait(lambda observed: observed.shards))
    assert after.state is ShardState.READY, "the first report after a restart must not take it out of routing"
    assert (after.pid, after.incarnation, after.port) == (before.pid, before.incarnation, before.port)
    assert node.gate() == gate and node.ask(served.key.reveal())[0] == 200


def test_an_agent_that_stops_in_order_leaves_engines_and_gate_running(served, node, plane):
    before, gate = node.engines(), node.gate()
    assert node.terminate() == 0
    assert plane.observed.stopping and node.engines() == before and node.gate() == gate
    assert node.ask(served.key.reveal())[0] == 200


def test_an_owned_agent_takes_everything_with_it(seeded, node, plane, llama_archive, gemma, gemma_weights):
    plane.offer(archive=llama_archive, weights=gemma_weights, path=gemma)
    plane.want([engine_of(llama_archive)], [shard_of(gemma_weights)])
    node.start("--owned")
    node.ready()
    assert node.terminate() == 0
    assert node.engines() == [] and node.gate() is None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["kill -9", "exits 0 unasked"])
def test_an_engine_that_ends_unasked_is_started_again_whatever_its_code(served, node, plane, number):
    before = node.seen(plane.observed)
    os.kill(before.pid, number)
    plane.wait(lambda observed: node.seen(observed).state is ShardState.BACKOFF)
    after = node.ready(after=before.incarnation)
    assert after.pid != before.pid and after.port != before.port and after.restarts == 1
    failure = after.first_failure
    assert "unasked" in failure.message or "signal 9" in failure.message
    assert "--api-key-file" in failure.command and served.key.reveal() not in failure.command
    assert failure.log_tail and failure.at > 0
    wait_for(lambda: node.ask(served.key.reveal())[0] == 200, what="the new engine through the gate")


def test_a_killed_gate_is_started_again_and_engines_are_untouched(served, node, plane):
    engines, gate = node.engines(), node.gate()
    os.kill(gate, signal.SIGKILL)
    wait_for(lambda: node.gate() not in (None, gate), what="another gate")

    def answers():
        try:
            return node.ask(served.key.reveal())[0] == 200
        except OSError:
            return False
    wait_for(answers, what="the gate's answer")
    assert node.engines() == engines


def test_what_is_no_longer_wanted_is_stopped_and_nothing_of_it_is_left(served, node, plane, llama_archive):
    plane.want([engine_of(llama_archive)], [])
    plane.wait(lambda observed: node.seen(observed).state is ShardState.STOPPED)
    assert node.engines() == [] and not (node.data / "shards" / "r1.0").exists()
    wait_for(lambda: node.ask(served.key.reveal())[0] == 401, what="the door closed")


def test_what_nobody_wants_any_more_is_stopped_after_a_restart_too(served, node, plane, llama_archive):
    node.kill9()
    plane.want([engine_of(llama_archive)], [])
    node.start()
    wait_for(lambda: node.engines() == [], what="no engine left")


def test_a_node_serves_on_without_a_control_plane_and_starts_without_one(served, node, plane):
    plane.raw_answer = b"{\"epoch\": 1, \"generation\": 99, \"desired\": {\"shards\": ["
    node.kill9()
    os.kill(node.engines()[0], signal.SIGKILL)
    wait_for(lambda: node.engines() == [], what="no engine")
    node.start()
    wait_for(node.engines, what="the engine, started from the state on disk")
    wait_for(lambda: node.ask(served.key.reveal())[0] == 200, what="an answer")
    assert "not JSON" in node.log()


def test_a_lower_epoch_or_generation_is_refused(served, node, plane, llama_archive):
    beats = plane.heartbeats
    plane.generation = 0
    plane.desired = type(plane.desired)()
    wait_for(lambda: plane.heartbeats > beats + 3, what="heartbeats")
    assert node.engines() and "the control plane is behind" in node.log()
    assert plane.observed.generation == 1


def test_two_agents_on_one_data_folder_are_refused(served, node, plane):
    first = node.process
    node.start()
    assert node.ended() == 1
    assert "another agent (pid" in node.log() and first.poll() is None
    node.process = first


def test_a_stranger_on_a_port_of_the_block_is_stepped_over(seeded, node, plane, llama_archive, gemma, gemma_weights):
    shard = shard_of(gemma_weights)
    plane.offer(archive=llama_archive, weights=gemma_weights, path=gemma)
    plane.want([engine_of(llama_archive)], [shard])
    with socket.socket() as stranger, socket.socket() as at_gate:
        for server in (stranger, at_gate):
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stranger.bind(("127.0.0.1", node.engine_ports))
        stranger.listen(1)
        at_gate.bind(("127.0.0.1", node.gate_port))
        at_gate.listen(1)
        node.start()
        seen = node.ready()
        assert seen.port == node.engine_ports + 1
        assert plane.observed.identity.gate_port == node.gate_port + 1
        assert any("is taken by another program" in warning for warning in plane.observed.facts.warnings)


def test_a_garbled_state_file_is_rebuilt_from_what_runs(served, node, plane):
    before = node.seen(plane.observed)
    node.kill9()
    (node.data / "shards" / "r1.0" / "state.json").write_text("{\"id\": \"r1.0\", \"inc")
    plane.observed = None
    node.start()
    after = node.ready()
    assert (after.pid, after.incarnation, after.port) == (before.pid, before.incarnation, before.port)
    assert node.engines() == [before.pid]


@pytest.mark.parametrize("place", ["shard-before-exec", "spawn-after-exec", "shard-after-exec"])
def test_an_agent_killed_around_a_start_never_starts_twice(node, plane, llama_archive, gemma, gemma_weights, seeded, place):
    plane.offer(archive=llama_archive, weights=gemma_weights, path=gemma)
    plane.want([engine_of(llama_archive)], [shard_of(gemma_weights)])
    # the gate is started by the same function, before the engine
    node.start(LLMGW_FAILPOINT=f"{place}:kill@{2 if place == 'spawn-after-exec' else 1}")
    assert node.ended() == -9
    running = node.engines()
    node.start()
    seen = node.ready()
    assert node.engines() == [seen.pid] and (not running or running == [seen.pid])


def test_the_end_of_a_log_is_sent_when_asked_for(served, node, plane):
    plane.requests = [NodeRequest("q1", "log-tail", {"replica": "r1", "bytes": "2000"}),
                      NodeRequest("q2", "log-tail", {"replica": "nobody"}), NodeRequest("q3", "dance", {})]
    wait_for(lambda: len(plane.log_tails) == 3, what="three answers")
    tails = {tail.request: tail for tail in plane.log_tails}
    assert "listening" in tails["q1"].text or tails["q1"].text and len(tails["q1"].text) <= 2000
    assert tails["q2"].problem == "no such replica on this node" and "'dance'" in tails["q3"].problem
    assert served.key.reveal() not in tails["q1"].text


def test_a_model_file_that_is_no_model_becomes_a_crash_loop_with_its_first_failure(node, plane, llama_archive,
                                                                                  tmp_path):
    from tests.fakes.control_plane import weights_of
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + b"\0" * 1000)
    weights = weights_of(path, "broken")
    plane.offer(archive=llama_archive, weights=weights, path=path)
    plane.want([engine_of(llama_archive)], [shard_of(weights)])
    node.start()
    seen = node.seen(plane.wait(lambda observed: observed.shards and node.seen(
        observed).state is ShardState.CRASHLOOP, 90))
    assert "model" in seen.message and seen.first_failure.log_tail and seen.restarts == 3
    assert seen.pid is None and node.engines() == []


def test_a_model_that_cannot_do_its_task_is_never_ready_and_says_why(node, plane, llama_archive, gemma,
                                                                     gemma_weights, seeded):
    plane.offer(archive=llama_archive, weights=gemma_weights, path=gemma)
    plane.want([engine_of(llama_archive)], [shard_of(gemma_weights, task=Task.EMBED)])
    node.start()
    seen = node.seen(plane.wait(lambda observed: observed.shards and node.seen(
        observed).state is ShardState.BACKOFF, 60))
    assert seen.reason == "DoesNotServe" and "Pooling type 'none'" in seen.message


def test_a_shard_of_an_engine_this_agent_does_not_know_is_told_once_and_dropped_when_not_wanted(node, plane,
                                                                                               gemma_weights):
    plane.want([], [shard_of(gemma_weights, engine="exllama")])
    node.start()
    seen = node.seen(plane.wait(lambda observed: observed.shards))
    assert (seen.state, seen.reason) == (ShardState.WAITING, "InvalidConfig") and "exllama" in seen.message
    beats = plane.heartbeats
    wait_for(lambda: plane.heartbeats > beats + 3, what="heartbeats")
    assert node.log().count("cannot be taken up") == 1
    plane.want([], [])
    plane.wait(lambda observed: not observed.shards)


def test_an_embedding_model_is_proven_by_an_embedding(seeded, node, plane, llama_archive, gemma, gemma_weights):
    shard = shard_of(gemma_weights, task=Task.EMBED, args=("--pooling", "mean"))
    plane.offer(archive=llama_archive, weights=gemma_weights, path=gemma)
    plane.want([engine_of(llama_archive)], [shard])
    node.start()
    node.ready()
    status, answer = node.ask(shard.key.reveal(), {"input": "hello"}, path="/v1/embeddings")
    assert status == 200 and len(answer["data"][0]["embedding"]) > 100
