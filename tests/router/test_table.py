"""Where the routing table comes from, where it is kept, and what a new one changes."""
from __future__ import annotations

import dataclasses
import json
import os
import stat
import threading

import pytest

from llmgw.api import wire
from tests.fakes.raw_client import RawClient
from tests.fakes.router_process import KEY, REPLICA_KEY, RouterProcess, chat, model, replica, table
from tests.fakes.upstream import DONE, METRICS, delta, wait_for


@pytest.fixture
def follow(tmp_path, ends, control_plane, token_file):
    """Start a router that follows the stand-in control plane."""
    def start(routes=None, folder="followed"):
        (tmp_path / folder).mkdir(exist_ok=True)
        started = RouterProcess(tmp_path / folder, routes, "--server", control_plane.url, "--token-file", token_file)
        ends.callback(started.stop)
        return started
    return start


def revision(started):
    answer = started.ask("GET", "/ready")
    return answer.json["table_revision"] if answer.status == 200 else None


def test_without_a_table_a_key_is_a_503_and_no_key_a_401(tmp_path, ends):
    started = RouterProcess(tmp_path)
    ends.callback(started.stop)
    answer = started.ask()
    assert answer.status == 503 and answer.error["code"] == "no_routing_table" and "retry-after" in answer.headers
    assert started.ask(key=None).status == 401
    assert started.ask("GET", "/ready").status == 503 and started.ask("GET", "/healthz").status == 200
    assert started.ask("GET", "/v1/models").status == 503


def test_the_table_is_learned_kept_for_its_owner_only_and_swapped(follow, control_plane, upstream):
    started = follow()
    assert started.ask().status == 503
    control_plane.publish(table(model(upstream().port)))
    wait_for(lambda: revision(started) == 1)
    assert started.ask().status == 200
    path = os.path.join(started.folder, "table.json")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    with open(path, "rb") as source:
        assert wire.loads(wire.ROUTE_TABLE, source.read(), "kept") == control_plane.table
    control_plane.publish(table(model(why_not="node a: being repaired")))
    wait_for(lambda: revision(started) == 2)
    assert "being repaired" in started.ask().error["message"]


def test_the_kept_table_serves_with_no_control_plane_at_all_and_after_a_restart(tmp_path, ends, upstream, token_file):
    engine = upstream()
    first = RouterProcess(tmp_path, table(model(engine.port)), "--server", "http://127.0.0.1:1", "--token-file", token_file)
    ends.callback(first.stop)
    assert first.ask().status == 200
    first.stop()
    second = RouterProcess(tmp_path, None, "--server", "http://127.0.0.1:1", "--token-file", token_file)
    ends.callback(second.stop)
    assert second.ask().status == 200


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"cluster":"x"}', b"\xff" * 100])
def test_a_kept_table_that_cannot_be_read_is_said_and_does_not_stop_the_start(tmp_path, ends, data):
    (tmp_path / "table.json").write_bytes(data)
    started = RouterProcess(tmp_path)
    ends.callback(started.stop)
    assert started.ask().status == 503
    assert "cannot be used" in started.log() and "Traceback" not in started.log()


def test_a_control_plane_that_fails_changes_nothing_and_is_said_once(follow, control_plane, upstream):
    control_plane.status = 500
    started = follow(table(model(upstream().port)))
    wait_for(lambda: control_plane.calls >= 3)
    assert started.ask().status == 200
    assert started.log().count("no table from the control plane") == 1


def test_a_table_of_an_older_control_plane_is_refused_until_that_is_the_younger_one(follow, control_plane, upstream):
    kept, old = upstream(), upstream()

    def of(engine, epoch, number):
        return dataclasses.replace(table(model(engine.port), revision=number), epoch=epoch)

    for epoch, number in ((3, 900), (4, 40)):
        control_plane.table = of(old, epoch, number)
        started = follow(of(kept, 4, 41), f"{epoch}")
        wait_for(lambda started=started: "reason=Behind" in started.log())
        calls = control_plane.calls
        wait_for(lambda calls=calls: control_plane.calls >= calls + 2)
        assert started.ask().status == 200 and kept.requests and not old.requests
        assert revision(started) == 41
        said, = [line for line in started.log().splitlines() if "reason=Behind" in line]
        assert f"its table is of epoch {epoch}, revision {number}; served from is 4, 41" in said and "(try: " in said
        with open(os.path.join(started.folder, "table.json"), "rb") as source:
            assert wire.loads(wire.ROUTE_TABLE, source.read(), "kept").epoch == 4
    control_plane.table = of(old, 5, 1)
    wait_for(lambda: revision(started) == 1)
    assert started.ask().status == 200 and len(old.requests) == 1


def test_revoking_a_key_and_adding_one_takes_effect(follow, control_plane, upstream):
    engine = upstream()
    control_plane.publish(table(model(engine.port)))
    started = follow()
    wait_for(lambda: started.ask().status == 200)
    with RawClient(started.port) as kept:
        kept.send(_request(KEY))
        assert kept.answer().status == 200
        control_plane.publish(table(model(engine.port), keys=[("another-key", ())]))
        wait_for(lambda: revision(started) == 2)
        kept.send(_request(KEY))
        assert kept.answer().status == 401        # also on a connection that was let in before
    assert started.ask(key="another-key").status == 200


def _request(key):
    from tests.fakes.raw_client import request
    return request("POST", "/v1/chat/completions", chat(), key)


def test_a_running_stream_outlives_the_replica_that_leaves_the_table(follow, control_plane, upstream):
    finish = threading.Event()

    def answer(exchange):
        exchange.begin_stream()
        exchange.chunk(delta("a"))
        assert finish.wait(40)
        exchange.chunk(DONE)
        exchange.end_stream()

    engine = upstream(answer)
    control_plane.publish(table(model(engine.port)))
    started = follow()
    wait_for(lambda: revision(started) == 1)
    with started.open(chat(stream=True)) as client:
        client.until(delta("a"))
        control_plane.publish(table(model()))
        wait_for(lambda: revision(started) == 2)
        assert started.ask().status == 503
        finish.set()
        client.until(b"0\r\n\r\n")


def test_a_request_that_waits_on_a_replica_that_leaves_goes_to_another(follow, control_plane, upstream):
    def never(exchange):
        exchange.wait_gone(60)
        exchange.close()

    engine, other = upstream(never), upstream()
    control_plane.publish(table(model(replica(engine.port, "m-0"))))
    started = follow()
    wait_for(lambda: revision(started) == 1)
    with started.open() as client:
        wait_for(lambda: engine.requests)
        control_plane.publish(table(model(replica(other.port, "m-1"))))
        assert client.answer().status == 200
    assert len(other.requests) == 1


def test_a_draining_replica_gets_nothing_new(follow, control_plane, upstream):
    first, second = upstream(), upstream()
    routes = table(model(replica(first.port, "m-0", draining=True), replica(second.port, "m-1")))
    control_plane.publish(routes)
    started = follow()
    wait_for(lambda: revision(started) == 1)
    for turn in range(10):
        assert started.ask(body=chat(str(turn))).status == 200
    assert not first.requests and len(second.requests) == 10


def test_a_replica_that_came_back_never_gets_an_old_socket(follow, control_plane, upstream):
    engine = upstream()
    control_plane.publish(table(model(replica(engine.port, "m-0", incarnation=1))))
    started = follow()
    wait_for(lambda: revision(started) == 1)
    started.ask()
    old = {exchange.sock for exchange in engine.requests}
    control_plane.publish(table(model(replica(engine.port, "m-0", incarnation=2))))
    wait_for(lambda: revision(started) == 2)
    started.ask()
    assert engine.requests[-1].sock not in old


def test_the_gauges_are_read_with_the_replicas_key_and_reported(follow, control_plane, upstream):
    engine = upstream(metrics=METRICS.replace(b"processing 0", b"processing 3"))
    control_plane.publish(table(model(engine.port)))
    started = follow()
    wait_for(lambda: any("m-0" in report.answering for report in control_plane.reports))
    report = [report for report in control_plane.reports if "m-0" in report.answering][-1]
    assert report.table_revision == 1
    gauges = report.replicas["m-0"]
    assert (gauges.running, gauges.waiting, gauges.kv_used, gauges.generated_tokens) == (3, 0, None, 5)
    assert started.metrics()['llmgw_router_engine_running{model="m",replica="m-0"}'] == 3


def test_gauges_that_cannot_be_read_are_unknown_and_requests_are_served(follow, control_plane, upstream):
    engine = upstream(metrics=b"<html>no</html>")
    control_plane.publish(table(model(engine.port)))
    started = follow()
    wait_for(lambda: engine.scrapes and control_plane.reports)
    wait_for(lambda: "m-0" in control_plane.reports[-1].answering)
    assert control_plane.reports[-1].replicas["m-0"].running is None
    assert not any("engine_running" in name for name in started.metrics())
    assert started.ask().status == 200


def test_the_gauges_decide_between_replicas(router, upstream):
    busy = upstream(metrics=METRICS.replace(b"processing 0", b"processing 4").replace(b"deferred 0", b"deferred 9"))
    idle = upstream()
    started = router(busy.port, idle.port)
    wait_for(lambda: sum("engine_running" in name for name in started.metrics()) == 2)
    for turn in range(20):
        started.ask(body=chat(str(turn)))
    assert not busy.requests and len(idle.requests) == 20


def test_one_prompts_requests_stay_with_one_replica_and_many_prompts_spread(router, upstream):
    engines = [upstream(), upstream(), upstream()]
    started = router(*(engine.port for engine in engines))
    for _ in range(12):
        started.ask(body=chat("the same beginning"))
    assert sorted(len(engine.requests) for engine in engines) == [0, 0, 12]
    for turn in range(60):
        started.ask(body=chat(f"another beginning {turn}"))
    assert all(len(engine.requests) > 3 for engine in engines)


def test_a_session_header_decides_before_the_prompt(router, upstream):
    engines = [upstream(), upstream(), upstream()]
    started = router(*(engine.port for engine in engines))
    for turn in range(12):
        started.ask(body=chat(f"prompt {turn}"), fields=["X-Session-Id: one"])
    assert sorted(len(engine.requests) for engine in engines) == [0, 0, 12]


def test_requests_that_run_at_once_are_spread(router, upstream):
    release = threading.Event()

    def answer(exchange):
        assert release.wait(40)
        exchange.answer()

    engines = [upstream(answer), upstream(answer)]
    started = router(*(engine.port for engine in engines))
    clients = [started.open(chat("the same")) for _ in range(8)]
    wait_for(lambda: sum(len(engine.requests) for engine in engines) == 8)
    release.set()
    for client in clients:
        assert client.answer().status == 200
        client.sock.close()
    assert sorted(len(engine.requests) for engine in engines) == [4, 4]


def test_names_win_over_aliases_and_unknown_engines_are_served(router, upstream):
    one, two = upstream(), upstream()
    strange = dataclasses.replace(replica(two.port, "b-0"), engine="engine-of-tomorrow")
    routes = table(model(one.port, name="a", aliases=("b", "c")), model(strange, name="b"))
    started = router(routes)
    for name, engine in (("a", one), ("b", two), ("c", one)):
        assert started.ask(body=json.dumps({"model": name, "messages": []}).encode()).status == 200
        assert engine.requests.pop().json["model"] == ("a" if name == "c" else name)


def test_a_token_file_that_is_not_there_is_said(tmp_path):
    import subprocess
    import sys
    ended = subprocess.run([sys.executable, "-m", "llmgw", "router", "--server", "http://127.0.0.1:1", "--listen",
                            "127.0.0.1:0", "--data-dir", str(tmp_path), "--token-file", str(tmp_path / "none")],
                           stderr=subprocess.PIPE, text=True, timeout=60)
    assert ended.returncode == 78 and "no token file" in ended.stderr


def test_secrets_stay_out_of_the_reports(follow, control_plane, upstream):
    control_plane.publish(table(model(upstream().port)))
    follow()
    wait_for(lambda: control_plane.reports)
    assert REPLICA_KEY not in repr(control_plane.reports)


