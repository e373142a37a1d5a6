"""The router beside nginx (and sglang-router, where one is named) on the same work in the same run.

    bench_router.py [--seconds S] [--streams N] [--rounds R] [--sglang PYTHON]

Each gets one core; the stand-ins for engines and the load share the other. What is compared is
the CPU time of the process, per request and per event: wall-clock figures move with the machine.
Needs gcc, taskset and nginx. Ends with 3 when a bar is missed.
"""
from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time

from llmgw.api import wire
from llmgw.domain.route import RoutedKey, RoutedModel, RoutedReplica, RouteTable
from llmgw.domain.secret import Secret

HERE = os.path.dirname(os.path.abspath(__file__))
ENGINES = [18100, 18101, 18102, 18103]
NGINX_PORT, SGLANG_PORT, ROUTER_PORT = 18110, 18111, 18112
KEY = "bench-key"
TICK = os.sysconf("SC_CLK_TCK")
EVENT_BAR = 1.4               # of nginx's
REQUEST_BAR = 0.8             # of sglang-router's
LATE_P50_BAR, LATE_P99_BAR = 1.0, 5.0   # milliseconds: added, and more than nginx's
BUSY_P50_MS = 2.0
NGINX = """worker_processes 1; daemon off; error_log /dev/null; pid {folder}/nginx.pid;
events {{ worker_connections 8192; }}
http {{ access_log off; keepalive_requests 1000000000; upstream engines {{ least_conn; {servers} keepalive 1024; keepalive_requests 1000000000; }}
server {{ listen 127.0.0.1:{port} backlog=4096; location / {{ proxy_pass http://engines; proxy_http_version 1.1;
proxy_set_header Connection ""; proxy_buffering off; }} }} }}
"""


class Row:
    def __init__(self, name, command, port, pinned_core=0):
        self.name, self.command, self.port, self.core = name, command, port, pinned_core
        self.per_request, self.per_event, self.p50, self.p99 = [], [], [], []


def pinned(core, command, **options):
    return subprocess.Popen(["taskset", "-c", str(core), *command], **options)


def family(pid):
    found = [pid]
    try:
        with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as source:
            for child in source.read().split():
                found += family(int(child))
    except OSError:
        pass
    return found


def cpu_seconds(pid):
    total = 0
    for member in family(pid):
        try:
            with open(f"/proc/{member}/stat", encoding="ascii", errors="replace") as source:
                fields = source.read().rsplit(")", 1)[1].split()
        except OSError:
            continue
        total += int(fields[11]) + int(fields[12])
    return total / TICK


def wait_open(port):
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.1)
    sys.exit(f"nothing listens on {port}")


def load(tools, kind, port, count, seconds):
    out = subprocess.run(["taskset", "-c", "1", tools, kind, str(port), str(count), str(seconds), KEY],
                         stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    numbers = [int(word) for word in out]
    if numbers[1] or not numbers[0]:
        sys.exit(f"{kind} on {port}: {numbers[0]} answers, {numbers[1]} errors: no figure")
    return numbers


def measure(row, tools, args, folder):
    """Start the row's process, put both loads on it once, end it."""
    with open(os.path.join(folder, f"{row.name}.log"), "wb") as log:
        process = pinned(row.core, row.command, stdout=log, stderr=log)
    try:
        wait_open(row.port)
        time.sleep(2)
        load(tools, "plain", row.port, 50, 1)                # warm
        before = cpu_seconds(process.pid)
        count, _ = load(tools, "plain", row.port, 50, args.seconds)
        row.per_request.append((cpu_seconds(process.pid) - before) / count * 1e6)
        before = cpu_seconds(process.pid)
        events, _, p50, p99 = load(tools, "stream", row.port, args.streams, args.seconds)
        row.per_event.append((cpu_seconds(process.pid) - before) / events * 1e6)
        row.p50.append(p50 / 1e3)
        row.p99.append(p99 / 1e3)
    finally:
        for pid in reversed(family(process.pid)):
            try:
                os.kill(pid, 15)
            except ProcessLookupError:
                pass
        process.wait(30)


def rows(args, folder):
    if shutil.which("nginx"):
        conf = os.path.join(folder, "nginx.conf")
        servers = " ".join(f"server 127.0.0.1:{port};" for port in ENGINES)
        with open(conf, "w", encoding="ascii") as out:
            out.write(NGINX.format(folder=folder, servers=servers, port=NGINX_PORT))
        yield Row("nginx", ["nginx", "-c", conf], NGINX_PORT)
    if args.sglang:
        yield Row("sglang-router", [
            args.sglang, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(SGLANG_PORT), "--policy",
            "power_of_two", "--prometheus-port", "28111", "--log-level", "error", "--worker-urls",
            *(f"http://127.0.0.1:{port}" for port in ENGINES)], SGLANG_PORT)
    data_dir = os.path.join(folder, "router")
    os.mkdir(data_dir)
    replicas = tuple(RoutedReplica(f"m-{port}", "node", "127.0.0.1", port, Secret(f"key-{port}"), "llama.cpp", slots=64)
                     for port in ENGINES)
    table = RouteTable("bench", 1, 1, (RoutedModel("m", "llama.cpp", replicas=replicas),),
                       (RoutedKey("k", hashlib.sha256(KEY.encode()).hexdigest()),))
    with open(os.path.join(data_dir, "table.json"), "wb") as out:
        out.write(wire.dumps(wire.ROUTE_TABLE, table))
    yield Row("llmgw", [sys.executable, "-m", "llmgw", "router", "--listen", f"127.0.0.1:{ROUTER_PORT}", "--data-dir", data_dir],
              ROUTER_PORT)


def verdicts(found):
    """Yield (words, whether the bar is met) for each bar that this run can judge."""
    ours = found["llmgw"]
    median = statistics.median
    if "nginx" in found:
        nginx = found["nginx"]
        ratio = median(ours.per_event) / median(nginx.per_event)
        yield f"CPU per event {ratio:.2f} x nginx (bar {EVENT_BAR})", ratio <= EVENT_BAR
        yield f"CPU per request {median(ours.per_request) / median(nginx.per_request):.2f} x nginx (no bar)", True
        late = median(ours.p50) - median(nginx.p50), median(ours.p99) - median(nginx.p99)
        # where the load itself waits for its core, delays say nothing of what they passed through
        judged = median(nginx.p50) <= BUSY_P50_MS
        words = "" if judged else "; not judged, this machine is too busy"
        yield (f"events later than nginx's by {late[0]:+.2f} ms at p50, {late[1]:+.1f} ms at p99 (bars {LATE_P50_BAR:g}, "
               f"{LATE_P99_BAR:g}{words})", not judged or (late[0] <= LATE_P50_BAR and late[1] <= LATE_P99_BAR))
    if "sglang-router" in found:
        ratio = median(ours.per_request) / median(found["sglang-router"].per_request)
        yield f"CPU per request {ratio:.2f} x sglang-router (bar {REQUEST_BAR})", ratio <= REQUEST_BAR


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=4)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sglang", help="a Python that has sglang-router")
    args = parser.parse_args()
    missing = [name for name in ("gcc", "taskset") if not shutil.which(name)]
    if missing or (os.cpu_count() or 1) < 2:
        print(f"not measured: needs two cores{''.join(', and ' + name for name in missing)}")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        tools = os.path.join(folder, "router_tools")
        subprocess.run(["gcc", "-O2", "-w", "-o", tools, os.path.join(HERE, "router_tools.c")], check=True)
        engines = [pinned(1, [tools, "engine", str(port), "64", "20"]) for port in ENGINES]
        try:
            found = {row.name: row for row in rows(args, folder)}
            for _ in range(args.rounds):
                for row in found.values():
                    measure(row, tools, args, folder)
        finally:
            for engine in engines:
                engine.terminate()
                engine.wait(20)
    print(f"{'medians of ' + str(args.rounds):<16}{'us/request':>11}{'us/event':>10}{'late p50':>10}{'p99 ms':>8}")
    for row in found.values():
        print(f"{row.name:<16}{statistics.median(row.per_request):>11.1f}{statistics.median(row.per_event):>10.1f}"
              f"{statistics.median(row.p50):>10.2f}{statistics.median(row.p99):>8.1f}")
    judged = list(verdicts(found))
    for words, met in judged:
        print(f"{'ok  ' if met else 'MISSED'} {words}")
    return 0 if all(met for _, met in judged) else 3


if __name__ == "__main__":
    sys.exit(main())
