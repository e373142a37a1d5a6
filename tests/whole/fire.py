"""Two nodes with two replicas each of two models, whose parts can be killed: what the tests under fire have in common."""
from __future__ import annotations

import contextlib
import itertools
import json
import os
import pathlib
import signal
import time
import urllib.request

import openai

from tests.whole.asking import TIMEOUT, Asked
from tests.whole.cluster import MODEL, Cluster, free_block, until

NODES = ("node-1", "node-2")
SLEEPER = "sleeper"               # a model of its own for what hangs
TWO_HEARTBEATS = 10.0
ENTRY = """\
  - name: {name}
    engine: llama.cpp
    weights: mirror:{weights}
    replicas: {replicas}
    context_length: 1024
    parallel: 2
    gpus: 0
    chat_template: qa.jinja
    args: [{args}]
"""


def entry(name=MODEL, replicas=2, args=("--threads", "1")):
    """Return a model of server.yaml; every one has the weights of gemma."""
    return ENTRY.format(name=name, weights=MODEL, replicas=replicas, args=", ".join(f'"{arg}"' for arg in args))


def config(*entries, version, listen):
    return (f"cluster: fire\nlisten: {listen}\nengines:\n  llama.cpp: {{version: {version}}}\n"
            + ("models:\n" + "".join(entries) if entries else "models: []\n"))


class Fire(Cluster):
    """A cluster whose parts come back at the same ports; its agents leave engines and gates running."""

    def __init__(self, pyz, folder, template, archive, gemma):
        super().__init__(pyz, folder, template)
        self.archive, self._gemma = archive, gemma
        first = free_block(512)
        self._ports = {name: first + at * 128 for at, name in enumerate((*NODES, "server", "router"))}
        self.listen = f"127.0.0.1:{self._ports['server']}"
        self.key = ""
        self.models, self.version, self.ended = {MODEL: entry(), SLEEPER: entry(SLEEPER)}, "b10991", False
        self._homes = {}            # {replica: a session that has its home there}
        self.rate = 20.0            # tokens per second of the last stream
        self.held = []              # requests that are known to hang

    # Starting and killing.

    def set_up(self):
        """Start everything and wait until every replica is routed."""
        self.edit({})
        self.start_server()
        for name in NODES:
            self.start_agent(name)
        self.start_router()
        self.ctl("mirror", "import-engine", self.archive.path, "--sha256", self.archive.sha256)
        self.ctl("mirror", "import", self._gemma, "--name", MODEL)
        self.key = json.loads(self.ctl("keys", "create", "fire", "--json"))["secret"]
        self.calm(SLEEPER)
        self.calm()

    def edit(self, models, version=None):
        """Put another server.yaml in place, as an editor does: with these models changed, None is one removed."""
        self.models = {name: text for name, text in {**self.models, **models}.items() if text}
        self.version = version or self.version
        scratch = self.config.with_suffix(".new")
        scratch.write_text(config(*self.models.values(), version=self.version, listen=self.listen), encoding="utf-8")
        os.replace(scratch, self.config)

    def begin_server(self):
        """Start the server without waiting for it."""
        self.start("server", "server", "--config", self.config, "--data-dir", self.dir("server"))

    def start_agent(self, name, owned=False):
        ports = self._ports[name]
        self.start(name, "agent", "--server", f"http://{self.listen}", "--token-file", self.token("node"), "--node", name,
                   "--data-dir", self.dir(name), "--gate-port", ports, "--engine-ports", ports + 1,
                   *(["--owned"] if owned else []))

    def start_router(self):
        self.start("router", "router", "--server", f"http://{self.listen}", "--token-file", self.token("router"),
                   "--listen", f"127.0.0.1:{self._ports['router']}", "--data-dir", self.dir("router"))
        self.router = self.endpoint("router")

    def kill9(self, name):
        """kill -9 a role; its engines and gate are no children that would go with it."""
        child = self.children.pop(name)
        child.kill()
        child.wait(30)

    # Looking.

    def api(self, path):
        """Return what the control plane says to an admin."""
        asked = urllib.request.Request(f"http://{self.listen}/v1/{path}", headers={
            "Authorization": f"Bearer {self.token('admin').read_text().strip()}"})
        with urllib.request.urlopen(asked, timeout=30) as answer:
            return json.loads(answer.read())

    def rows(self, model=MODEL):
        """Return the replicas of a model; those on their way out too."""
        return [item for item in self.api("replicas")["items"] if item["model"] == model]

    def on(self, node, model=MODEL):
        """Return the one replica of a model on a node."""
        row, = [row for row in self.rows(model) if row["shards"][0]["node"] == node]
        return row

    def names(self, model=MODEL):
        return {row["id"] for row in self.rows(model)}

    def on_nodes(self):
        """Return the names of the nodes where engines run, by the engines' own environments."""
        return {pathlib.Path(environment["LLMGW_DATA_DIR_MARK"]).name for _, _, environment in _processes()
                if environment.get("LLMGW_DATA_DIR_MARK", "").startswith(str(self.folder))}

    def engines(self, model=None):
        """Return {replica: pid} of the engines that run, by their own environments."""
        found = {}
        for pid, words, environment in _processes():
            if environment.get("LLMGW_DATA_DIR_MARK", "").startswith(str(self.folder)) and (
                    model is None or f"\0--alias\0{model}\0" in words):
                found[environment["LLMGW_SHARD"].rsplit(".", 2)[0]] = pid
        return found

    def gates(self):
        """Return {node: pid}."""
        return {pathlib.Path(environment["LLMGW_GATE"]).name: pid for pid, _, environment in _processes()
                if environment.get("LLMGW_GATE", "").startswith(str(self.folder) + "/")}

    def metrics(self):
        """Return {sample without its value: value} of the router."""
        with urllib.request.urlopen(self.router["url"] + "/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}

    def in_flight(self, model=MODEL):
        """Return {replica: requests} of the replicas that the router knows."""
        mark = f'llmgw_router_inflight{{model="{model}",replica="'
        return {name[len(mark):].rstrip('"}'): int(value) for name, value in self.metrics().items()
                if name.startswith(mark)}

    def counted(self):
        return Counted(self)

    def running(self, model=MODEL):
        """Return {replica: requests} as the engines count them; what is unknown is left out."""
        mark = f'llmgw_router_engine_running{{model="{model}",replica="'
        return {name[len(mark):].rstrip('"}'): int(value) for name, value in self.metrics().items()
                if name.startswith(mark)}

    def serves(self, replica):
        """Whether the engine of this replica answers through the gate of its node."""
        with contextlib.suppress(OSError, ValueError):
            key, = self.folder.glob(f"*/shards/{replica}.0/key")
            asked = urllib.request.Request(f"http://127.0.0.1:{self._ports[key.parts[-4]]}/v1/models", headers={
                "Authorization": f"Bearer {key.read_text().strip()}"})
            with urllib.request.urlopen(asked, timeout=30) as answer:
                return answer.status == 200

    def calm(self, model=MODEL, replicas=2, seconds=240.0):
        """Wait until all wanted replicas are ready and routed, and nothing is in flight."""
        def is_calm():
            self.check()
            rows = self.rows(model)
            if len(rows) != replicas or any(row["state"] != "ready" for row in rows):
                return False
            counts = self.in_flight(model)
            return set(counts) == {row["id"] for row in rows} and not any(counts.values())
        self.until(f"{model} is calm", is_calm, seconds)
        self.until("no other request is active", lambda: self.metrics()["llmgw_router_active_requests"]
                   == sum(not asked.over.is_set() for asked in self.held))

    def right_within_two_heartbeats(self):
        """Wait for a server that was just started; it must soon know of every node and replica that it is well."""
        self.endpoint("server")
        back = time.monotonic()
        self.until("all is right", lambda: all(
            {item["state"] for item in items} == {"ready"} and len(items) == 2 for items in (
                self.api("nodes")["items"], self.rows())))
        assert time.monotonic() - back < TWO_HEARTBEATS

    def until(self, what, check, seconds=120.0):
        """Wait for something that the cluster does; when it does not, tell all that it says."""
        try:
            return until(what, check, seconds)
        except AssertionError as error:
            with contextlib.suppress(AssertionError):     # there may be no server to ask
                error = "\n".join([str(error)] + [self.ctl(word) for word in ("engines", "models", "replicas", "events")])
            raise AssertionError(f"{error}\n{self.logs()}") from None

    # Asking.

    def client(self):
        return openai.OpenAI(base_url=self.router["url"] + "/v1", api_key=self.key, max_retries=0, timeout=TIMEOUT)

    def ask(self, model=MODEL, session=None, tokens=0):
        """Start one plain request, short unless told how many tokens; return it."""
        more = {"max_tokens": tokens, "extra_body": {"ignore_eos": True}} if tokens else {"max_tokens": 8, "stop": ["\n"]}
        return Asked(self, False, model, session, **more)

    def stream(self, model=MODEL, session=None, tokens=600):
        """Start one long stream; return it."""
        return Asked(self, True, model, session, max_tokens=tokens, extra_body={"ignore_eos": True})

    def hold(self, replica, *, stream, model=MODEL, seconds=0, tokens=0):
        """Start a request on this replica, of a model without other load, and wait until it runs there; return it.

        It lasts about so many ``seconds``. Where a request goes is the router's secret: streams are tried, and left,
        until a session has its home here.
        """
        if not stream and replica not in self._homes:
            self.home(replica, model)
        sessions = self._sessions(replica)

        def held():
            session, before = next(sessions), self.in_flight(model)
            size = min(600, max(40, int(seconds * self.rate))) if seconds else tokens
            asked = self.stream(model, session, size or 600) if stream else self.ask(model, session, size)
            if self._where(asked, before, model) != replica:
                return self._leave(asked, before, model)
            self._homes[replica] = session
            if stream:
                self.until("the stream has begun", lambda: asked.pieces > 3 or asked.over.is_set())
            return asked
        return self.until(f"a request runs on {replica}", held)

    def home(self, replica, model=MODEL):
        """Return a session whose requests go to this replica now."""
        before = self.in_flight(model)
        self._leave(self.hold(replica, stream=True, model=model), before, model)
        return self._homes[replica]

    def _leave(self, asked, before, model):
        asked.leave()
        self.until("the router knows that the client has left",
                   lambda: sum(self.in_flight(model).values()) <= sum(before.values()))

    def _sessions(self, replica):
        return itertools.chain([self._homes[replica]] if replica in self._homes else [], map(str, itertools.count()))

    def _where(self, asked, before, model):
        """Return the replica that has one more request than before, None when the request was too quick for us."""
        def grown():
            now = self.in_flight(model)
            return [name for name in now if now[name] > before.get(name, 0)] or (asked.over.is_set() and [None])
        return self.until("a replica has the request", grown)[0]

    def end(self):
        """Stop everything as an operator would; return what is left of it, which should be nothing."""
        for name in ("router", *NODES):
            self._stop_well(name)
        assert self.engines() and set(self.gates()) == set(NODES), "an agent takes nothing along unless it is told to"
        for name in NODES:
            said = len(self.log(name).read_text())
            self.start_agent(name, owned=True)
            self.until(f"{name} has adopted its gate",
                       lambda name=name, said=said: "gate adopted" in self.log(name).read_text()[said:])
        for name in (*NODES, "server"):
            self._stop_well(name)
        self.ended = True
        return self.left()

    def _stop_well(self, name):
        code = self.stop(name, 120.0)
        assert code == 0, f"{name} ended with {code}:\n{self.log(name).read_text()[-3000:]}"


class Counted:
    """Looks at the router again and again; ``fewest`` is the least number of replicas that it could ask."""

    def __init__(self, fire):
        self._fire, self.fewest = fire, 99

    def rolled(self, old, count=2):
        """Whether ``count`` replicas that are none of ``old`` are all there is."""
        self.fewest = min(self.fewest, len(self._fire.in_flight()))
        with contextlib.suppress(OSError):        # the server may be away
            rows = self._fire.rows()
            return (len(rows) == count and not {row["id"] for row in rows} & old
                    and all(row["state"] == "ready" for row in rows))


class Hang:
    """One of two engines is stopped while each has a stream and a request without a byte yet."""

    def __init__(self, fire):
        self.replica = fire.on("node-1", SLEEPER)["id"]
        self.pid = fire.engines(SLEEPER)[self.replica]
        other = fire.on("node-2", SLEEPER)["id"]
        self.streams = [fire.hold(self.replica, stream=True, model=SLEEPER, seconds=20),
                        fire.hold(other, stream=True, model=SLEEPER, seconds=5)]
        self.plain = [fire.ask(SLEEPER, tokens=40) for _ in range(2)]      # each of the two has one slot left
        fire.held += self.streams + self.plain
        fire.until("each has two requests", lambda: set(fire.in_flight(SLEEPER).values()) == {2})
        os.kill(self.pid, signal.SIGSTOP)
        self.stopped_at, self.stopped_wall = time.monotonic(), time.time()
        fire.until("those of the other engine have ended", lambda: sum(asked.over.is_set() for asked in fire.held) == 2)

    def told(self, fire, reason):
        """Return the event in which the node tells this of the replica, None before that."""
        return next((event for event in fire.api("events")["items"] if event["at"] > self.stopped_wall
                     and (event["subject"], event["reason"]) == (f"replica/{self.replica}", reason)), None)


def _processes():
    """Give (pid, words, environment) of every process that can be read."""
    for folder in pathlib.Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                words = (folder / "cmdline").read_bytes().decode("utf-8", "replace")
                pairs = (folder / "environ").read_bytes().decode("utf-8", "replace").split("\0")
                if words:
                    yield int(folder.name), words, dict(pair.split("=", 1) for pair in pairs if "=" in pair)
