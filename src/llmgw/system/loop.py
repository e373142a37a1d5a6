"""Call something again and again until told to stop."""
from __future__ import annotations

import logging
import threading
from typing import Callable, Optional

log = logging.getLogger(__name__)


def repeat(name: str, turn: Callable[[], Optional[float]], *, every: float, stop: threading.Event,
           poke: Optional[threading.Event] = None) -> None:
    """Run ``turn`` now and then every ``every`` seconds, sooner when ``poke`` is set.

    A turn may fail, the loop may not: what escapes is a bug and its traceback is
    logged. A turn may return the seconds to wait instead of ``every``.
    Whoever sets ``stop`` sets ``poke`` too, or waits up to one period.
    """
    while not stop.is_set():
        wait: Optional[float] = None
        try:
            wait = turn()
        except Exception:
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
