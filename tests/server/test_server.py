"""The control plane as a process, talked to as agents, routers and ctl do. Nodes are stand-ins."""
from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import threading
import time
from dataclasses import replace

import pytest

from llmgw.api import paths, wire
from llmgw.domain.errors import ApiError
from llmgw.domain.heartbeat import LogTail
from llmgw.domain.replica import FirstFailure, ShardState
from llmgw.system.http_client import HttpClient
from tests.server.running import CONFIG, DEADLINE, RunningServer, StandInNode, StandInRouter, until, upload


@pytest.fixture
def server(tmp_path):
    running = RunningServer(tmp_path)
    running.start()
    yield running
    running.stop()


def beat_until(nodes, condition, what="it"):
    def once():
        for node in nodes:
            node.beat()
        return condition()
    return until(once, what)


def models(server):
    return {item.name: item for item in server.client().items(paths.MODELS, wire.MODEL_VIEW)}


def replicas(server):
    return server.client().items(paths.REPLICAS, wire.REPLICA_VIEW)


def is_served(server, count=1):
    return models(server)["m"].ready == count


def served(server, *names):
    nodes = [StandInNode(server, name) for name in names]
    server.import_model()
    beat_until(nodes, lambda: is_served(server, models(server)["m"].wanted), "serving")
    return nodes


def test_a_model_is_placed_on_a_stand_in_node_and_routed(server):
    assert models(server)["m"].why_not == (
        "weights mirror:m are not in the mirror (llmgw.pyz ctl mirror import FILE --name m)",)
    node, = served(server, "a")
    shard, = node.desired.shards
    assert shard.model.name == "m" and shard.weights.files[0].chunks and shard.key
    table = StandInRouter(server).poll()
    row, = table.models[0].replicas
    assert (row.node, row.host, row.port, row.key) == ("a", "127.0.0.1", 7802, shard.key)
    view, = replicas(server)
    assert (view.state, view.shards[0].node, view.shards[0].observed.port) == ("ready", "a", 7900)
    events = server.client().items(paths.EVENTS, wire.EVENT_VIEW)
    assert {"Applied", "Placed", "Ready"} <= {event.reason for event in events}


def test_the_end_of_a_log_in_a_first_failure_is_for_admins_the_rest_for_viewers_too(server):
    node, = served(server, "a")
    node.state, node.first_failure = ShardState.CRASHLOOP, FirstFailure(1.0, "ended with code 1", "serve m", "a prompt")

    def failure(role):
        view, = server.client(role).items(paths.REPLICAS, wire.REPLICA_VIEW)
        return view.shards[0].observed.first_failure

    beat_until([node], lambda: failure("admin"), "the failure")
    assert failure("admin").log_tail == "a prompt"
    assert failure("viewer") == FirstFailure(1.0, "ended with code 1", "serve m", "")


def test_the_desired_state_is_sent_once_and_again_when_it_changes(server):
    node, = served(server, "a")
    assert node.beat().desired is None
    generation = node.answer.generation
    server.write(CONFIG % 2)
    until(lambda: node.beat().desired is not None, "a new generation")
    assert node.answer.generation > generation and len(node.desired.shards) == 2


def test_a_model_that_cannot_be_placed_shows_the_node_s_own_words(server):
    node = StandInNode(server, "a")
    node.observed = replace(node.observed, engines=(replace(
        node.observed.engines[0], usable=False, message="libgomp.so.1 is missing", hint="apt-get install libgomp1"),))
    server.import_model()
    said = "a: llama.cpp b10991: libgomp.so.1 is missing (try: apt-get install libgomp1)"
    beat_until([node], lambda: models(server)["m"].why_not == (said,))
    assert StandInRouter(server).poll().models[0].why_not == said


def test_a_kill_loses_nothing_and_after_the_restart_everything_is_as_it_was(server):
    node, = served(server, "a")
    key = server.client().json("POST", paths.KEYS, {"name": "mine", "models": []})
    router = StandInRouter(server)
    until(lambda: router.poll().keys, "the key")
    before, token = router.table, (server.data / "tokens" / "admin").read_text()
    for _ in range(3):
        server.kill()
        server.start()
        assert (server.data / "tokens" / "admin").read_text() == token
        router, again = StandInRouter(server), StandInNode(server, "a")
        # a node that has not spoken yet stays routed: a restart is no news about nodes
        first = until(router.poll, "a table")
        assert first.models == before.models and first.keys == before.keys
        assert first.revision > before.revision and first.epoch > before.epoch
        again.desired, again.observed = node.desired, node.observed
        beat_until([again], lambda: is_served(server))
        assert again.desired.shards == node.desired.shards
        before, node = router.poll(), again
    assert [item.id for item in server.client().items(paths.KEYS, wire.KEY_VIEW)] == [key["id"]]


def test_every_key_that_was_acknowledged_survives_25_kills(tmp_path):
    server, made = RunningServer(tmp_path, CONFIG % 0), []
    for turn in range(25):
        place = f"store-{'before' if turn % 2 else 'after'}-commit:kill@{5 + turn % 7}"
        server.start(LLMGW_FAILPOINT=place if turn else "")
        try:
            client = server.client()
            for number in range(20):
                made.append(client.json("POST", paths.KEYS, {"name": f"k{turn}.{number}"})["id"])
        except Exception:
            pass
        server.kill()
        client.close()
    server.start()
    kept = [item.id for item in server.client().items(paths.KEYS, wire.KEY_VIEW)]
    server.stop()
    assert set(made) <= set(kept) and len(made) >= 25


def test_an_edit_rolls_the_replica_and_streams_may_finish(server):
    nodes = served(server, "a", "b")
    old, = replicas(server)
    router = StandInRouter(server)
    router.poll()
    router.report()
    server.write((CONFIG % 1).replace("2048", "4096"))

    def drained():
        router.poll()
        router.report({old.id: 1})
        return any(row.id == old.id and row.draining for row in router.table.models[0].replicas)

    beat_until(nodes, drained, "the drain")
    assert len(router.table.models[0].replicas) == 2
    assert any(row.id != old.id and not row.draining for row in router.table.models[0].replicas)
    deadline = time.monotonic() + 7
    while time.monotonic() < deadline:                 # a request still runs: it is not stopped
        drained()
        beat_until(nodes, lambda: True)
        time.sleep(0.5)
    assert old.id in {item.id for item in replicas(server)}

    def gone():
        router.poll()
        router.report()
        return [item.id for item in replicas(server) if item.id == old.id] == []

    beat_until(nodes, gone, "the end of the old one")
    assert is_served(server)


def test_an_invalid_edit_changes_nothing_and_names_line_and_key(server):
    served(server, "a")
    server.write("cluster: test\nmodels:\n\t- name: m\n")
    until(lambda: server.client().json("GET", paths.HEALTH)["config"] == "invalid")
    assert "server.yaml" in server.client().json("GET", paths.MODELS)["config_problem"]
    assert f"{server.config}" in server.log.read_text() and "line 3" in server.log.read_text()
    assert is_served(server)
    with pytest.raises(ApiError) as caught:
        server.client().json("POST", paths.APPLY, {})
    assert caught.value.status == 400
    server.write((CONFIG % 1) + "    aliases: [big]\n")
    until(lambda: models(server)["m"].aliases == ("big",))
    assert server.client().json("GET", paths.HEALTH)["config"] == "ok"


def test_an_edit_that_stops_too_much_waits_for_a_confirm_even_over_a_restart(server):
    node, = served(server, "a")
    server.write("cluster: test\nmodels: []\n")
    until(lambda: server.client().json("GET", paths.HEALTH)["config"] == "held")
    node.beat()
    assert is_served(server)
    assert server.client().json("GET", paths.MODELS)["held"] == [
        "model m: 1 of 1 replicas would stop, it is no longer there"]
    server.stop()
    server.start()
    node = StandInNode(server, "a")
    beat_until([node], lambda: is_served(server))
    assert server.client().json("POST", paths.APPLY, {})["applied"] is False
    assert server.client().json("POST", paths.APPLY, {"confirm": True}) == {"applied": True, "needs_confirm": []}
    beat_until([node], lambda: replicas(server) == [], "the end of the replica")
    assert node.desired.shards == ()


def test_a_plan_says_what_an_edit_would_do_and_changes_nothing(server):
    nodes = served(server, "a", "b")
    client = server.client()
    plan = json.loads(client.request("POST", paths.PLAN, body=(CONFIG % 2).encode(), content_type="text/yaml").body)
    assert [start["model"] for start in plan["starts"]] == ["m"] and plan["stops"] == []
    assert plan["downloads"][0]["size_bytes"] > 0
    plan = json.loads(client.request("POST", paths.PLAN, body=b"models: []\n").body)
    assert [stop["model"] for stop in plan["stops"]] == ["m"] and len(plan["needs_confirm"]) == 1
    plan = json.loads(client.request("POST", paths.PLAN, body=(CONFIG % 1).replace("2048", "99999999").encode()).body)
    assert [row["model"] for row in plan["rolls"]] == ["m"]
    with pytest.raises(ApiError, match="line 1"):
        client.request("POST", paths.PLAN, body=b"modles: []\n")
    for node in nodes:
        node.beat()
    assert len(replicas(server)) == 1


def test_a_log_is_asked_of_the_node_and_given_to_whoever_waits(server):
    node, = served(server, "a")
    replica, = replicas(server)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(server.client().call(
        "GET", paths.fill(paths.REPLICA_LOG, replica=replica.id) + "?bytes=1000", receive=wire.LOG_TAIL)))
    thread.start()
    request, = until(lambda: node.beat().requests, "the request")
    assert request.kind == "log-tail" and request.args["bytes"] == "1000"
    assert request.args["shard"] == f"{replica.id}.0"
    node.client.call("POST", paths.fill(paths.LOG_TAIL, node="a"), send=wire.LOG_TAIL,
                     value=LogTail(request.id, "the end of it"))
    thread.join(DEADLINE)
    assert answers == [LogTail(request.id, "the end of it")]
    assert node.beat().requests == ()
    with pytest.raises(ApiError) as caught:
        server.client().call("GET", paths.fill(paths.REPLICA_LOG, replica="none"))
    assert caught.value.status == 404


def test_a_second_agent_of_the_same_name_is_refused(server):
    node = StandInNode(server, "a")
    node.beat()
    twin = StandInNode(server, "a")
    twin.observed = replace(twin.observed, identity=replace(twin.observed.identity, boot_id="another"))
    with pytest.raises(ApiError, match="another agent calls itself a") as caught:
        twin.beat()
    assert caught.value.status == 409
    node.beat()
    with pytest.raises(ApiError, match="was sent for b"):
        node.client.call("POST", paths.fill(paths.HEARTBEAT, node="b"), send=wire.NODE_OBSERVED, value=node.observed)


def test_a_server_that_nodes_know_to_be_older_becomes_younger(server):
    node = StandInNode(server, "a")
    node.observed = replace(node.observed, epoch=500, generation=7)
    node.client.call("POST", paths.fill(paths.HEARTBEAT, node="a"), send=wire.NODE_OBSERVED, value=node.observed)
    until(lambda: server.client().json("GET", paths.HEALTH)["epoch"] == 501)
    beat_until([node], lambda: node.desired is not None)


def test_a_router_that_serves_from_a_later_table_makes_the_server_younger(server):
    served(server, "a")
    router = StandInRouter(server)
    router.poll()
    before = router.table
    for later in (before.revision + 5, (before.epoch + 7 << 24) + 1):          # of this very epoch, and of a later one
        router.table = replace(router.table, revision=later)
        router.report()
        until(lambda later=later: router.poll().revision > later, "a table that the router takes")
    assert router.table.epoch > before.epoch + 7 and router.table.models == before.models


def test_a_node_that_knows_a_later_generation_makes_the_server_younger(server):
    """Of a server that was set up anew: its first epoch is that of the one before."""
    node = StandInNode(server, "a")
    epoch = server.client().json("GET", paths.HEALTH)["epoch"]
    node.observed = replace(node.observed, epoch=epoch, generation=70)
    node.client.call("POST", paths.fill(paths.HEARTBEAT, node="a"), send=wire.NODE_OBSERVED, value=node.observed)
    until(lambda: server.client().json("GET", paths.HEALTH)["epoch"] > epoch)
    beat_until([node], lambda: node.desired is not None)


def test_a_drained_node_gets_nothing_new_and_its_replica_moves(server):
    nodes = served(server, "a", "b")
    before, = replicas(server)
    where = before.shards[0].node
    client = server.client()
    client.json("POST", paths.fill(paths.DRAIN_NODE, node=where))
    with pytest.raises(ApiError) as caught:
        client.json("POST", paths.fill(paths.DRAIN_NODE, node="none"))
    assert caught.value.status == 404
    beat_until(nodes, lambda: [item.shards[0].node for item in replicas(server)] == [{"a": "b", "b": "a"}[where]],
               "the move")
    views = {item.name: item for item in client.items(paths.NODES, wire.NODE_VIEW)}
    assert views[where].draining and "draining" in views[where].message
    client.json("DELETE", paths.fill(paths.DRAIN_NODE, node=where))
    until(lambda: not {item.name: item for item in client.items(paths.NODES, wire.NODE_VIEW)}[where].draining)


def test_a_node_that_is_gone_for_good_is_forgotten_and_its_replica_replaced(server):
    nodes = served(server, "a", "b")
    where = replicas(server)[0].shards[0].node
    gone = next(node for node in nodes if node.name == where)
    left = next(node for node in nodes if node.name != where)
    path = paths.fill(paths.NODE, node=where)
    with pytest.raises(ApiError, match="is alive"):
        server.client().json("DELETE", path)
    gone.observed = replace(gone.observed, stopping=True)
    gone.beat()
    row, = replicas(server)
    router = StandInRouter(server)
    router.poll()
    router.report(answering=(row.id,))
    with pytest.raises(ApiError, match=f"node {where} is not gone: routers still reach its replica {row.id}") as caught:
        server.client().json("DELETE", path)
    assert f"ctl drain {where}" in caught.value.hint
    router.report()
    assert server.client().json("DELETE", path) == {"replicas": [row.id]}
    beat_until([left], lambda: [item.shards[0].node for item in replicas(server)] == [left.name], "the replacement")
    assert [item.name for item in server.client().items(paths.NODES, wire.NODE_VIEW)] == [left.name]
    gone.observed = replace(gone.observed, stopping=False)
    beat_until([gone, left], lambda: gone.desired.shards == (), "it is a new node, and is told to end what it runs")


def test_a_crashlooping_replica_shows_its_node_s_words(server):
    node, = served(server, "a")
    node.state = ShardState.CRASHLOOP
    router = StandInRouter(server)
    beat_until([node], lambda: router.poll().models[0].replicas == ())
    assert router.table.models[0].why_not == "a: crashloop"
    assert models(server)["m"].ready == 0


def test_long_polls_wake_when_something_changes(server):
    served(server, "a")
    router = StandInRouter(server)
    router.poll()
    started = time.monotonic()
    assert router.poll(wait=1) is router.table and time.monotonic() - started > 0.9
    last = server.client().items(paths.EVENTS, wire.EVENT_VIEW)[-1].id
    found = []
    thread = threading.Thread(target=lambda: found.extend(server.client().items(
        f"{paths.EVENTS}?after={last}&wait=30", wire.EVENT_VIEW)))
    thread.start()
    made = server.client().json("POST", paths.KEYS, {"name": "k"})
    thread.join(DEADLINE)
    assert found[0].reason == "KeyMade"
    assert [key.id for key in until(lambda: router.poll(wait=20).keys)] == [made["id"]]
    server.client().json("DELETE", paths.fill(paths.KEY, key=made["id"]))
    until(lambda: router.poll(wait=1).keys == ())


def test_a_key_is_shown_once_and_only_its_hash_is_kept(server):
    made = server.client().json("POST", paths.KEYS, {"name": "k", "models": ["m"]})
    assert made["secret"].startswith("llmgw_infer_" + made["id"])
    shown = server.client().json("GET", paths.KEYS)["items"][0]
    assert shown["secret"] == "" and shown["models"] == ["m"]
    assert made["secret"].split("_", 3)[3].encode() not in (server.data / "llmgw.db").read_bytes()
    client = HttpClient(server.url)
    answer = client.request("GET", paths.MODELS, headers={"Authorization": f"Bearer {made['secret']}"})
    client.close()
    assert answer.status == 403
    assert made["secret"] not in server.log.read_text()


def test_the_store_locked_by_another_program_costs_writes_but_no_heartbeats(server):
    node, = served(server, "a")
    other = sqlite3.connect(server.data / "llmgw.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        with pytest.raises(ApiError) as caught:
            server.client().json("POST", paths.KEYS, {"name": "k"})
        assert caught.value.status == 503
        node.beat()
        StandInNode(server, "new").beat()
    finally:
        other.execute("ROLLBACK")
        other.close()
    assert server.client().json("POST", paths.KEYS, {"name": "k"})["id"]


def test_a_backup_restores_in_observe_mode_with_a_later_epoch(server, tmp_path):
    node, = served(server, "a")
    epoch = server.client().json("GET", paths.HEALTH)["epoch"]
    backup = tmp_path / "backup.db"
    backup.write_bytes(server.client().request("GET", paths.BACKUP).body)
    assert backup.read_bytes().startswith(b"SQLite format 3\0")
    refused = subprocess.run(server.command("--restore", str(backup)), stderr=subprocess.PIPE, text=True,
                             timeout=DEADLINE)
    assert refused.returncode == 1 and "uses this data folder" in refused.stderr
    server.client().json("POST", paths.KEYS, {"name": "after-the-backup"})
    server.stop()
    assert subprocess.run(server.command("--restore", str(backup)), stderr=subprocess.PIPE,
                          timeout=DEADLINE).returncode == 0
    server.start()
    assert server.client().json("GET", paths.HEALTH)["epoch"] == epoch + 1001
    assert server.client().items(paths.KEYS, wire.KEY_VIEW) == []
    again = StandInNode(server, "a")
    again.desired, again.observed = node.desired, node.observed
    until(lambda: again.beat() and is_served(server))
    assert again.answer.desired is None                # heard, but told nothing yet
    broken = tmp_path / "broken.db"
    broken.write_bytes(b"no database" * 1000)
    server.stop()
    done = subprocess.run(server.command("--restore", str(broken)), stderr=subprocess.PIPE, text=True,
                          timeout=DEADLINE)
    assert done.returncode == 1 and "damaged" in done.stderr
    server.start()


@pytest.mark.parametrize("make, code, words", [
    (lambda server: server.write("modles: []\n"), 78, "modles"),
    (lambda server: server.config.unlink(), 78, "no such file"),
    (lambda server: (server.data / "llmgw.db").write_bytes(b"garbage" * 1000), 1, "damaged"),
    (lambda server: (server.data / "tokens" / "admin").write_text("x"), 1, "not a token of role admin"),
], ids=["config", "no-config", "database", "token"])
def test_a_server_that_cannot_start_says_why_in_a_sentence(server, make, code, words):
    server.stop()
    for name in ("llmgw.db-wal", "llmgw.db-shm"):
        (server.data / name).unlink(missing_ok=True)
    make(server)
    done = subprocess.run(server.command(), stderr=subprocess.PIPE, text=True, timeout=DEADLINE)
    assert done.returncode == code, done.stderr
    assert words in done.stderr and "Traceback" not in done.stderr


def test_a_second_server_and_a_taken_port_are_refused(server):
    done = subprocess.run(server.command(), stderr=subprocess.PIPE, text=True, timeout=DEADLINE)
    assert done.returncode == 1 and f"another server (pid {server.process.pid})" in done.stderr
    port = server.url.rpartition(":")[2]
    other = [*server.command("--data-dir", str(server.folder / "other"))]
    done = subprocess.run([*other, "--listen", f"127.0.0.1:{port}"], stderr=subprocess.PIPE, text=True, timeout=DEADLINE)
    assert done.returncode == 1 and f"127.0.0.1:{port}: another program listens there" in done.stderr


def test_a_term_signal_ends_it_in_order_even_with_waiting_polls(server):
    router = StandInRouter(server)
    until(lambda: router.poll())
    thread = threading.Thread(target=lambda: router.poll(wait=30))
    thread.start()
    time.sleep(0.2)
    started = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(DEADLINE) == 0
    assert time.monotonic() - started < 10
    thread.join(DEADLINE)
    assert "Traceback" not in server.log.read_text()


def test_an_imported_archive_is_listed_for_the_nodes_and_served_in_parts(server):
    data = bytes(range(256)) * 5000
    client, node = server.client(), StandInNode(server, "a")
    digest = upload(client, data)
    path = paths.fill(paths.MIRROR_ENGINE, engine="llama.cpp", version="b10991", asset="llama-b10991-bin-ubuntu-x64.tar.gz")
    client.json("PUT", path, {"sha256": digest, "size_bytes": len(data)})
    beat_until([node], lambda: node.desired is not None and node.desired.engines[0].assets)
    asset, = node.desired.engines[0].assets
    assert (asset.sha256, asset.size_bytes) == (digest, len(data))
    where = paths.fill(paths.ENGINE_ASSET, engine="llama.cpp", version="b10991", asset=asset.name)
    with node.client.stream(where, headers={"Range": "bytes=1000-1999"}) as stream:
        assert stream.status == 206 and stream.read(5000) == data[1000:2000]
    with node.client.stream(paths.fill(paths.BLOB, digest=digest)) as stream:
        assert stream.headers["etag"] == f'"{digest}"'
    for wrong in ("../../llmgw.db", "sha256:" + "g" * 64, "0" * 63):
        with pytest.raises(ApiError) as caught:
            node.client.stream(paths.fill(paths.BLOB, digest=wrong))
        assert caught.value.status == 400
    client.json("DELETE", path)
    with pytest.raises(ApiError, match="the files of llama.cpp b10991 are not known") as caught:
        node.client.stream(where)
    assert caught.value.status == 503         # it may be published, or imported, at any time
    assert not (server.data / "mirror" / "blobs" / "sha256" / digest).exists()
