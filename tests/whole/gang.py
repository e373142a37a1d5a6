"""A replica over two nodes of one machine: what a test with a stand-in and one with the real vLLM have in common."""
from __future__ import annotations

import contextlib
import json
import os
import signal
import urllib.error
import urllib.request

from llmgw.agent import shard_row
from llmgw.system import proc
from tests.whole.cluster import Cluster, free_block, until

MODEL = "tiny"
SERVER = """
cluster: test
listen: 127.0.0.1:0
fabric: 127.0.0.0/8
engines:
  vllm: {version: 0.30.0}
models:
  - name: tiny
    engine: vllm
    weights: mirror:tiny
    nodes: %(nodes)d
    gpus: 0
    context_length: 256
    parallel: 4
    args: [--enforce-eager]
"""


def start(pyz, folder, template, python, model, nodes=2):
    """Return a cluster of a server, a router and two agents whose vLLM is ``python``; the model is imported."""
    made = Cluster(pyz, folder, template)
    made.config.write_text(SERVER % {"nodes": nodes})
    try:
        made.start_server()
        for name in ("node-1", "node-2"):
            ports, config = free_block(24), made.folder / f"{name}.yaml"
            config.write_text(f"server: {made.server['url']}\ntoken_file: {made.token('node')}\nnode: {name}\n"
                              f"data_dir: {made.dir(name)}\ngate_port: {ports}\nengine_ports: {ports + 1}\n"
                              f"fabric_address: 127.0.0.1\nengines: {{vllm: {{python: {python}}}}}\n")
            made.start(name, "agent", "--config", config, "--owned")
            until(f"{name} has its gate", lambda name=name: any(node["name"] == name and node["identity"]["gate_port"] for node in made.items("nodes")))
        made.start_router()
        made.ctl("mirror", "import", model, "--name", MODEL)
        made.key = json.loads(made.ctl("keys", "create", "test", "--json"))["secret"]
    except BaseException:
        made.close()
        raise
    return made


def ask(made, seconds=120.0):
    """Return the answer to a completion through the router, None while there is none."""
    request = urllib.request.Request(f"{made.router['url']}/v1/completions", headers={
        "Authorization": f"Bearer {made.key}", "Content-Type": "application/json"},
        data=json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 4, "temperature": 0}).encode())
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            return json.loads(answer.read())
    except (urllib.error.URLError, OSError) as error:
        with contextlib.suppress(AttributeError):
            error.close()
        return None


def replica(made):
    """Return the one replica, None while there is not exactly one."""
    found = made.items("replicas")
    return found[0] if len(found) == 1 else None


def ranks(made):
    """Return {rank: (incarnation, pids of all that has its mark)} as the machine itself shows them."""
    found = {}
    for name in ("node-1", "node-2"):
        for process in proc.marked(shard_row.OWNER, str(made.dir(name))):
            shard, _, incarnation = proc.environ(process.pid).get(shard_row.SHARD, "").rpartition(".")
            rank = int(shard.rpartition(".")[2])
            before = found.get(rank, (0, []))[1]
            found[rank] = (int(incarnation), before + [process.pid])
    return found


def kill(pids):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def losing_rank_1_restarts_all(made, seconds):
    """Kill rank 1: the replica leaves routing, every rank starts again, in order, and it answers. Return the ranks."""
    before = ranks(made)
    assert set(before) == {0, 1}
    kill(before[1][1])
    until("the loss is told", lambda: any(
        "Restarting" in event["reason"] for event in made.items("events")), seconds)

    def again():
        now = ranks(made)
        return now if set(now) == {0, 1} and all(now[rank][0] > before[rank][0] for rank in now) else None
    until("every rank runs again", again, seconds)
    made.wait_ready(MODEL, seconds)
    until("it answers again", lambda: ask(made), seconds)
    now = ranks(made)
    gone = {pid for _, pids in before.values() for pid in pids}
    assert not gone & {pid for _, pids in now.values() for pid in pids}
    return now


def nothing_left_when_unwanted(made, seconds):
    """Take the model away: nothing with our marks is left on any node."""
    made.config.write_text(made.config.read_text().replace("    nodes: 2\n", "    nodes: 2\n    replicas: 0\n"))
    until("the replica is gone", lambda: (made.ctl("apply", "--confirm", ok=False), not made.items("replicas"))[1], seconds)
    until("nothing of it runs", lambda: not ranks(made), seconds)
