"""Keeps the gate running and its table in step. The gate outlives this agent, as the engines do."""
from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from typing import Any, Dict, FrozenSet, Optional

from llmgw.agent.board import Board, Door
from llmgw.agent.layout import Layout
from llmgw.api import joining, wire
from llmgw.api.joining import Credential
from llmgw.decide import restarts
from llmgw.domain.command import Command
from llmgw.domain.errors import LlmgwError
from llmgw.domain.gate import GateEntry, GateTable
from llmgw.domain.replica import ShardState
from llmgw.parse.address import joined
from llmgw.system import files, log_tail, spawn, tls
from llmgw.system.http_client import HttpClient
from llmgw.system.own_program import own_command, own_environment
from llmgw.system.ports import answers, is_free

log = logging.getLogger(__name__)

MARKER = "LLMGW_GATE"             # =the agent's data folder
EVERY_SECONDS = 1.0
PATIENCE_SECONDS = 10.0           # unanswered so long: it hangs, and is started again
READ_SECONDS = 3.0                # within which a gate starts, or reads a new table
TRIES = 20                        # ports after the configured one
STOP_GRACE_SECONDS = 5.0
_OPEN = (ShardState.READY, ShardState.UNREADY)     # running, and proven once


class GateKeeper:
    """One thread; the only writer of ``gate/``."""

    def __init__(self, board: Board, layout: Layout, host: str, port: int) -> None:
        self._board, self._layout = board, layout
        self._host, self._wanted_port = host, port
        self._port = 0
        self._marker: spawn.Marker = (MARKER, layout.root)
        self._identity: Optional[spawn.Identity] = None
        self._written = b""
        self._answered_at = time.monotonic()
        self._failures, self._not_before = 0, 0.0
        self._pause = threading.Event()
        self.poke = threading.Event()
        self._held: Optional[Credential] = None      # of a node that has joined: its gate speaks TLS
        self._certificate = ""
        self._context: Any = None

    def recall(self) -> None:
        """Find the gate of an earlier agent; it keeps its port, and goes on relaying."""
        files.make_dir(self._layout.gate)
        self._identity = spawn.find(self._marker)
        try:
            data = files.read_bytes(self._layout.gate_table)
            table = wire.loads(wire.GATE_TABLE, data, self._layout.gate_table) if data else None
        except LlmgwError:
            table = None
        if self._identity is not None and table is not None:
            self._port = table.port
            self._written = data or b""
            self._board.put_gate_port(self._port)
            self._board.put_open(self._doors(table))
            log.info("gate adopted pid=%d port=%d", self._identity.pid, self._port)

    def take(self, held: Credential) -> None:
        """Show the certificate of this credential from the next turn on."""
        self._held = held
        self._context = tls.client_context(held.fleet_ca)
        self._certificate = joining.certificate_file(self._layout.gate, held)
        self.poke.set()

    def turn(self) -> Optional[float]:
        """Write the table when it changed; start the gate when it is gone or hangs."""
        runs = self._runs()
        if not runs and self._identity is not None:
            self._ended(self._identity)
        if not runs and time.monotonic() < self._not_before:
            return None
        if not runs:
            spawn.stop(self._marker, grace_seconds=STOP_GRACE_SECONDS)
            self._port = self._free_port()
        table = self._write_table()
        if not runs:
            self._start()
        if self._has_read(table):
            self._answered_at = time.monotonic()
            self._failures = 0
            self._board.put_note("gate-ends", "")
            self._board.put_gate_port(self._port)
            self._board.put_open(self._doors(table))
            joining.remove_other_certificates(self._layout.gate, self._certificate)
        elif time.monotonic() - self._answered_at >= PATIENCE_SECONDS:
            log.warning("gate does not answer, ending it")
            spawn.stop(self._marker, grace_seconds=STOP_GRACE_SECONDS)
        return None

    def _ended(self, identity: spawn.Identity) -> None:
        """Note that the gate is gone: at once the first time, with growing pauses when it never answers."""
        spawn.forget(identity.pid)
        self._identity = None
        words = restarts.last_words(log_tail.read(self._layout.gate_log, 4096))
        self._not_before = time.monotonic() + min(2.0 ** self._failures - 1, restarts.LONGEST_DELAY)
        self._failures += 1
        if self._failures > 1:
            self._board.put_note("gate-ends", f"the gate does not run: {words}")
        log.warning("gate ended, starting it again in %.0f s: %s",
                    max(0.0, self._not_before - time.monotonic()), words)

    def stop_gate(self) -> None:
        """End the gate with what belongs to it."""
        spawn.stop(self._marker, grace_seconds=STOP_GRACE_SECONDS)

    def _write_table(self) -> GateTable:
        table = self._table()
        data = wire.dumps(wire.GATE_TABLE, table)
        if data != self._written:
            try:
                files.write_atomic(self._layout.gate_table, data)
            except LlmgwError as error:
                self._board.put_note("gate-table", f"the gate learns nothing new: {error.message}")
                raise
            self._board.put_note("gate-table", "")
            self._written = data
        return table

    def _doors(self, table: GateTable) -> FrozenSet[Door]:
        """Return the shards here that the entries of a table lead to."""
        desired = self._board.desired
        names = {shard.replica: shard.id for shard in desired.node.shards} if desired else {}
        return frozenset((names[entry.replica], entry.incarnation) for entry in table.entries
                         if entry.replica in names)

    def _table(self) -> GateTable:
        desired = self._board.desired
        wanted = {shard.id: shard for shard in desired.node.shards} if desired else {}
        entries = []
        for seen in sorted(self._board.shards(), key=lambda shard: shard.id):
            shard = wanted.get(seen.id)
            if shard is not None and seen.state in _OPEN and seen.port is not None:
                key = hashlib.sha256(shard.key.reveal().encode()).hexdigest()
                entries.append(GateEntry(shard.replica, key, shard.model.engine, seen.port, seen.incarnation))
        return GateTable(self._host, self._port, tuple(entries), self._certificate, self._layout.root,
                         desired.node.readers if desired else ())

    def _start(self) -> None:
        log_tail.rotate(self._layout.gate_log)
        command = Command((*own_command(), "gate", "--table", self._layout.gate_table),
                          env={"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8",
                               "HOME": self._layout.gate, **own_environment()}, cwd="/")
        self._identity = spawn.start(command, self._marker, self._layout.gate_log)
        self._answered_at = time.monotonic()
        log.info("gate started pid=%d port=%d", self._identity.pid, self._port)

    def _has_read(self, table: GateTable) -> bool:
        """Wait a little for the gate to say that it acts on this very table."""
        sha256 = hashlib.sha256(wire.dumps(wire.GATE_TABLE, table)).hexdigest()
        deadline = time.monotonic() + READ_SECONDS
        while True:
            said = self._asked()
            if said.get("table_sha256") == sha256:
                return True
            if time.monotonic() >= deadline or not said and not self._runs():
                return False
            self._pause.wait(0.05)

    def _runs(self) -> bool:
        return self._identity is not None and spawn.alive(self._identity)

    def _asked(self) -> Dict[str, Any]:
        """Return what our gate says of itself; empty when it says nothing, or somebody else answers."""
        assert self._identity is not None
        host = "127.0.0.1" if self._host in ("0.0.0.0", "::") else self._host
        held = self._held
        where = joined(host, self._port)
        client = HttpClient(f"http://{where}", timeout=2.0) if held is None else HttpClient(
            f"https://{where}", context=self._context, server_name=held.tls_name, timeout=2.0)
        try:
            answer = client.request("GET", "/healthz")
            said = json.loads(answer.body) if answer.status == 200 else {}
            return said if isinstance(said, dict) and said.get("pid") == self._identity.pid else {}
        except (LlmgwError, ValueError):
            return {}
        finally:
            client.close()

    def _free_port(self) -> int:
        """Return the configured port, or the next free one, said loudly, when somebody else has it."""
        first = self._port or self._wanted_port
        for port in range(first, first + TRIES):
            if not answers(self._host, port) and is_free(self._host, port):
                self._board.put_note("gate", "" if port == self._wanted_port else
                                     f"port {self._wanted_port} of the gate is taken by another program; "
                                     f"it listens on {port}")
                return port
        self._board.put_note("gate", f"no free port for the gate from {first} on")
        return first
