"""What a node does next for its shards: who is started and ended, and one shard's next step."""
from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Optional, Sequence, Tuple

from llmgw.domain.replica import Gang, ShardState


@dataclass(frozen=True)
class Changes:
    """Shards to take up, and those to end: in the order wanted, and in the order known."""

    take_up: Tuple[str, ...] = ()
    end: Tuple[str, ...] = ()


def changes(wanted: Sequence[str], known: Sequence[str]) -> Changes:
    """Return what must change so that exactly ``wanted`` is kept. Nothing is ended for being unknown twice."""
    return Changes(take_up=tuple(name for name in dict.fromkeys(wanted) if name not in known),
                   end=tuple(name for name in dict.fromkeys(known) if name not in wanted))


class Step(str, enum.Enum):
    """The next thing to do for one shard."""

    WAIT_FOR_ENGINE = "wait for engine"
    WAIT_FOR_WEIGHTS = "wait for weights"
    START = "start"
    PAUSE = "pause"                # between two starts
    PROVE = "prove"                # ask whether it is ready
    WATCH = "watch"
    RECORD_END = "record end"      # it ended unasked
    END_STALLED = "end stalled"    # its start makes no progress
    END_HUNG = "end hung"
    STOP = "stop"
    END_TURN = "end turn"          # the others of its gang are started again, and so is it
    WAIT_FOR_GANG = "wait for gang"
    NOTHING = "nothing"


@dataclass(frozen=True)
class Seen:
    """What was observed of one shard this turn."""

    state: ShardState
    wanted: bool = True
    engine_usable: bool = True
    weights_whole: bool = True
    runs: bool = False
    start_stalled: bool = False
    hung_too_long: bool = False
    turn_over: bool = False        # of a gang: it runs in a turn that is over
    must_wait: bool = False        # of a gang: its turn has not come
    not_before: Optional[float] = None


_RUNNING = (ShardState.STARTING, ShardState.READY, ShardState.UNREADY)


def next_step(seen: Seen, now: float) -> Step:
    """Return what to do next. A running shard is left alone whatever became of its engine or weights."""
    if seen.state is ShardState.STOPPED:
        return Step.NOTHING
    if not seen.wanted or seen.state is ShardState.STOPPING:
        return Step.STOP
    if seen.state in _RUNNING:
        return _of_running(seen)
    if not seen.engine_usable:
        return Step.WAIT_FOR_ENGINE
    if not seen.weights_whole:
        return Step.WAIT_FOR_WEIGHTS
    if seen.not_before is not None and now < seen.not_before:
        return Step.PAUSE
    return Step.WAIT_FOR_GANG if seen.must_wait else Step.START


def why_wait(gang: Optional[Gang], rank: int, last_turn: int) -> str:
    """Return why a rank is not started (again) now; empty when it may be. ``last_turn``: its last start was in it."""
    if gang is None:
        return ""
    if last_turn >= gang.turn:
        return "waits until all ranks of its replica are started again"
    if rank > 0 and not gang.meet_port:
        return "waits for rank 0 to say where it is met"
    if rank == 0 and gang.waits_for:
        return f"waits until {gang.waits_for} can start"
    return "" if gang.address and gang.lead_address else "waits for the fabric_address of its node and of rank 0"


def _of_running(seen: Seen) -> Step:
    if seen.turn_over:
        return Step.END_TURN
    if not seen.runs:
        return Step.RECORD_END
    if seen.state is ShardState.STARTING:
        return Step.END_STALLED if seen.start_stalled else Step.PROVE
    return Step.END_HUNG if seen.hung_too_long else Step.WATCH
