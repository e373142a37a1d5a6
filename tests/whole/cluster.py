"""A cluster of the built llmgw.pyz: server, router and agents as processes of their own on loopback."""
from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
import urllib.request

MODEL = "gemma-3-270m"
SERVER_YAML = f"""\
cluster: test
listen: 127.0.0.1:0
engines:
  llama.cpp: {{version: b10991}}
models:
  - name: {MODEL}
    aliases: [small]
    engine: llama.cpp
    weights: mirror:{MODEL}
    context_length: 1024
    parallel: 2
    chat_template: qa.jinja
"""


def until(what, check, seconds=60.0):
    """Return the first true answer of ``check``; fail with ``what`` after ``seconds``."""
    deadline = time.monotonic() + seconds
    while True:
        answer = check()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {seconds:g} seconds")
        time.sleep(0.05)


def free_block(size):
    """Return the first of ``size`` loopback ports in a row that are free now."""
    for first in range(21000 + os.getpid() % 500 * 16, 60000, size):
        with contextlib.ExitStack() as held:
            try:
                for port in range(first, first + size):
                    probe = held.enter_context(socket.socket())
                    probe.bind(("127.0.0.1", port))
                return first
            except OSError:
                continue
    raise AssertionError("no free block of ports")


def processes_of(folder):
    """Return {pid: command line} of everything whose words or environment name ``folder``; not ourselves."""
    found = {}
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes()
            if not words:
                continue                            # a zombie: gone, but for its parent
            if str(folder).encode() in words + b"\0" + (entry / "environ").read_bytes():
                found[int(entry.name)] = words.replace(b"\0", b" ").decode("utf-8", "replace")
    return found


class Cluster:
    """Start the parts one by one; ``close`` ends all of them and whatever they left."""

    def __init__(self, pyz, folder, template):
        self.pyz, self.folder, self.children = str(pyz), pathlib.Path(folder), {}
        self.config = self.folder / "server.yaml"
        self.config.write_text(SERVER_YAML, encoding="utf-8")
        (self.folder / "qa.jinja").write_text(pathlib.Path(template).read_text(encoding="utf-8"), encoding="utf-8")
        self.env = {"PATH": os.environ["PATH"], "HOME": str(self.folder), "LANG": "C.UTF-8"}
        self.env.update({name: os.environ[name] for name in ("SHIV_ROOT", "LLMGW_ENGINE_USER") if name in os.environ})

    def start(self, name, *words):
        log = open(self.log(name), "ab")
        with log:
            self.children[name] = subprocess.Popen(
                [sys.executable, "-I", self.pyz, *map(str, words)], env=self.env, cwd=str(self.folder),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        return self.children[name]

    def log(self, name):
        return self.folder / f"{name}.log"

    def start_server(self):
        self.start("server", "server", "--config", self.config, "--data-dir", self.dir("server"))
        self.server = self.endpoint("server")

    def start_agent(self, name="node-1"):
        ports = free_block(16)
        self.start(name, "agent", "--server", self.server["url"], "--token-file", self.token("node"), "--node", name,
                   "--data-dir", self.dir(name), "--gate-port", ports, "--engine-ports", ports + 1, "--owned")

    def start_router(self):
        self.start("router", "router", "--server", self.server["url"], "--token-file", self.token("router"),
                   "--listen", "127.0.0.1:0", "--data-dir", self.dir("router"))
        self.router = self.endpoint("router")

    def dir(self, name):
        return self.folder / name

    def token(self, role):
        return self.dir("server") / "tokens" / role

    def endpoint(self, name):
        """Return what a role wrote down when it listened; its log when it ended instead."""
        path, child = self.dir(name) / "endpoint.json", self.children[name]

        def written():
            assert child.poll() is None, f"{name} ended with {child.poll()}:\n{self.log(name).read_text()}"
            with contextlib.suppress(OSError, ValueError):
                known = json.loads(path.read_text(encoding="utf-8"))
                return known if known["pid"] == child.pid else None
        return until(f"{name} listens", written)

    def ctl(self, *words, ok=True):
        """Run a ctl command; return what it printed on stdout."""
        done = subprocess.run([sys.executable, "-I", self.pyz, "ctl", *map(str, words), "--server", self.server["url"],
                               "--token-file", str(self.token("admin"))], env=self.env, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=300, check=False)
        if words[1:2] != ("create",):               # what makes a secret prints it; the others are searched for it
            with open(self.folder / "ctl.out", "a", encoding="utf-8") as log:
                log.write(done.stdout + done.stderr)
        assert not ok or done.returncode == 0, f"ctl {' '.join(map(str, words))}: {done.stderr}"
        return done.stdout if ok else done

    def items(self, *words):
        """Return what a reading ctl command shows, as records."""
        data = json.loads(self.ctl(*words, "--json"))
        return data["items"] if isinstance(data, dict) and "items" in data else data

    def wait_ready(self, name=MODEL, seconds=180.0):
        """Wait until the model has a ready replica; tell what ctl says when it does not."""
        def ready():
            self.check()
            return any(model["name"] == name and model["ready"] for model in self.items("models"))
        try:
            until(f"{name} is ready", ready, seconds)
        except AssertionError as error:
            shown = "\n".join(self.ctl(word) for word in ("nodes", "engines", "models", "replicas"))
            raise AssertionError(f"{error}\n{shown}\n{self.logs()}") from None

    def answer(self):
        """Ask the model through the router with ``key``, which the test has made; return the answer's text."""
        request = urllib.request.Request(
            self.router["url"] + "/v1/completions", headers={
                "Authorization": f"Bearer {self.key}", "Content-Type": "application/json"},
            data=json.dumps({"model": MODEL, "prompt": "Question: What is the capital of France?\nAnswer:",
                             "max_tokens": 8, "temperature": 0, "stop": ["\n"]}).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())["choices"][0]["text"]

    def check(self):
        """Fail with its log when a child has ended."""
        for name, child in self.children.items():
            assert child.poll() is None, f"{name} ended with {child.poll()}:\n{self.log(name).read_text()[-4000:]}"

    def logs(self):
        return "\n".join(f"== {name}\n{self.log(name).read_text()[-3000:]}" for name in self.children)

    def stop(self, name, seconds=60.0):
        """Ask a child to stop as systemd would; return its exit code."""
        child = self.children.pop(name)
        child.send_signal(signal.SIGTERM)
        return child.wait(timeout=seconds)

    def left(self):
        """Return the processes that have to do with this cluster."""
        return processes_of(self.folder)

    def close(self):
        (self.folder / "words.argv").write_text("\n".join(self.left().values()), encoding="utf-8")   # searched for secrets
        children = list(self.children.values())
        for name in list(self.children):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.stop(name, 20.0)
        for pid in self.left():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for child in children:                      # one that was too slow to stop is waited for all the same
            child.kill()
            child.wait(30)
