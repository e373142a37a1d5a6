"""The three roles of one machine as children of one process: started in order, stopped in order."""
from __future__ import annotations

import json
import os
import re
import threading
import time
from dataclasses import dataclass
from typing import Callable, Dict, List, Optional, Set, Tuple

from llmgw.domain.errors import AlreadyRunning, CommandFailed
from llmgw.system import data_dir, files, ports
from llmgw.system.children import Child, Owner
from llmgw.system.own_program import own_command, own_environment

HOST = "127.0.0.1"
SERVER_PORT, ROUTER_PORT, GATE_PORT = 7800, 7801, 7802
START_SECONDS = 60.0
LEFTOVER_SECONDS = 120.0
# The agent stops its engines and its gate before it goes: that takes longest.
STOP_SECONDS = {"router": 10.0, "agent": 60.0, "server": 10.0}
GRACE_SECONDS = 5            # of requests that run when the end comes
HURRY_SECONDS = 1.0
_TURN = 0.2
_LOG_LINE = re.compile(r"\S+ (ERROR|CRITICAL) [^:]+: (.*)")
_NOT_FOR_CHILDREN = ("LLMGW_SERVER", "LLMGW_TOKEN", "LLMGW_TOKEN_FILE")

Say = Callable[[str], None]


class Stopped(Exception):
    """Somebody asked us to stop while we waited for something else."""


@dataclass(frozen=True)
class Endpoint:
    """Where a role listens, as it wrote it down."""

    url: str
    token_file: str


class Roles:
    """Owns server, agent and router; ``stop`` is set when a person wants the end of all."""

    def __init__(self, folder: str, stop: threading.Event, hurry: threading.Event, say: Say) -> None:
        self._folder, self._stop, self._hurry, self._say = folder, stop, hurry, say
        self._owner = Owner(os.path.join(folder, "logs"))
        self._children: Dict[str, Child] = {}
        self._up: Set[str] = {"agent"}       # it listens nowhere: that it runs must do

    @property
    def pids(self) -> Dict[str, int]:
        return {name: child.pid for name, child in self._children.items()}

    def dir_of(self, role: str) -> str:
        return os.path.join(self._folder, role)

    def start_server(self, config: str) -> Endpoint:
        """Start the control plane and return its endpoint once it answers."""
        return self._start_listening("server", SERVER_PORT, ["--config", config])

    def start_router(self, server: Endpoint) -> Endpoint:
        """Start the router and return its endpoint once it listens."""
        return self._start_listening("router", ROUTER_PORT, self._server_words(server, "router")
                                     + ["--grace-seconds", str(GRACE_SECONDS)])

    def start_agent(self, server: Endpoint, engine_user: str = "") -> None:
        """Start the node's agent; it shows itself in the server's list of nodes."""
        gate = ports.free_port(HOST, GATE_PORT)
        if gate != GATE_PORT:
            self._say(f"port {GATE_PORT} is taken: the gate uses {gate}")
        user = ["--engine-user", engine_user] if engine_user else []
        self._start("agent", self._server_words(server, "node") + ["--gate-port", str(gate), "--owned", *user])

    def check(self) -> None:
        """Raise Stopped when the end is wanted, and the failure of the first child that ended."""
        if self._stop.is_set():
            raise Stopped
        for child in self._children.values():
            if child.code is not None:
                raise failure(child, child.name in self._up)

    def pause(self, seconds: float) -> None:
        """Wait, but wake at once for the end or for a child that ended."""
        until = time.monotonic() + seconds
        while True:
            self.check()
            left = until - time.monotonic()
            if left <= 0:
                return
            self._stop.wait(min(_TURN, left))

    def wait_for_leftovers(self) -> None:
        """Wait until roles of a killed run, which are stopping by themselves, have let go of their folders."""
        until, told = time.monotonic() + LEFTOVER_SECONDS, False
        for role in ("server", "agent", "router"):
            while True:
                try:
                    files.FolderLock(self.dir_of(role), role).release()
                    break
                except AlreadyRunning:
                    if time.monotonic() > until:
                        raise
                    if not told:
                        self._say(f"the {role} of the run before is still stopping")
                        told = True
                    self.pause(_TURN)

    def run(self, name: str, words: List[str]) -> None:
        """Run one of our own commands to its end, its words going to our stderr; its failure is ours."""
        child = self._owner.start_in_sight([*own_command(), *words], self._environment(), name)
        try:
            while not child.wait(_TURN):
                self.check()
        finally:
            if child.code is None:
                child.kill()
        if child.code:
            raise SystemExit(child.code)         # it has said itself what was wrong

    def end_all(self) -> None:
        """Stop router, agent, server in that order, each with a deadline; kill what stays."""
        for name in ("router", "agent", "server"):
            child = self._children.get(name)
            if child is None:
                continue
            child.ask_to_stop()
            until = time.monotonic() + STOP_SECONDS[name]
            while not child.wait(_TURN) and time.monotonic() < until:
                if self._hurry.is_set():
                    until = min(until, time.monotonic() + HURRY_SECONDS)
            if child.code is None:
                self._say(f"the {name} did not stop in time: killed")
            child.kill()
        self._owner.close()

    def _server_words(self, server: Endpoint, role: str) -> List[str]:
        return ["--server", server.url, "--token-file", data_dir.token_file(self.dir_of("server"), role)]

    def _environment(self) -> Dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_CHILDREN}
        return {**kept, **own_environment()}

    def _start(self, role: str, words: List[str]) -> Child:
        argv = [*own_command(), role, *words, "--data-dir", files.make_dir(self.dir_of(role))]
        self._children[role] = self._owner.start(role, argv, self._environment())
        return self._children[role]

    def _start_listening(self, role: str, port: int, words: List[str]) -> Endpoint:
        wanted = port if ports.is_free(HOST, port) else 0
        written = data_dir.endpoint_file(self.dir_of(role))
        files.remove(written)
        self._start(role, [*words, "--listen", f"{HOST}:{wanted}"])
        until = time.monotonic() + START_SECONDS
        endpoint = _read(written)
        while endpoint is None:
            if time.monotonic() > until:
                raise CommandFailed(f"the {role} does not listen after {START_SECONDS:.0f} seconds",
                                    hint=f"see {self._children[role].log_path}")
            self.pause(_TURN)
            endpoint = _read(written)
        self._up.add(role)
        if not wanted:
            self._say(f"port {port} is taken: the {role} uses {endpoint.url}")
        return endpoint


def _read(path: str) -> Optional[Endpoint]:
    try:
        known = json.loads(files.read_bytes(path, 1 << 16) or b"")
        return Endpoint(str(known["url"]), str(known.get("admin_token_file", "")))
    except (ValueError, KeyError, TypeError):
        return None


def failure(child: Child, was_up: bool) -> CommandFailed:
    """Return what a child that ended had to say: its own last error line, and its exit code."""
    said, hint = last_words(child.last_lines())
    code = child.code or 0
    why = said or (f"signal {-code}" if code < 0 else f"exit code {code}")
    error = CommandFailed(f"the {child.name} {'ended' if was_up else 'did not start'}: {why}",
                          hint=hint or f"see {child.log_path}")
    error.exit_code = code if code in (2, 75, 78) else 1
    return error


def last_words(lines: List[str]) -> Tuple[str, str]:
    """Return (what, what to try) of the last complaint in a role's log; empty texts when there is none."""
    for at in range(len(lines) - 1, -1, -1):
        following = lines[at + 1] if at + 1 < len(lines) else ""
        if lines[at].startswith("llmgw: "):
            return lines[at][len("llmgw: "):], following[len("  try: "):] if following.startswith("  try: ") else ""
        logged = _LOG_LINE.match(lines[at])
        if logged:
            return logged.group(2), ""
        if re.match(r"[\w.]*(Error|Exception|Exit)\b.*: ", lines[at]):      # a traceback: a bug, but say which
            return lines[at], ""
    return "", ""
