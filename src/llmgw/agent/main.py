"""The node daemon: installs engines, fetches weights, keeps shards and the gate running, and reports."""
from __future__ import annotations

import hashlib
import logging
import os
import platform
import signal
import sys
import threading
from typing import List, Optional

from llmgw import __version__
from llmgw.agent import joined, options, scrub, uv
from llmgw.agent.board import Board
from llmgw.agent.engine_user import EngineUser
from llmgw.agent.engines import EngineKeeper
from llmgw.agent.flags import FlagCheck
from llmgw.agent.failover import HeartbeatLoops
from llmgw.agent.fetch import Fetcher
from llmgw.agent.heartbeat import EVERY_SECONDS, Heartbeat
from llmgw.agent.install import Installer
from llmgw.agent.keep_gate import GateKeeper
from llmgw.agent.layout import Layout
from llmgw.agent.outside import Outside
from llmgw.agent.peers import Peers
from llmgw.agent.ports import Ports
from llmgw.agent.python_engine import PythonInstaller
from llmgw.agent.python_needs import PythonNeeds
from llmgw.agent.prove import Prover
from llmgw.agent.requests import Requests
from llmgw.agent.scrub import Scrub
from llmgw.agent.shards import Shards
from llmgw.agent.weights import WeightsKeeper
from llmgw.api import joining
from llmgw.api.client import ControlClient
from llmgw.api.joining import Credential
from llmgw.domain.errors import ConfigError, LlmgwError
from llmgw.domain.node import NodeIdentity
from llmgw.probe import machine
from llmgw.probe.deadline import within
from llmgw.system import files, logs, loop, notify, owned, proc, spawn
from llmgw.system.clock import Clock
from llmgw.system.process import Processes

log = logging.getLogger(__name__)

PROBE_SECONDS = 30.0
GATE_SECONDS = 1.0
RENEWAL_SECONDS = 300.0
OWNED_STOP_SECONDS = 60.0
JOIN_SECONDS = 5.0                # a loop in the middle of something slow is left behind


def run(argv: List[str], debug: bool) -> int:
    """Run until TERM or INT; 0 after an orderly end."""
    if sys.platform != "linux":
        raise ConfigError(f"the agent runs on Linux only, this is {platform.system()}")
    chosen = options.parse(argv)
    logs.configure(debug)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *unused: stop.set())
    owned.watch(stop)
    lock = files.FolderLock(chosen.config.data_dir, "agent")
    try:
        alive = threading.main_thread()
        notify.ready(alive.is_alive, stop)     # before it joins: that may have to wait for the control plane
        chosen, held = joined.resolve(chosen, stop.is_set)
        Agent(chosen, stop, held).serve()
    finally:
        lock.release()
    return 0


def _instance(data_dir: str) -> str:
    """Return what tells this agent from others of this machine, and is the same after a restart."""
    return hashlib.sha256(os.path.realpath(data_dir).encode("utf-8", "surrogateescape")).hexdigest()[:16]


class Agent:
    """Puts the loops together; every one is the only writer of its part."""

    def __init__(self, chosen: options.Options, stop: threading.Event, held: Optional[Credential] = None) -> None:
        config = chosen.config
        self._config, self._owned, self._stop = config, chosen.owned, stop
        layout, clock = Layout(config.data_dir), Clock()
        self._layout, self._said = layout, logs.Said()
        client = self._client = ControlClient(config.servers, chosen.token, ca_pem=chosen.ca_pem)
        self._board = Board(NodeIdentity(config.node, __version__, proc.boot_id(), config.address,
                                         labels=dict(config.labels), fabric_address=config.fabric_address,
                                         instance=_instance(config.data_dir)))
        user = EngineUser(config.engine_user, layout, self._board.put_note)
        # what it makes without saying how is closed to others, or lies where only the engines' user comes
        os.umask(0o022 if user.is_other else 0o077)
        processes, self._processes = Processes(user.run_as), Processes(user.or_ourselves)
        prover = Prover(processes, layout.packages_log, config.install_packages, lambda: self._board.facts)
        outside = Outside(config.http_proxy or "")
        python = PythonInstaller(client, layout, processes,
                                 PythonNeeds(layout, lambda: self._board.facts, config.install_packages), config.node,
                                 uv.from_node(config, os.environ), lambda: self._board.facts, stop.is_set,
                                 user=user, outside=outside)
        archives = Installer(client, layout, prover, stop.is_set, outside)
        self._engines = EngineKeeper(archives, python, self._board, layout, clock,
                                     config.operator_engines, config.cpu_engines, flag_check=FlagCheck(
                                         processes, layout, lambda: bool(self._board.facts.gpus), user.run_as))
        peers = Peers(self._board)
        fetcher = Fetcher(client, layout, peers.having, peers.share)
        self._weights = WeightsKeeper(fetcher, self._board, layout, stop)
        self._scrub = Scrub(layout, self._weights.held, fetcher, self._weights.report_damage, stop)
        self._shards = Shards(self._board, layout, Ports(config.engine_ports), clock, user)
        self._gate = GateKeeper(self._board, layout, config.address, config.gate_port)
        self._renewal = None
        if held is not None:
            def take(new: Credential) -> None:
                self._gate.take(new)
                peers.take(new)
            take(held)
            self._renewal = joining.Renewal(client, layout.credential, held, tuple, clock.wall, take)
        requests = Requests(config.node, client, self._shards.log_path)
        self._heartbeat = Heartbeat(config.node, client, self._board, layout, clock, requests.answer)

    def serve(self) -> None:
        """Take over what an earlier agent left, then run all loops until told to stop."""
        log.info("agent starts node=%s version=%s data_dir=%s", self._config.node, __version__,
                 self._config.data_dir)
        self._recall()
        threads = self._start_loops()
        while not self._stop.wait(1.0):      # a bounded wait lets signals in on every Python
            pass
        self._end(threads)

    def _recall(self) -> None:
        layout = self._layout
        files.sweep_scratch(os.path.dirname(layout.desired), layout.gate, layout.shards, layout.models)
        self._heartbeat.recall()
        self._engines.recall()
        self._weights.recall()
        self._weights.sweep()
        self._gate.recall()
        self._shards.recall()

    def _start_loops(self) -> List[threading.Thread]:
        stop = self._stop
        self._board.listen(self._wake)
        if self._renewal is not None:
            loop.start("certificate", self._renewal.turn, every=RENEWAL_SECONDS, stop=stop)
        return [
            loop.start("probe", self._probe, every=PROBE_SECONDS, stop=stop),
            loop.start("engines", self._engines.turn, every=EVERY_SECONDS, stop=stop, poke=self._engines.poke),
            loop.start("weights", self._weights.turn, every=EVERY_SECONDS, stop=stop, poke=self._weights.poke),
            loop.start("scrub", self._scrub.turn, every=scrub.TURN_SECONDS, stop=stop),
            loop.start("shards", self._shards.turn, every=EVERY_SECONDS, stop=stop, poke=self._shards.poke),
            loop.start("gate", self._gate.turn, every=GATE_SECONDS, stop=stop, poke=self._gate.poke),
            self._start_heartbeat()]

    def _start_heartbeat(self) -> threading.Thread:
        stop, changed, client = self._stop, self._board.changed, self._client
        if client.count == 1:
            return loop.start("heartbeat", self._heartbeat.turn, every=EVERY_SECONDS, stop=stop, poke=changed)
        loops = HeartbeatLoops(self._heartbeat.beat, client.count, stop, changed, client.prefer,
                               self._heartbeat.failed)
        return loop.start("heartbeats", loops.turn, every=EVERY_SECONDS, stop=stop)

    def _wake(self) -> None:
        for poke in (self._engines.poke, self._weights.poke, self._gate.poke):
            poke.set()
        self._shards.wake()

    def _probe(self) -> None:
        self._board.put_facts(machine.probe(self._config.data_dir, processes=self._processes,
                                            exclude_gpus=self._config.exclude_gpus))
        answer, silence = within(machine.QUICK_SECONDS, f"writing to {self._config.data_dir}", self._fault_of_disk, "")
        fault = answer or silence
        if fault and self._said.is_new("disk", fault):
            log.error("%s", fault)
        elif not fault and self._said.is_over("disk"):
            log.info("%s can be written again", self._config.data_dir)
        self._board.put_note("disk", fault)

    def _fault_of_disk(self) -> str:
        """Return why nothing can be written down here, in words: it is told before somebody relies on it."""
        try:
            files.check_writable(self._config.data_dir)
            return ""
        except LlmgwError as error:
            return f"{error.message}; {error.hint}"

    def _end(self, threads: List[threading.Thread]) -> None:
        log.info("agent stops owned=%s", self._owned)
        self._wake()
        self._board.changed.set()
        for thread in threads:
            thread.join(JOIN_SECONDS)
        if self._owned:
            if not self._shards.stop_all(OWNED_STOP_SECONDS):
                log.error("some engines did not end")
            self._gate.stop_gate()
        self._shards.leave(JOIN_SECONDS)
        self._heartbeat.last_words()
        spawn.leave_all()
