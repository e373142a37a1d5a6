"""All shards of this node: takes up what is wanted, ends the rest, and finds what an earlier agent left."""
from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
from typing import Dict, Optional, Set

from llmgw.agent import shard_row
from llmgw.agent.board import Board
from llmgw.agent.engine_user import EngineUser
from llmgw.agent.layout import Layout
from llmgw.agent.ports import Ports
from llmgw.agent.shard import STOP_GRACE_SECONDS, ShardKeeper
from llmgw.decide.shards import changes
from llmgw.domain.errors import LlmgwError
from llmgw.domain.replica import ShardObserved, ShardState, ShardWanted
from llmgw.system import files, loop, spawn
from llmgw.system.clock import Clock

log = logging.getLogger(__name__)

EVERY_SECONDS = 5.0
TOLD_SECONDS = 60.0               # how long an ended shard is still reported as stopped


class Shards:
    """One thread plans; each shard has its own thread, so that a slow one delays no other."""

    def __init__(self, board: Board, layout: Layout, ports: Ports, clock: Clock, user: EngineUser) -> None:
        self._user = user
        self._board, self._layout, self._ports, self._clock = board, layout, ports, clock
        self._leave = threading.Event()
        self._keepers: Dict[str, ShardKeeper] = {}
        self._threads: Dict[str, threading.Thread] = {}
        self._ended: Dict[str, float] = {}
        self._refused: Dict[str, str] = {}        # shards that cannot be taken up, and why
        self._started, self._swept = False, False
        self.poke = threading.Event()

    def wake(self) -> None:
        """Let every shard look again: an engine came, weights are whole."""
        self.poke.set()
        for keeper in list(self._keepers.values()):
            keeper.poke.set()

    def turn(self) -> Optional[float]:
        """Bring the set of shards in line with what is desired. Nothing is ended before something is known."""
        desired = self._board.desired
        if desired is None:
            return None
        wanted = {shard.id: shard for shard in desired.node.shards}
        plan = changes(tuple(wanted), tuple(self._keepers))
        for name in plan.end:
            self._keepers[name].end()
        for name in [name for name in self._refused if name not in wanted]:
            del self._refused[name]
            self._board.drop_shard(name)
        for name, keeper in self._keepers.items():
            if name in wanted:
                keeper.update(wanted[name])
        for name in plan.take_up:
            self._take_up(wanted[name])
        if self._started and not self._swept:
            self._sweep(set(wanted))
            self._swept = True
        self._forget_done()
        return None

    def recall(self) -> None:
        """Adopt what is wanted and runs, so that the first report shows it; ending the rest has time."""
        self.turn()
        self._started = True

    def stop_all(self, seconds: float) -> bool:
        """End every shard and wait for it; False when some are left after ``seconds``."""
        for keeper in list(self._keepers.values()):
            keeper.end()
        deadline = time.monotonic() + seconds
        return all(keeper.done.wait(max(0.0, deadline - time.monotonic()))
                   for keeper in list(self._keepers.values()))

    def leave(self, seconds: float) -> None:
        """Stop looking after the shards; what runs of them runs on."""
        self._leave.set()
        deadline = time.monotonic() + seconds
        for name, thread in list(self._threads.items()):
            self._keepers[name].poke.set()
            thread.join(max(0.0, deadline - time.monotonic()))

    def log_path(self, replica: str) -> str:
        """Return the log of a replica's shard here, empty when there is none."""
        for name in list(self._keepers):
            if name == replica or name.rpartition(".")[0] == replica:
                return os.path.join(self._layout.shard(name), "engine.log")
        return ""

    def _take_up(self, wanted: ShardWanted) -> None:
        self._ended.pop(wanted.id, None)
        try:
            keeper = ShardKeeper(wanted, self._board, self._layout, self._ports, self._clock, self._user)
            keeper.adopt()
        except LlmgwError as error:
            if self._refused.get(wanted.id) != error.message:    # told once: a report wakes this loop again
                self._refused[wanted.id] = error.message
                log.error("shard cannot be taken up shard=%s reason=%s: %s", wanted.id, error.reason, error.message)
                self._board.put_shard(ShardObserved(wanted.id, ShardState.WAITING, error.reason, error.message,
                                                    self._clock.wall()))
            return
        self._refused.pop(wanted.id, None)
        self._keepers[wanted.id] = keeper
        self._threads[wanted.id] = threading.Thread(
            target=loop.repeat, args=(f"shard {wanted.id}", keeper.turn), name=f"shard-{wanted.id}",
            kwargs={"every": EVERY_SECONDS, "stop": _Either(self._leave, keeper.done), "poke": keeper.poke},
            daemon=True)
        self._threads[wanted.id].start()

    def _forget_done(self) -> None:
        now = time.monotonic()
        for name, keeper in list(self._keepers.items()):
            if keeper.done.is_set():
                del self._keepers[name], self._threads[name]
                self._ended[name] = now
        for name, at in list(self._ended.items()):
            if now - at >= TOLD_SECONDS:
                del self._ended[name]
                self._board.drop_shard(name)

    def _sweep(self, wanted: Set[str]) -> None:
        """End what an earlier agent of this data folder left running and nobody wants any more."""
        kept = {self._layout.shard(name) for name in wanted}
        for name in sorted(os.listdir(self._layout.shards)) if os.path.isdir(self._layout.shards) else ():
            folder = os.path.join(self._layout.shards, name)
            row = shard_row.read(folder, "")
            if folder in kept:
                continue
            if row.incarnation:
                spawn.stop(row.marker(folder), grace_seconds=STOP_GRACE_SECONDS)
            files.remove(folder)
        for marker in shard_row.strangers(self._layout.root, kept):
            log.warning("program that nobody wants, ended marker=%s", marker[1])
            spawn.stop(marker, grace_seconds=STOP_GRACE_SECONDS)


@dataclasses.dataclass(frozen=True)
class _Either:
    """Stands for an event that is set when either is."""

    first: threading.Event
    second: threading.Event

    def is_set(self) -> bool:
        return self.first.is_set() or self.second.is_set()
