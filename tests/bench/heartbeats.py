"""1,000 simulated nodes with a heartbeat every 5 s: what it costs the control plane, and that nobody is suspect.

Run by hand: python tests/bench/heartbeats.py [NODES] [SECONDS]. The nodes share the machine with the server,
whose own CPU is read from /proc.
"""
from __future__ import annotations

import asyncio
import json
import os
import pathlib
import sys
import tempfile
import time
from dataclasses import replace

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])

from llmgw.api import paths, wire  # noqa: E402
from llmgw.domain.engine import EngineObserved, EnginePhase  # noqa: E402
from llmgw.domain.heartbeat import NodeObserved  # noqa: E402
from llmgw.domain.node import Gpu, NodeFacts, NodeIdentity  # noqa: E402
from llmgw.domain.replica import ShardObserved, ShardState  # noqa: E402
from tests.server.running import RunningServer  # noqa: E402

CONFIG = "engines:\n  llama.cpp: {version: b10991}\nmodels:\n" + "".join(
    f"  - name: model-{number}\n    engine: llama.cpp\n    weights: mirror:m\n    replicas: 10\n    gpus: 1\n"
    for number in range(20))


def observed(number: int) -> NodeObserved:
    gpus = tuple(Gpu(f"GPU-{number}-{card}", card, "NVIDIA H100 80GB HBM3", 80 << 30, 1 << 20, "9.0")
                 for card in range(8))
    return NodeObserved(
        NodeIdentity(f"node-{number}", "0.1.0", f"boot-{number}", "127.0.0.1", 7802, {"rack": str(number % 40)}),
        NodeFacts(arch="x86_64", libc="glibc 2.36", kernel="6.1", memory_total_bytes=1 << 40, cpu_count=128,
                  memory_available_bytes=1 << 39, disk_total_bytes=1 << 42, disk_free_bytes=1 << 41, gpus=gpus), True,
        engines=(EngineObserved("llama.cpp", "b10991", EnginePhase.INSTALLED, usable=True, devices=("CUDA0",)),))


class Node:
    """One connection that is kept; it does at once what it is told."""

    def __init__(self, number: int, port: int, token: str, delays: list) -> None:
        self.said, self._port, self._delays = observed(number), port, delays
        path = paths.fill(paths.HEARTBEAT, node=self.said.identity.name)
        self._head = (f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {token}\r\n"
                      "Content-Type: application/json\r\nContent-Length: ")
        self.bytes = 0

    async def run(self, first: float, every: float, end: float) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        due = first
        while due < end:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            started = time.monotonic()
            body = wire.dumps(wire.NODE_OBSERVED, replace(
                self.said, facts=replace(self.said.facts, memory_available_bytes=int(started))))
            self.bytes = len(body)
            writer.write(f"{self._head}{len(body)}\r\n\r\n".encode() + body)
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            answer = wire.loads(wire.HEARTBEAT_ANSWER, await reader.readexactly(length), "answer")
            self._delays.append(time.monotonic() - started)
            if answer.desired is not None:
                shards = tuple(ShardObserved(shard.id, ShardState.READY, port=7900, incarnation=1)
                               for shard in answer.desired.shards)
                self.said = replace(self.said, epoch=answer.epoch, generation=answer.generation, shards=shards)
            due += every
        writer.close()


def cpu_seconds(pid: int) -> float:
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mib(pid: int) -> float:
    return int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


async def drive(server: RunningServer, count: int, seconds: float) -> dict:
    port, token = int(server.url.rpartition(":")[2]), (server.data / "tokens" / "node").read_text().strip()
    delays: list = []
    nodes = [Node(number, port, token, delays) for number in range(count)]
    begin = time.monotonic()
    warm = 20.0
    tasks = [asyncio.ensure_future(node.run(begin + 5.0 * number / count, 5.0, begin + warm + seconds))
             for number, node in enumerate(nodes)]
    await asyncio.sleep(warm)                    # everybody known, everything placed
    pid = server.process.pid
    delays.clear()
    used, started = cpu_seconds(pid), time.monotonic()
    await asyncio.sleep(seconds - 6.0)
    used, lasted, measured = cpu_seconds(pid) - used, time.monotonic() - started, sorted(delays)
    loop = asyncio.get_running_loop()
    views = await loop.run_in_executor(None, lambda: server.client().items(paths.NODES, wire.NODE_VIEW))
    replicas = await loop.run_in_executor(None, lambda: server.client().items(paths.REPLICAS, wire.REPLICA_VIEW))
    await asyncio.gather(*tasks)
    return {"nodes": count, "heartbeat_bytes": nodes[0].bytes, "heartbeats_per_second": round(len(measured) / lasted, 1),
            "server_cpu_share_of_one_core": round(used / lasted, 3), "resident_mib": round(resident_mib(pid)),
            "p50_ms": round(1000 * measured[len(measured) // 2], 2),
            "p99_ms": round(1000 * measured[int(len(measured) * 0.99)], 2),
            "not_ready": sum(view.state != "ready" for view in views),
            "replicas_ready": sum(view.state == "ready" for view in replicas)}


def main() -> int:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 40.0
    with tempfile.TemporaryDirectory() as folder:
        server = RunningServer(pathlib.Path(folder), CONFIG)
        server.start()
        try:
            server.import_model()
            result = asyncio.run(drive(server, count, seconds))
        finally:
            server.stop()
    print(json.dumps(result))
    ok = result["not_ready"] == 0 and result["server_cpu_share_of_one_core"] < 0.6
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
