"""``up``: one machine as a whole cluster, in the foreground, until Ctrl-C."""
from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import threading
import time
from typing import Any, Dict, List, Optional, Tuple

from llmgw import __version__
from llmgw.api import paths, wire
from llmgw.api.client import ControlClient
from llmgw.domain.engine import EnginePhase
from llmgw.domain.errors import ApiError, CommandFailed, LlmgwError, TryAgain, Unreachable
from llmgw.domain.model import Task
from llmgw.domain.secret import Secret
from llmgw.domain.view import ModelView, NodeView
from llmgw.system import data_dir, files
from llmgw.system.http_client import HttpClient
from llmgw.up_children import Endpoint, Roles, Stopped
from llmgw.up_model import Wanted, choose
from llmgw.up_states import Told
from llmgw.up_user import engine_user

LOOK_SECONDS = 1.0              # between two looks at the cluster
PATIENCE_SECONDS = 15.0         # with a release page that does not answer
FIRST_ANSWER_SECONDS = 120.0    # of a model that has just become ready
_ASKS: Dict[str, Tuple[str, Dict[str, Any]]] = {
         Task.CHAT.value: ("/v1/chat/completions", {"messages": [
            {"role": "user", "content": "What is the capital of France?"}], "max_tokens": 32, "temperature": 0}),
         Task.EMBED.value: ("/v1/embeddings", {"input": "What is the capital of France?"})}
MARKERS = ("LLMGW_DATA_DIR_MARK", "LLMGW_GATE")   # in the environment of all that an agent starts
LEFTOVER_GRACE_SECONDS = 5.0


def run(argv: List[str], debug: bool = False) -> int:
    """Serve until told to stop; 0 after an orderly stop."""
    options = _parser().parse_args(argv)
    wanted = choose(options)
    folder = files.make_dir(data_dir.role_dir("up", options.data_dir))
    lock = files.FolderLock(folder, "llmgw up")
    stop, hurry = threading.Event(), threading.Event()
    _listen_to_signals(stop, hurry)
    roles = Roles(folder, stop, hurry, say)
    try:
        _Up(options, wanted, folder, roles).serve()
    except Stopped:
        say("stopping (Ctrl-C again: at once)")
    except LlmgwError:
        if not stop.is_set():
            raise
    finally:
        roles.end_all()
        _end_leftovers(roles)
        lock.release()
    say("stopped")
    return 0


def say(text: str) -> None:
    """Tell a person how it goes, on stderr; a terminal that is gone stops nothing."""
    with contextlib.suppress(OSError, ValueError):
        shown = "".join(character if character.isprintable() else " " for character in text)
        sys.stderr.write(shown.encode("utf-8", "replace").decode(sys.stderr.encoding or "ascii", "replace") + "\n")
        sys.stderr.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="llmgw.pyz up", description=(
        "Serve a model from this machine: control plane, node and router as one process tree, until Ctrl-C."))
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--model", metavar="FILE|hf:ORG/REPO[:FILE]", default="",
                      help="a GGUF file, or where on Hugging Face one is; the next `up` serves it too")
    what.add_argument("--no-model", action="store_true", help="start without any model")
    what.add_argument("--config", metavar="FILE", default="", help="a server.yaml of your own")
    parser.add_argument("--name", default="", help="what clients call the model (default: from its file)")
    parser.add_argument("--context-length", metavar="TOKENS", type=int, help="of one request")
    parser.add_argument("--chat-template", metavar="FILE", default="", help="Jinja template, for a model without one")
    parser.add_argument("--data-dir", metavar="FOLDER", default="", help="default: %s" % data_dir.role_dir("up"))
    parser.add_argument("--json-ready", metavar="FILE", default="",
                        help="write url, key, model and pids there when ready")
    return parser


def _listen_to_signals(stop: threading.Event, hurry: threading.Event) -> None:
    def on_signal(number: int, frame: object) -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN or number != signal.SIGHUP:   # nohup stays nohup
            signal.signal(number, on_signal)


def _end_leftovers(roles: Roles) -> None:
    """Kill engines and a gate that a killed agent could not end."""
    from llmgw.system import spawn
    for name in MARKERS:
        marker = (name, roles.dir_of("agent"))
        if spawn.tree(marker):
            say("ending what the agent left behind")
            for pid in spawn.stop(marker, grace_seconds=LEFTOVER_GRACE_SECONDS):
                say(f"process {pid} cannot be ended: it hangs in the kernel")


class _Up:
    """One run: start, get ready, watch."""

    def __init__(self, options: argparse.Namespace, wanted: Wanted, folder: str, roles: Roles) -> None:
        self._options, self._wanted, self._folder, self._roles = options, wanted, folder, roles
        self._told = Told()
        self._announced, self._answered, self._problem = "", "", ""
        self._resolving_since, self._advised = 0.0, False
        self._trial: Optional[threading.Thread] = None
        self._client: ControlClient
        self._server: Endpoint
        self._router: Endpoint
        self._key: Secret

    def serve(self) -> None:
        """Start everything, announce it when it answers, and go on until stopped."""
        say(f"llmgw {__version__}, data in {self._folder}")
        self._roles.wait_for_leftovers()
        config = self._wanted.write_config(self._folder)
        self._server = self._roles.start_server(config)
        self._client = self._connect()
        self._key = self._user_key()
        self._roles.start_agent(self._server, engine_user(self._folder, say))
        self._router = self._roles.start_router(self._server)
        self._bring_model()
        if self._wanted.none:
            self._announce_empty()
        while True:
            self._look()
            self._roles.pause(LOOK_SECONDS)

    def _connect(self) -> ControlClient:
        token = files.read_bytes(self._server.token_file, 1 << 16)
        if token is None:
            raise CommandFailed(f"{self._server.token_file}: the server made no admin token")
        return ControlClient([self._server.url], Secret(token.decode().strip()))

    def _user_key(self) -> Secret:
        """Return the key of this machine's user: made once, kept 0600, made anew when it was revoked."""
        path = os.path.join(self._folder, "key.json")
        with contextlib.suppress(ValueError, KeyError, TypeError):
            known = json.loads(files.read_bytes(path, 1 << 16) or b"")
            valid = {key.id for key in self._client.items(paths.KEYS, wire.KEY_VIEW) if not key.revoked_at}
            if known["id"] in valid:
                return Secret(str(known["key"]))
        made = wire.KEY_VIEW.decode(self._client.json("POST", paths.KEYS, {"name": "up", "models": []}), "key")
        files.write_json(path, {"id": made.id, "key": made.secret})
        return Secret(made.secret)

    def _bring_model(self) -> None:
        """Import the file that was named, unless the mirror has just that, and put it into server.yaml."""
        if not self._wanted.path:
            return
        if not self._wanted.is_imported(self._folder, self._client):
            self._roles.run("the import", [
                "ctl", "mirror", "import", *self._wanted.files(), "--name", self._wanted.name,
                "--server", self._server.url, "--token-file", self._server.token_file])
            self._wanted.note_imported(self._folder, self._client)
        self._wanted.write_config(self._folder, with_model=True)

    def _look(self) -> None:
        """Say what changed; announce the first model that is ready and answers."""
        try:
            data = self._client.json("GET", paths.MODELS)
            models = [wire.MODEL_VIEW.decode(item, "model") for item in data["items"]]
            nodes = self._client.items(paths.NODES, wire.NODE_VIEW)
            news = self._told.news(nodes, models, self._client.items(paths.REPLICAS, wire.REPLICA_VIEW))
        except (Unreachable, ApiError, TryAgain):
            return self._roles.check()       # a server that died is told of there
        for sentence in news:
            say(sentence)
        problem = str(data.get("config_problem") or "")
        if problem != self._problem:
            say(f"not used, what ran before goes on: {problem}" if problem else "server.yaml is in order again")
            self._problem = problem
        self._advise(nodes)
        ready = [model for model in models if model.ready]
        if ready and self._announced in ("", "-"):
            self._try(ready[0])

    def _advise(self, nodes: List[NodeView]) -> None:
        """Tell once, when no list of the engine's files comes, how it gets here without the internet."""
        waits = any(engine.phase is EnginePhase.RESOLVING for node in nodes for engine in node.engines)
        self._resolving_since = (self._resolving_since or time.monotonic()) if waits else 0.0
        if waits and not self._advised and time.monotonic() - self._resolving_since > PATIENCE_SECONDS:
            self._advised = True
            say("without the internet, bring the engine's archive: "
                f"llmgw.pyz ctl mirror import-engine ARCHIVE --sha256 HEX{self._ctl_words()}")

    def _try(self, model: ModelView) -> None:
        """Ask what the printed line asks, beside the main thread, which must hear Ctrl-C; announce what answers."""
        if self._trial is not None and not self._trial.is_alive():
            self._trial = None
            if self._answered == model.name:
                return self._announce(model)
        if self._trial is None:
            self._trial = threading.Thread(target=self._ask_once, args=(model,), daemon=True)
            self._trial.start()

    def _ask_once(self, model: ModelView) -> None:
        path, body = self._ask(model)
        try:
            client = HttpClient(self._router.url)
            answer = client.request(
                "POST", path, body=json.dumps(body).encode(), timeout=FIRST_ANSWER_SECONDS,
                headers={"Authorization": f"Bearer {self._key.reveal()}", "Content-Type": "application/json"})
            client.close()
        except Unreachable:
            return
        if answer.status == 200:
            self._answered = model.name

    def _ask(self, model: ModelView) -> Any:
        path, body = _ASKS.get(model.task, _ASKS[Task.CHAT.value])
        extra: Dict[str, Any] = {}
        if model.task == Task.CHAT.value and self._wanted.has_template(model.name, self._folder):
            extra["stop"] = ["\n"]           # a base model goes on with the next question
        return path, {"model": model.name, **body, **extra}

    def _announce(self, model: ModelView) -> None:
        path, body = self._ask(model)
        url, key = self._router.url, self._key.reveal()
        _print(f"\n  URL    {url}/v1\n  key    {key}\n  model  {model.name}\n\n"
               f"curl -s {url}{path} -H 'Authorization: Bearer {key}' "
               f"-H 'Content-Type: application/json' -d '{json.dumps(body)}'\n")
        self._ready(model.name)

    def _announce_empty(self) -> None:
        _print(f"\n  URL    {self._router.url}/v1\n  key    {self._key.reveal()}\n")
        say(f"no model yet: name one under models: in {self._wanted.config_path(self._folder)}")
        self._ready("")

    def _ready(self, model: str) -> None:
        self._announced = model or "-"
        say(f"ready; Ctrl-C stops all of it. Look around: llmgw.pyz ctl nodes{self._ctl_words()}")
        if self._options.json_ready:
            files.write_json(self._options.json_ready, {
                "url": self._router.url, "key": self._key.reveal(), "model": model, "server": self._server.url,
                "admin_token_file": self._server.token_file, "pids": {**self._roles.pids, "up": os.getpid()}})

    def _ctl_words(self) -> str:
        """Return what ctl must be told: nothing when it finds this server by itself."""
        if self._folder == data_dir.role_dir("up") and not os.path.exists(
                data_dir.endpoint_file(data_dir.role_dir("server"))):
            return ""
        return f" --server {self._server.url} --token-file {self._server.token_file}"


def _print(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(text, flush=True)
