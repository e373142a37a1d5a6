"""The mirror beside nginx on the same file in the same run.

    bench_mirror.py [--megabytes N] [--rounds R] [--nodes 1,2,4]

nginx serves a file to curl; the control plane serves it, as a blob, to what an agent runs: fetched in
ranges, every chunk proven, on the disk under its name. Then so many nodes, each with its gate, fetch it at
once and give it to each other, and the control plane's own count tells what it sent. Needs nginx and curl.
Ends with 3 when the bar is missed.
"""
from __future__ import annotations

import argparse
import hashlib
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

from llmgw.api import paths, wire
from llmgw.domain.gate import GateTable, PeerDoor
from llmgw.domain.heartbeat import NodeDesired, Peer, Share
from llmgw.domain.model import ModelSpec, Weights, WeightsFile
from llmgw.domain.replica import ShardWanted
from llmgw.domain.secret import Secret
from llmgw.system import hashing
from llmgw.system.ports import answers
from tests.server.running import CONFIG, RunningServer, until

BAR = 0.8                     # of nginx's throughput
NGINX_PORT = 18120
GATE_PORT = 18130             # and those after it
NGINX = """worker_processes 1; daemon off; error_log /dev/null; pid {folder}/nginx.pid;
events {{ worker_connections 128; }}
http {{ access_log off; sendfile on; tcp_nopush on; server {{ listen 127.0.0.1:{port}; location / {{ root {folder}/www; }} }} }}
"""
FETCH = """
import sys, time
from llmgw.agent.board import Board, Desired
from llmgw.agent.fetch import Fetcher
from llmgw.agent.layout import Layout
from llmgw.agent.peers import Peers
from llmgw.api import wire
from llmgw.api.client import ControlClient
from llmgw.domain.node import NodeIdentity
from llmgw.domain.secret import Secret
url, token, folder, name, desired, manifest = sys.argv[1:]
client = ControlClient([url], Secret(open(token).read().strip()))
weights = wire.loads(wire.WEIGHTS, open(manifest, "rb").read(), "manifest")
board = Board(NodeIdentity(name, "0", "b"))
board.put_desired(Desired(1, 1, wire.loads(wire.NODE_DESIRED, open(desired, "rb").read(), "desired")))
started = time.perf_counter()
peers = Peers(board)
Fetcher(client, Layout(folder), peers.having, peers.share).fetch(
    weights, reserve_bytes=0, report=lambda done, speed: None, stopping=lambda: False)
print(time.perf_counter() - started)
"""


class Node:
    """A folder with a gate of its own, which the others may read from."""

    def __init__(self, folder, name, names, ports, weights):
        folder.mkdir()
        self.folder, self.name = folder, name
        others = [other for other in names if other != name]
        doors = tuple(PeerDoor(other, hashlib.sha256(key(other, name).encode()).hexdigest()) for other in others)
        self.table, self.desired = folder / "table.json", folder / "desired.json"
        self.table.write_bytes(wire.dumps(wire.GATE_TABLE, GateTable("127.0.0.1", ports[name], root=str(folder), peers=doors)))
        self.desired.write_bytes(wire.dumps(wire.NODE_DESIRED, NodeDesired(
            shards=(ShardWanted("r.0", "r", 0, ModelSpec("m", "llama.cpp", "mirror:m"), "v", weights, Secret("k")),),
            peers=tuple(Peer(other, "127.0.0.1", ports[other], Secret(key(name, other)), (weights.fingerprint,))
                        for other in others),
            shares=(Share(weights.fingerprint, names.index(name), len(names)),))))
        self.gate = subprocess.Popen([sys.executable, "-m", "llmgw", "gate", "--table", str(self.table)],
                                     stderr=subprocess.DEVNULL)
        until(lambda: answers("127.0.0.1", ports[name]), "the gate")

    def close(self):
        self.gate.terminate()
        self.gate.wait(60)
        shutil.rmtree(self.folder)


def key(asker, asked):
    return f"{asker}-asks-{asked}"


class Mirror:
    """A real server that has the file as a model's only blob."""

    def __init__(self, folder, source):
        (folder / "server").mkdir()
        self.folder, self.server = folder, RunningServer(folder / "server", CONFIG % 0).start()
        digest, chunks, size = hashing.hash_file(str(source))
        blob = self.server.data / "mirror" / "blobs" / "sha256" / digest
        os.link(source, blob)
        given = Weights("m", "", (WeightsFile("m.bin", size, digest, chunks),), format="raw")
        self.weights = self.server.client().call("PUT", paths.fill(paths.MIRROR_MODEL, model="m"), send=wire.WEIGHTS,
                                                 value=given, receive=wire.WEIGHTS, timeout=600)
        (folder / "manifest").write_bytes(wire.dumps(wire.WEIGHTS, self.weights))

    def fetch(self, count=1):
        """Let ``count`` nodes fetch at once; return the seconds of the slowest."""
        names = [f"node-{number}" for number in range(count)]
        ports = {name: GATE_PORT + number for number, name in enumerate(names)}
        nodes = [Node(self.folder / name, name, names, ports, self.weights) for name in names]
        running = [subprocess.Popen([sys.executable, "-c", FETCH, self.server.url,
                                     str(self.server.data / "tokens" / "node"), str(node.folder), node.name,
                                     str(node.desired), str(self.folder / "manifest")],
                                    stdout=subprocess.PIPE, text=True) for node in nodes]
        seconds = [float(child.communicate(timeout=1200)[0]) for child in running]
        for node in nodes:
            node.close()
        return max(seconds)

    def sent(self):
        page = self.server.client().request("GET", paths.METRICS).body.decode()
        return float(next(line for line in page.splitlines() if line.startswith("llmgw_mirror_sent_bytes_total ")).split()[1])


def curl(folder):
    target = folder / "plain"
    started = time.perf_counter()
    subprocess.run(["curl", "-sf", "-o", str(target), f"http://127.0.0.1:{NGINX_PORT}/file"], check=True, timeout=1200)
    seconds = time.perf_counter() - started
    target.unlink()
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--nodes", default="1,2,4")
    options = parser.parse_args()
    for program in ("nginx", "curl"):
        if shutil.which(program) is None:
            print(f"bench_mirror: there is no {program} here: skipped")
            return 0
    folder = pathlib.Path(tempfile.mkdtemp(prefix="bench-mirror-"))
    nginx, mirror = None, None
    try:
        (folder / "www").mkdir()
        source = folder / "www" / "file"
        block = os.urandom(1 << 20)
        with open(source, "wb") as out:
            for number in range(options.megabytes):
                out.write(number.to_bytes(8, "big") + block[8:])
        (folder / "nginx.conf").write_text(NGINX.format(folder=folder, port=NGINX_PORT))
        folder.chmod(0o755)
        nginx = subprocess.Popen(["nginx", "-c", str(folder / "nginx.conf"), "-p", str(folder)], stderr=subprocess.DEVNULL)
        mirror = Mirror(folder, source)
        return report(folder, mirror, options)
    finally:
        if nginx is not None:
            nginx.terminate()
            nginx.wait()
        if mirror is not None:
            mirror.server.stop()
        shutil.rmtree(folder, ignore_errors=True)


def report(folder, mirror, options):
    size = mirror.weights.size_bytes
    curl(folder), mirror.fetch()                       # once to warm the page cache
    plain, ours = [], []
    for _ in range(options.rounds):                    # in turns: the machine's mood hits both
        plain.append(curl(folder))
        ours.append(mirror.fetch())
    ratios = sorted(one / other for one, other in zip(plain, ours))
    ratio = statistics.median(ratios)
    print(f"file: {size / 1e6:.0f} MB, {options.rounds} rounds in turns, medians")
    print(f"nginx to curl, unverified:        {size / statistics.median(plain) / 1e6:7.0f} MB/s")
    print(f"mirror to an agent, every chunk:  {size / statistics.median(ours) / 1e6:7.0f} MB/s   "
          f"{ratio:.2f} x nginx (bar {BAR:g}; rounds {', '.join(f'{one:.2f}' for one in ratios)})")
    for count in map(int, options.nodes.split(",")):
        before = mirror.sent()
        seconds = mirror.fetch(count)
        sent = mirror.sent() - before
        print(f"{count} nodes at once: the control plane sent {sent / 1e6:.0f} MB, {sent / size:.2f} x the file, "
              f"in {seconds:.1f} s")
    return 0 if ratio >= BAR else 3


if __name__ == "__main__":
    sys.exit(main())
