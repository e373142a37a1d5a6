"""One shard on this node: observe, ask decide for the next step, take it. One thread per shard."""
from __future__ import annotations

import dataclasses
import logging
import os
import random
import threading
from typing import Any, Callable, Dict, Optional, Tuple

from llmgw.agent import shard_row, sidecars
from llmgw.agent.board import UNKNOWN, Board
from llmgw.agent.engine_user import EngineUser
from llmgw.agent.gpu_proof import GpuProof
from llmgw.agent.layout import Layout
from llmgw.agent.ports import Ports
from llmgw.agent.prepare import next_row, prepared
from llmgw.agent.readiness import EngineDoor, Finding, MayListen, Proof, on_gpus
from llmgw.agent.watch import Watch, start_sign
from llmgw.decide import lifecycle, progress, restarts
from llmgw.decide.lifecycle import Event
from llmgw.decide.shards import Seen, Step, next_step, why_wait
from llmgw.domain.errors import DiskFull, LlmgwError, StorageError
from llmgw.domain.model import WeightsPhase
from llmgw.domain.replica import CANNOT_STOP, WAITING_FOR_GANG, FirstFailure, ShardObserved, ShardState, ShardWanted
from llmgw.engines import registry
from llmgw.engines.base import Program
from llmgw.system import failpoint, files, log_tail, logs, proc, spawn
from llmgw.system.clock import Clock

log = logging.getLogger(__name__)

STOP_GRACE_SECONDS = 20.0
TAIL_BYTES = 16 << 10             # of a log, where the reason is looked for
KEPT_BYTES = 4 << 10              # of it, kept with the first failure: it rides in every heartbeat
LOG = "engine.log"
ENDED, OUT_OF_MEMORY = "Ended", "OutOfMemory"
MAX_LOG_BYTES = 64 << 20
STARTING_TURN, TURN, IDLE_TURN = 0.1, 1.0, 5.0
STOPPING_TURN = 0.5


class ShardKeeper:
    """Keeps one wanted shard running, or ends it. ``turn`` is called by its own thread only."""

    def __init__(self, wanted: ShardWanted, board: Board, layout: Layout, ports: Ports, clock: Clock,
                 user: EngineUser) -> None:
        self.id, self._user = wanted.id, user
        self.poke = threading.Event()
        self.done = threading.Event()
        self._wanted: ShardWanted = wanted
        self._key = (wanted.model.engine, wanted.engine_version)
        self._end = threading.Event()
        self._board, self._layout, self._ports, self._clock = board, layout, ports, clock
        self._engine = registry.get(wanted.model.engine)
        self._folder = files.make_dir(layout.shard(wanted.id))
        self._row = shard_row.read(self._folder, wanted.id)
        self._state = ShardState.WAITING
        self._reason, self._message = "", ""
        self._since = clock.wall()
        self._failures: Tuple[restarts.Failure, ...] = ()
        self._not_before: Optional[float] = None
        self._ready_at: Optional[float] = None
        self._start: Optional[progress.Start] = None
        self._look_at = 0.0
        self._watch: Optional[Watch] = None
        self._door: Optional[EngineDoor] = None
        self._memory_kills = 0
        self._gpu_proof = GpuProof(wanted.gpus, first=False)
        self._said = logs.Said()

    def end(self) -> None:
        """Nobody wants it any more: its thread stops what runs."""
        self._end.set()
        self.poke.set()

    def update(self, wanted: ShardWanted) -> None:
        """Hear what is new of the other ranks; nothing else of a shard ever changes."""
        if wanted.gang != self._wanted.gang:
            self._wanted = dataclasses.replace(self._wanted, gang=wanted.gang)
            self.poke.set()

    def adopt(self) -> None:
        """Take over what an earlier agent left running. A proven program stays ready: it never stopped serving."""
        identity = self._row.identity
        if identity is None or not spawn.alive(identity):
            identity = spawn.find(self._marker) if self._row.incarnation else None
        if identity is not None and self._row.port is not None:
            self._ports.hold(self._row.ports)
            self._note(identity=identity)
            self._begin(Event.ADOPTED)
            log.info("shard adopted shard=%s pid=%d port=%d", self.id, identity.pid, self._row.port)
            if self._row.ready:
                self._became_ready()
        self._tell()

    def turn(self) -> float:
        """Take one step; return when to look again."""
        step = next_step(self._seen(), self._clock.monotonic())
        _STEPS[step](self)
        self._tell()
        if self._state is ShardState.STARTING:
            return STARTING_TURN
        return TURN if self._state in (ShardState.READY, ShardState.UNREADY, ShardState.BACKOFF,
                                       ShardState.CRASHLOOP) else IDLE_TURN

    def _seen(self) -> Seen:
        now = self._clock.monotonic()
        held = self._board.weights((self._wanted.weights.name, self._wanted.weights.fingerprint))
        gang, runs = self._wanted.gang, self._runs()
        return Seen(
            state=self._state, wanted=not self._end.is_set(),
            engine_usable=self._board.engine(self._key)[1] is not None,
            weights_whole=held is not None and held.phase is WeightsPhase.WHOLE,
            runs=runs, turn_over=gang is not None and self._row.turn < gang.turn,
            must_wait=bool(why_wait(gang, self._wanted.rank, self._row.turn)),
            start_stalled=self._look_at_start(now),
            hung_too_long=self._watch is not None and self._watch.must_restart(now),
            not_before=self._not_before)

    def _runs(self) -> bool:
        """Whether the engine, and everything beside it, runs."""
        return self._row.identity is not None and all(map(spawn.alive, (*self._row.sidecars, self._row.identity)))

    # steps ------------------------------------------------------------------

    def _wait_for_engine(self) -> None:
        seen, _ = self._board.engine(self._key)
        name = " ".join(self._key)
        self._move(Event.ENGINE_GONE, "WaitingForEngine",
                   f"waits for {name}: {seen.message or seen.phase.value}" if seen else f"waits for {name}")

    def _wait_for_weights(self) -> None:
        if self._state is ShardState.WAITING:
            self._move(Event.ENGINE_READY)
        held = self._board.weights((self._wanted.weights.name, self._wanted.weights.fingerprint))
        if self._state is not ShardState.FETCHING:
            self._move(Event.WEIGHTS_GONE)
            self._failures, self._not_before = (), None      # with other files it is another start
        self._say("FetchingWeights", held.message if held and held.message else "waits for its weights")

    def _start_program(self) -> None:
        if self._state is ShardState.WAITING:
            self._move(Event.ENGINE_READY)
        usable = self._board.take_engine(self._key, self.id)
        if usable is None:
            return
        program: Optional[Program] = None
        if not self._nothing_is_left():
            return
        self._row = dataclasses.replace(self._row, program=usable.program)
        try:
            self._row = next_row(self._row, self._wanted, self._engine, self._ports)
            log_tail.rotate(self._log_path)
            *beside, program = prepared(self._wanted, self._engine, usable, self._row, self._layout, self._user)
            shard_row.write(self._folder, self._row)
            self._gpu_proof = GpuProof(self._wanted.gpus)
            failpoint.reach("shard-before-exec")
            self._row = dataclasses.replace(self._row, sidecars=sidecars.start(
                beside, self._marker, self._log_path, self._end))
            identity = spawn.start(program.command, self._marker, self._log_path)
            self._note(identity=identity)
            failpoint.reach("shard-after-exec")
        except (DiskFull, StorageError) as error:        # the node's fault, which no count of failures cures
            self._put_off(error)
            return
        except LlmgwError as error:
            if self._row.incarnation:
                spawn.stop(self._marker, grace_seconds=2.0)      # what had started beside it
            self._record_failure(error.reason, error.message, program)
            return
        self._said.is_over("start")
        self._begin(Event.STARTED)
        log.info("shard started shard=%s pid=%d port=%d incarnation=%d", self.id, identity.pid,
                 self._row.port, self._row.incarnation)

    def _put_off(self, error: LlmgwError) -> None:
        """Try again soon: nothing was started for want of a disk that can be written."""
        self._let_go()
        self._row = dataclasses.replace(self._row, turn=0)       # of a gang: its turn is still to come
        self._not_before = self._clock.monotonic() + IDLE_TURN
        self._say(error.reason, f"cannot be started: {error.message}" + (f"; {error.hint}" if error.hint else ""))
        if self._said.is_new("start", error.message):
            log.warning("shard not started shard=%s reason=%s: %s", self.id, error.reason, error.message)

    def _prove(self) -> None:
        assert self._row.identity is not None
        finding = on_gpus(self._finding(self._row.identity), self._gpu_proof, self._marker)
        if finding.proof is Proof.READY:
            self._became_ready()
        elif finding.proof is Proof.WRONG and spawn.alive(self._row.identity):
            self._end_for(finding.reason, f"the engine {finding.message}")
        elif finding.message:
            self._say("Starting", f"the engine {finding.message}")

    def _finding(self, identity: spawn.Identity) -> Finding:
        """Ask the engine; a rank that does not serve is ready when rank 0 is, whose answers take all of them."""
        gang = self._wanted.gang
        assert self._door is not None
        if self._follows:
            is_proven = gang is not None and gang.lead_ready
            return self._door.shut(identity) if is_proven else Finding(Proof.NOT_YET, "waits for rank 0 to answer")
        return self._door.prove(identity)

    def _watch_it(self) -> None:
        now = self._clock.monotonic()
        if self._ready_at is not None and self._failures and restarts.is_well(self._ready_at, now):
            self._failures = ()
            self._note(first_failure=None)
        log_tail.bound(self._log_path, MAX_LOG_BYTES)
        if self._follows:
            return
        assert self._watch is not None
        hung = self._watch.turn(now)
        if hung and self._state is ShardState.READY:
            self._move(Event.HUNG, "Hung", hung)
        elif not hung and self._state is ShardState.UNREADY:
            self._move(Event.ANSWERED, "Ready", "")

    def _record_end(self) -> None:
        identity = self._row.identity
        code = spawn.exit_code(identity.pid) if identity else None
        spawn.stop(self._marker, grace_seconds=2.0)       # what its leader left behind
        if code in (None, -9) and proc.out_of_memory_kills() > self._memory_kills:
            self._record_failure(OUT_OF_MEMORY, "the kernel ended the engine: out of memory", None)
            return
        self._record_failure(ENDED, f"the engine {restarts.how_it_ended(code)}", None)

    def _end_turn(self) -> None:
        """Make room for the next turn of the gang."""
        if not self._nothing_is_left():
            return
        self._let_go()
        self._ready_at = None
        self._note(identity=None, ready=False, sidecars=())
        self._move(Event.TURN_OVER, "Restarting", "every rank of its replica is started again")

    def _wait_for_gang(self) -> None:
        if self._state is ShardState.WAITING:
            self._move(Event.ENGINE_READY)
        if self._state in (ShardState.FETCHING, ShardState.BACKOFF, ShardState.CRASHLOOP):
            self._say(WAITING_FOR_GANG, why_wait(self._wanted.gang, self._wanted.rank, self._row.turn))

    def _end_stalled(self) -> None:
        self._end_for("StartStalled", f"no progress for {progress.STALLED_START_SECONDS:.0f} seconds "
                                      "while it was starting")

    def _end_hung(self) -> None:
        self._end_for("Hung", "requests were running and nothing was computed for two minutes")

    def _stop(self) -> None:
        if self._state is not ShardState.STOPPING:
            self._move(Event.STOP, "Stopping", "is being stopped")
            self._tell()                                      # the gate closes its door first
        if not self._nothing_is_left():
            return
        self._let_go()
        self._move(Event.GONE, "Stopped", "")
        files.remove(self._folder)
        self.done.set()

    def _nothing(self) -> None:
        if self._state is ShardState.STOPPED:
            self.done.set()

    # what steps share -------------------------------------------------------

    def _nothing_is_left(self) -> bool:
        """End what runs; say what does not end, or which GPU is not free again: nothing new is started there."""
        left = spawn.stop(self._marker, grace_seconds=STOP_GRACE_SECONDS) if self._row.incarnation else []
        held = "" if left else self._gpu_proof.unreleased(self._clock.monotonic())
        if left or held:
            self._say(CANNOT_STOP, held or f"these processes do not end: {', '.join(map(str, left))}")
        return not (left or held)

    def _begin(self, event: Event) -> None:
        assert self._row.port is not None and self._row.identity is not None
        now = self._clock.monotonic()
        gang = self._wanted.gang
        self._door = EngineDoor(self._engine, self._wanted.model, self._wanted.key, self._row.port,
                                MayListen((gang.address,), self._row.inner, self._engine.unknown_ports(self._wanted))
                                if gang else MayListen())
        self._watch = Watch(self._engine, self._door, self._row.identity.pid)
        self._start = progress.Start(start_sign(self._row.identity.pid, self._log_path), now)
        self._not_before = None
        self._memory_kills = proc.out_of_memory_kills()
        self._move(event, "Starting", "the engine was started")

    def _became_ready(self) -> None:
        self._move(Event.READY, "Ready", "")
        self._ready_at = self._clock.monotonic()
        if not self._row.ready:
            self._note(ready=True)
            log.info("shard ready shard=%s port=%d", self.id, self._row.port)

    def _end_for(self, reason: str, message: str) -> None:
        """End a program that runs but is at fault."""
        tail = log_tail.read(self._log_path, TAIL_BYTES)
        spawn.stop(self._marker, grace_seconds=STOP_GRACE_SECONDS)
        self._record_failure(reason, message, None, tail)

    def _record_failure(self, reason: str, message: str, program: Optional[Program], tail: str = "") -> None:
        tail = self._without_secrets(tail or log_tail.read(self._log_path, TAIL_BYTES))
        now = self._clock.monotonic()
        signature = restarts.OUT_OF_MEMORY if reason == OUT_OF_MEMORY else restarts.signature(tail, message)
        verdict = restarts.after_failure(
            self._failures, restarts.Failure(now, signature, self._ready_at is not None), random.random())
        self._failures, self._not_before = verdict.failures, verdict.not_before
        self._ready_at = None
        last = restarts.last_words(tail) if reason == ENDED else ""
        sentence = message + (f"; its last words: {last}" if last else "")
        command = str(program.command) if program else shard_row.last_command(self._folder)
        first = self._row.first_failure or FirstFailure(self._clock.wall(), sentence, command, tail[-KEPT_BYTES:])
        self._let_go()
        self._note(identity=None, ready=False, first_failure=first, restarts=self._row.restarts + 1)
        self._move(Event.ENDED_OFTEN if verdict.crashloop else Event.ENDED, reason, sentence)
        log.warning("shard failed shard=%s reason=%s next_start_in=%.0fs: %s", self.id, reason,
                    verdict.not_before - now, sentence)

    def _note(self, **changes: Any) -> None:
        """Change the row, on disk too where it can be written: what runs is found again by its marker."""
        self._row = dataclasses.replace(self._row, **changes)
        try:
            shard_row.write(self._folder, self._row)
            self._said.is_over("row")
        except LlmgwError as error:
            if self._said.is_new("row", error.message):
                log.warning("shard state not kept shard=%s reason=%s: %s", self.id, error.reason, error.message)

    def _let_go(self) -> None:
        if self._row.identity is not None:
            spawn.forget(self._row.identity.pid)
        self._ports.give_back(self._row.ports)
        self._row = dataclasses.replace(self._row, port=None, meet_port=0, inner_ports=())
        if self._door is not None:
            self._door.close()
        self._door, self._watch, self._start = None, None, None

    def _look_at_start(self, now: float) -> bool:
        if self._state is not ShardState.STARTING or self._start is None or self._row.identity is None \
                or self._follows:             # rank 0 is slow for all of them
            return False
        if now >= self._look_at:              # it looks at every process of the machine
            self._look_at = now + TURN
            self._start = progress.seen(self._start, start_sign(self._row.identity.pid, self._log_path), now)
        return progress.start_has_stalled(self._start, now)

    @property
    def _follows(self) -> bool:
        return self._wanted.rank > 0

    def _without_secrets(self, text: str) -> str:
        return logs.redact(text.replace(self._wanted.key.reveal(), "***"))

    @property
    def _marker(self) -> spawn.Marker:
        return self._row.marker(self._folder)

    @property
    def _log_path(self) -> str:
        return os.path.join(self._folder, LOG)

    def _move(self, event: Event, reason: str = "", message: str = "") -> None:
        before = self._state
        self._state = lifecycle.step(before, event)
        if self._state is not before:
            self._since = self._clock.wall()
            log.debug("shard moves shard=%s from=%s to=%s", self.id, before.value, self._state.value)
        self._say(reason, message)

    def _say(self, reason: str, message: str) -> None:
        self._reason, self._message = reason, message

    def _tell(self) -> None:
        identity = self._row.identity
        runs = self._state in (ShardState.STARTING, ShardState.READY, ShardState.UNREADY)
        outdated = self._board.put_program(self._key, self.id, (self._row.program or UNKNOWN) if identity else "")
        self._board.put_shard(ShardObserved(
            self.id, self._state, self._reason, self._message, self._since, self._row.incarnation,
            identity.pid if identity and runs else None, self._row.port if runs and not self._follows else None,
            self._row.restarts, self._row.first_failure, self._row.turn, self._row.meet_port if runs else 0, outdated))


_STEPS: Dict[Step, Callable[[ShardKeeper], None]] = {
    Step.WAIT_FOR_ENGINE: ShardKeeper._wait_for_engine,
    Step.WAIT_FOR_WEIGHTS: ShardKeeper._wait_for_weights,
    Step.START: ShardKeeper._start_program,
    Step.PAUSE: lambda keeper: None,
    Step.PROVE: ShardKeeper._prove,
    Step.WATCH: ShardKeeper._watch_it,
    Step.RECORD_END: ShardKeeper._record_end,
    Step.END_TURN: ShardKeeper._end_turn,
    Step.WAIT_FOR_GANG: ShardKeeper._wait_for_gang,
    Step.END_STALLED: ShardKeeper._end_stalled,
    Step.END_HUNG: ShardKeeper._end_hung,
    Step.STOP: ShardKeeper._stop,
    Step.NOTHING: ShardKeeper._nothing,
}
