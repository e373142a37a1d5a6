"""The commands as a person runs them, against a stand-in that answers what it was given."""
from __future__ import annotations

import json
import os
import subprocess
import sys
import time

from llmgw.api import wire
from llmgw.ctl.output import columns
from llmgw.domain.engine import BESIDE, Asset, EngineObserved, EnginePhase
from llmgw.domain.model import Weights, WeightsFile
from llmgw.domain.node import Gpu, NodeFacts, NodeIdentity, OsRelease
from llmgw.domain.replica import FirstFailure, GpuSlot, ShardObserved, ShardState
from llmgw.domain.route import Gauges
from llmgw.domain.view import (
    EngineArchive,
    EngineView,
    EventView,
    KeyView,
    MirrorView,
    ModelView,
    NodeView,
    ReplicaView,
    ShardView,
)

GIB = 1 << 30
HOSTILE = "evil\x1b[2J\u202e"
SENTENCE = "llama.cpp b10991: libgomp.so.1 is missing"


def items(codec, *values):
    return {"items": [codec.encode(value) for value in values]}


def node(name="alpha", state="ready", message="", **more):
    facts = NodeFacts(os=OsRelease("debian", (), "12", "Debian GNU/Linux 12"), arch="x86_64", cpu_count=8,
                      memory_total_bytes=32 * GIB, memory_available_bytes=20 * GIB, disk_total_bytes=100 * GIB,
                      disk_free_bytes=50 * GIB, gpus=(Gpu("GPU-1", 0, "L40S"), Gpu("GPU-2", 1, "L40S")))
    return NodeView(name, state, message, NodeIdentity(name, "0.1.0", "boot"), facts, True, 2.0, **more)


def model(**more):
    return ModelView(**{**dict(name="gemma", engine="llama.cpp", engine_version="b10991", task="chat",
                               weights="mirror:gemma", wanted=2, ready=1), **more})


def replica(**more):
    return ReplicaView(**{**dict(id="gemma-1", model="gemma", engine="llama.cpp", engine_version="b10991",
                                 wish="run", state="ready", reason="", message="", created_at=time.time() - 65),
                          **more})


def test_stand_in_nodes_shows_what_a_machine_is_and_what_troubles_it(ctl, fake):
    missing = EngineObserved("llama.cpp", "b10991", EnginePhase.MISSING, "libgomp.so.1 is missing")
    serving = EngineObserved("vllm", "0.31.0", EnginePhase.INSTALLED, f"vllm 0.31.0{BESIDE}no index", usable=True)
    server = fake({"GET /v1/nodes": items(wire.NODE_VIEW, node(engines=(missing, serving), warnings=("no AVX2",)),
                                          node("beta", "lost", "no heartbeat for 11 m", draining=True,
                                               warnings=("its clock is 90 s behind",), clock_skew_seconds=-90.0))})
    done = ctl("nodes", server=server.url)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert "2 x L40S" in lines[1] and "21/34 GB" in lines[1]
    assert lines[2:4] == ["  no AVX2", f"  {SENTENCE}"]
    assert lines[4] == "  vllm 0.31.0: vllm 0.31.0; new packages: no index"
    assert lines[6] == "  no heartbeat for 11 m" and lines[7].startswith("  draining") and "90 s behind" in lines[8]
    assert server.requests[0][3] == "Bearer llmgw_admin_00000000_secret"


def test_stand_in_a_model_that_cannot_be_placed_shows_each_nodes_own_words(ctl, fake):
    why = (f"alpha: {SENTENCE}", "beta: 3 GB of memory are free, 40 GB are needed")
    server = fake({"GET /v1/models": items(wire.MODEL_VIEW, model(why_not=why), model(name="b", wanted=1))})
    done = ctl("models", server=server.url)
    assert done.stdout.splitlines()[2:4] == [f"  {sentence}" for sentence in why]
    assert "1/2" in done.stdout


def test_stand_in_replicas_explains_the_first_failure(ctl, fake):
    failure = FirstFailure(1.7e9, "ended with code 1", "LANG=C llama-server --model x",
                           "loading\n  tensor\n\x1b[31mout of memory")
    seen = ShardObserved("gemma-1.0", ShardState.CRASHLOOP, "Exited", "ended 5 times", 1.7e9, 5, None, 7900, 5, failure)
    shards = (ShardView(0, "alpha", (GpuSlot("GPU-1", 0),), seen),)
    server = fake({"GET /v1/replicas": items(
        wire.REPLICA_VIEW, replica(state="crashloop", message="ended 5 times", shards=shards),
        replica(id="other-1", model="other", gauges=Gauges(3.0, 1.0, 0.25)))})
    explained = ctl("replicas", "--explain", "gemma", server=server.url).stdout
    for expected in ("rank 0 on alpha, GPU 0: crashloop (Exited)", "port 7900, 5 restarts", "ended with code 1",
                     "command: LANG=C llama-server --model x", "\n      tensor\n", "    [31mout of memory"):
        assert expected in explained, explained
    assert "other" not in explained and "\x1b" not in explained
    table = ctl("replicas", server=server.url).stdout
    assert "25 %" in table and "1m" in table and "  ended 5 times" in table


def test_stand_in_engines_shows_the_nodes_sentence_and_what_to_try(ctl, fake):
    seen = EngineObserved("llama.cpp", "b10991", EnginePhase.MISSING, "libgomp.so.1 is missing",
                          "apt-get install libgomp1")
    loading = EngineObserved("llama.cpp", "b10991", EnginePhase.DOWNLOADING, "llama.tar.gz",
                             done_bytes=5, total_bytes=20)
    renewed = EngineObserved("vllm", "0.31.0", EnginePhase.INSTALLED, "vllm 0.31.0", usable=True)
    serving = EngineObserved("vllm", "0.31.0", EnginePhase.INSTALLED,
                             f"vllm 0.31.0{BESIDE}they are withdrawn", "relock", usable=True)
    server = fake({"GET /v1/engines": items(
        wire.ENGINE_VIEW, EngineView("llama.cpp", "b10991", nodes=(("alpha", seen), ("beta", loading))),
        EngineView("vllm", "0.30.0", assets_problem="github.com: no answer in time"),
        EngineView("vllm", "0.31.0", nodes=(("alpha", serving), ("beta", renewed))))})
    out = ctl("engines", server=server.url).stdout
    assert "vllm 0.31.0; new packages: they are withdrawn\n  try: relock\n" in out and out.count("new packages") == 1
    assert "  libgomp.so.1 is missing\n  try: apt-get install libgomp1\n" in out
    assert "llama.tar.gz (25 % of 20 B)" in out and "  github.com: no answer in time" in out


def test_stand_in_every_read_command_prints_the_servers_own_json(ctl, fake):
    answers = {"nodes": items(wire.NODE_VIEW, node(HOSTILE)), "models": items(wire.MODEL_VIEW, model()),
               "replicas": items(wire.REPLICA_VIEW, replica()), "engines": items(wire.ENGINE_VIEW),
               "events": items(wire.EVENT_VIEW, EventView(1, 1.7e9, "node/a", "Joined", "hello")),
               "keys": items(wire.KEY_VIEW, KeyView("k1", "me", 1.7e9)),
               "mirror": wire.MIRROR_VIEW.encode(MirrorView(free_bytes=5))}
    server = fake({f"GET /v1/{name}": data for name, data in answers.items()})
    for name, data in answers.items():
        words = [name, "list"] if name in ("keys", "mirror") else [name]
        done = ctl(*words, "--json", server=server.url)
        assert (done.returncode, done.stderr, json.loads(done.stdout)) == (0, "", data), name
        assert done.stdout.isascii()


def test_stand_in_no_hostile_name_reaches_the_terminal_at_80_and_40_columns(ctl, fake):
    bad = EngineObserved(HOSTILE, HOSTILE, EnginePhase.FAILED, HOSTILE, HOSTILE, devices=(HOSTILE,))
    server = fake({
        "GET /v1/nodes": items(wire.NODE_VIEW, node(HOSTILE, HOSTILE, HOSTILE, warnings=(HOSTILE * 20,),
                                                     engines=(bad,))),
        "GET /v1/models": items(wire.MODEL_VIEW, model(name=HOSTILE, weights=HOSTILE, why_not=(HOSTILE * 9,))),
        "GET /v1/replicas": items(wire.REPLICA_VIEW, replica(id=HOSTILE, state=HOSTILE, message=HOSTILE)),
        "GET /v1/engines": items(wire.ENGINE_VIEW, EngineView(HOSTILE, HOSTILE, nodes=((HOSTILE, bad),))),
        "GET /v1/events": items(wire.EVENT_VIEW, EventView(1, 1.7e9, HOSTILE, HOSTILE, HOSTILE)),
        "GET /v1/keys": items(wire.KEY_VIEW, KeyView(HOSTILE, HOSTILE, 1.7e9, (HOSTILE,))),
        "GET /v1/mirror": wire.MIRROR_VIEW.encode(MirrorView(
            (Weights(HOSTILE, "f" * 64, (WeightsFile(HOSTILE, 5, "0" * 64),)),),
            (EngineArchive(HOSTILE, HOSTILE, Asset(HOSTILE, 5, "0" * 64)),), (HOSTILE,)))})
    for words in (["nodes"], ["models"], ["replicas"], ["engines"], ["events"], ["keys", "list"], ["mirror", "list"]):
        for width in ("80", "40"):
            done = ctl(*words, server=server.url, env={"COLUMNS": width})
            assert done.returncode == 0, done.stderr
            shown = (done.stdout + done.stderr).split("\n")
            assert all(line.isprintable() for line in shown), words
            if words != ["events"]:
                assert max(map(columns, done.stdout.split("\n"))) <= int(width), words


def test_stand_in_a_key_alone_is_on_stdout_so_that_a_shell_can_keep_it(ctl, fake):
    made = KeyView("k1", "me", 1.7e9, ("gemma",), None, "llmgw_infer_k1_abc")
    server = fake({"POST /v1/keys": wire.KEY_VIEW.encode(made), "DELETE /v1/keys/k1": b""})
    done = ctl("keys", "create", "me", "--model", "gemma", server=server.url)
    assert done.stdout == "llmgw_infer_k1_abc\n" and "only this once" in done.stderr
    assert json.loads(server.requests[0][2]) == {"name": "me", "models": ["gemma"]}
    assert ctl("keys", "revoke", "k1", server=server.url).stderr.startswith("key k1 is revoked")


def test_stand_in_an_edit_that_waits_is_told_and_is_a_code_of_its_own(ctl, fake):
    answers = {"POST /v1/apply": {"applied": False, "needs_confirm": ["model gemma: 2 of 2 replicas would stop"]}}
    done = ctl("apply", server=fake(answers).url)
    assert done.returncode == 3 and "waits: model gemma: 2 of 2 replicas would stop" in done.stderr
    assert "try: llmgw.pyz ctl apply --confirm" in done.stderr and done.stdout == ""
    assert ctl("apply", server=fake({"POST /v1/apply": {"applied": True, "needs_confirm": []}}).url).returncode == 0


def test_stand_in_forgetting_a_node_says_what_is_started_elsewhere(ctl, fake):
    server = fake({"DELETE /v1/nodes/a": {"replicas": ["gemma-1", "gemma-2"]}, "DELETE /v1/nodes/b": {"replicas": []}})
    done = ctl("nodes", "forget", "a", server=server.url)
    assert done.returncode == 0 and "node a is forgotten" in done.stderr
    assert "started elsewhere where there is room: gemma-1, gemma-2" in done.stderr
    assert "elsewhere" not in ctl("nodes", "forget", "b", server=server.url).stderr
    assert ctl("nodes", "forget", server=server.url).returncode == 2


def test_stand_in_an_empty_list_says_what_to_do_and_prints_no_data(ctl, fake):
    server = fake({"GET /v1/nodes": {"items": []}})
    done = ctl("nodes", server=server.url)
    assert done.stdout == "" and "no node has called yet" in done.stderr


def test_stand_in_the_servers_refusal_and_its_advice_are_shown_as_they_are(ctl, fake):
    server = fake({"GET /v1/nodes": (403, {"reason": "Forbidden", "message": "not with this token",
                                           "hint": "use another"}),
                   "GET /v1/models": (503, {"reason": "Busy", "message": "too many connections"})})
    done = ctl("nodes", server=server.url)
    assert (done.returncode, done.stderr) == (1, "llmgw: not with this token\n  try: use another\n")
    assert ctl("models", server=server.url).returncode == 75


def test_without_a_server_one_sentence_says_how_to_name_one(ctl):
    done = ctl("nodes")
    assert done.returncode == 78
    assert done.stderr.startswith("llmgw: no server is named, and none runs on this machine\n  try: ")


def test_a_server_that_is_gone_is_told_from_one_that_never_was(ctl, tmp_path):
    folder = tmp_path / "data" / "up" / "server"
    folder.mkdir(parents=True)
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    (folder / "endpoint.json").write_text(json.dumps(
        {"url": "http://127.0.0.1:1", "admin_token_file": "/nowhere", "pid": child.pid}))
    done = ctl("nodes")
    assert done.returncode == 1 and "the server of this machine is not running" in done.stderr


def test_stand_in_the_endpoint_of_this_machine_is_found_by_itself(ctl, fake, tmp_path):
    server = fake({"GET /v1/nodes": items(wire.NODE_VIEW, node())})
    folder = tmp_path / "data" / "up" / "server"
    folder.mkdir(parents=True)
    (folder / "endpoint.json").write_text(json.dumps(
        {"url": server.url, "admin_token_file": str(tmp_path / "token"), "pid": os.getpid()}))
    assert "alpha" in ctl("nodes").stdout
    # a named server with a token of this machine, and a token in the environment
    assert "alpha" in ctl("nodes", env={"LLMGW_SERVER": server.url}).stdout
    assert "alpha" in ctl("nodes", env={"LLMGW_TOKEN": "llmgw_admin_11111111_other"}).stdout
    assert server.requests[-1][3] == "Bearer llmgw_admin_11111111_other"


def test_a_missing_or_empty_token_file_is_a_sentence(ctl, tmp_path):
    done = ctl("nodes", "--server", "http://127.0.0.1:1", "--token-file", str(tmp_path / "none"))
    assert done.returncode == 78 and "there is no such file" in done.stderr
    (tmp_path / "empty").write_text("\n")
    done = ctl("nodes", "--server", "http://127.0.0.1:1", "--token-file", str(tmp_path / "empty"))
    assert "holds no token" in done.stderr


def test_an_unknown_command_suggests_the_nearest(ctl):
    done = ctl("node")
    assert (done.returncode, done.stderr) == (
        2, "llmgw: ctl: unknown command 'node'\n  try: llmgw.pyz ctl nodes\n")
    assert ctl("--help").returncode == 0 and ctl().returncode == 2


def test_stand_in_a_reader_that_has_seen_enough_gets_no_complaint(ctl, fake):
    server = fake({"GET /v1/nodes": items(wire.NODE_VIEW, *[node(f"n{at}") for at in range(2000)])})
    done = subprocess.run(
        f"{sys.executable} -W error -m llmgw ctl nodes --server {server.url} --token-file /dev/stdin "
        "<<<llmgw_admin_0_x | head -1", shell=True, executable="/bin/bash", stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.stdout.startswith("NODE") and done.stderr == ""


def test_stand_in_watch_goes_on_while_the_server_is_away(ctl, fake, tmp_path):
    server = fake({"GET /v1/nodes": items(wire.NODE_VIEW, node())})
    token = tmp_path / "token"
    with open(tmp_path / "out", "wb") as out:
        child = subprocess.Popen([sys.executable, "-m", "llmgw", "ctl", "nodes", "--watch", "--server", server.url,
                                  "--token-file", str(token)], stdout=out, stderr=subprocess.STDOUT)
    try:
        wait_for(lambda: "alpha" in (tmp_path / "out").read_text())
        server.close()
        wait_for(lambda: "connection refused" in (tmp_path / "out").read_text())
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()


def wait_for(true, seconds=40):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)
