"""The life of a shard on its node, as a table. The table is the documentation."""
from __future__ import annotations

import enum
from typing import Dict

from llmgw.domain.errors import IllegalTransition
from llmgw.domain.replica import ShardState as S


class Event(str, enum.Enum):
    """What can happen to a shard."""

    ENGINE_READY = "engine-ready"        # the engine is installed; its weights are fetched now
    ENGINE_GONE = "engine-gone"          # it cannot be started: the engine is not (or no longer) usable
    WEIGHTS_GONE = "weights-gone"        # it cannot be started: files are absent or damaged
    STARTED = "started"
    ADOPTED = "adopted"                  # found running, by a new agent
    READY = "ready"                      # every condition of readiness was seen
    HUNG = "hung"                        # runs, but answers nothing and makes no progress
    ANSWERED = "answered"                # an unready one made progress again
    ENDED = "ended"                      # it ended unasked, or was ended for a fault of its own
    ENDED_OFTEN = "ended-often"
    STOP = "stop"                        # nobody wants it any more
    GONE = "gone"                        # nothing of it runs
    TURN_OVER = "turn-over"              # of a gang: ended, to be started again with all the others


_BEFORE_START = {Event.ENGINE_GONE: S.WAITING, Event.WEIGHTS_GONE: S.FETCHING}
_FAILING = {Event.ENDED: S.BACKOFF, Event.ENDED_OFTEN: S.CRASHLOOP, Event.STOP: S.STOPPING}

TRANSITIONS: Dict[S, Dict[Event, S]] = {
    S.WAITING: {Event.ENGINE_READY: S.FETCHING, Event.ENGINE_GONE: S.WAITING,
                Event.ADOPTED: S.STARTING, Event.STOP: S.STOPPING},
    S.FETCHING: {**_BEFORE_START, Event.STARTED: S.STARTING, Event.ADOPTED: S.STARTING,
                 Event.ENDED: S.BACKOFF, Event.ENDED_OFTEN: S.CRASHLOOP, Event.STOP: S.STOPPING},
    S.STARTING: {Event.READY: S.READY, Event.TURN_OVER: S.FETCHING, **_FAILING},
    S.READY: {Event.HUNG: S.UNREADY, Event.TURN_OVER: S.FETCHING, **_FAILING},
    S.UNREADY: {Event.ANSWERED: S.READY, Event.TURN_OVER: S.FETCHING, **_FAILING},
    S.BACKOFF: {**_BEFORE_START, Event.STARTED: S.STARTING, Event.ENDED: S.BACKOFF,
                Event.ENDED_OFTEN: S.CRASHLOOP, Event.STOP: S.STOPPING},
    S.CRASHLOOP: {**_BEFORE_START, Event.STARTED: S.STARTING, Event.ENDED: S.CRASHLOOP,
                  Event.ENDED_OFTEN: S.CRASHLOOP, Event.STOP: S.STOPPING},
    S.STOPPING: {Event.GONE: S.STOPPED, Event.STOP: S.STOPPING},
    S.STOPPED: {},
}


def step(state: S, event: Event) -> S:
    """Return the state after ``event``; IllegalTransition where the table has none."""
    try:
        return TRANSITIONS[state][event]
    except KeyError:
        raise IllegalTransition(f"event {event.value} is not allowed in state {state.value}") from None
