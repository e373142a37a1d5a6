"""Call something again and again until told to stop."""
from __future__ import annotations

import logging
import threading
from typing import Callable, Optional

from llmgw.domain.errors import LlmgwError
from llmgw.system.logs import Said

log = logging.getLogger(__name__)


def repeat(name: str, turn: Callable[[], Optional[float]], *, every: float, stop: threading.Event,
           poke: Optional[threading.Event] = None) -> None:
    """Run ``turn`` now and then every ``every`` seconds, sooner when ``poke`` is set.

    A turn may fail, the loop may not. A fault of ours (a full disk) is a sentence, anything
    else is a bug and a traceback; each is logged when it is new, not at every turn.
    A turn may return the seconds to wait instead of ``every``.
    Whoever sets ``stop`` sets ``poke`` too, or waits up to one period.
    """
    said = Said()
    while not stop.is_set():
        wait: Optional[float] = None
        try:
            wait = turn()
            if said.is_over(name):
                log.info("loop goes on loop=%s", name)
        except LlmgwError as error:
            if said.is_new(name, error.message):
                log.error("loop turn failed, it is tried again loop=%s reason=%s: %s", name, error.reason,
                          error.message)
        except Exception as error:
            if said.is_new(name, repr(error)):
                log.exception("loop turn failed loop=%s", name)
        pause = every if wait is None else wait
        if poke is not None:
            poke.wait(pause)
            poke.clear()
        else:
            stop.wait(pause)


def start(name: str, turn: Callable[[], Optional[float]], *, every: float, stop: threading.Event,
          poke: Optional[threading.Event] = None) -> threading.Thread:
    """Run ``repeat`` in a daemon thread of that name and return the thread."""
    thread = threading.Thread(
        target=repeat, args=(name, turn), kwargs={"every": every, "stop": stop, "poke": poke},
        name=name, daemon=True)
    thread.start()
    return thread
