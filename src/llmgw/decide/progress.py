"""Is a program getting anywhere? Slow is not dead, and silent is not dead either."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

STALLED_START_SECONDS = 180.0     # without any sign of work while starting
FLAT_SECONDS = 60.0               # requests running, no progress, no answer
RESTART_AFTER_SECONDS = 60.0      # of being hung
SILENT_SECONDS = 600.0            # no answer at all, though it uses the processor
IDLE_CPU_SHARE = 0.02             # below this it does nothing


@dataclass(frozen=True)
class Sign:
    """Everything that grows while a program starts; any change is progress."""

    log_bytes: int = 0
    memory_bytes: int = 0
    read_bytes: int = 0
    page_faults: int = 0


@dataclass(frozen=True)
class Start:
    """How a start went so far: the last sign, and since when it is the same."""

    sign: Sign
    since: float


def seen(start: Start, sign: Sign, now: float) -> Start:
    """Return the start with a new look at it."""
    return start if sign == start.sign else Start(sign, now)


def start_has_stalled(start: Start, now: float) -> bool:
    """True when nothing of it moved for three minutes."""
    return now - start.since >= STALLED_START_SECONDS


@dataclass(frozen=True)
class Pulse:
    """One look at a serving engine. None: it did not answer the question."""

    at: float
    running: Optional[float]
    work: Optional[float]         # a number that grows while the engine works
    cpu_seconds: float


@dataclass(frozen=True)
class Health:
    """``flat_since``: since when it has had work and shown none; ``suspect_since``: found hung at."""

    last: Optional[Pulse] = None
    flat_since: Optional[float] = None
    hung_since: Optional[float] = None
    silent: bool = False


def after_pulse(health: Health, pulse: Pulse) -> Health:
    """Return the health after a look. Idle, and any growth of the work, are well."""
    last = health.last
    silent = pulse.running is None
    if not silent and (not pulse.running or last is None or last.work is None or pulse.work != last.work):
        return Health(last=pulse)
    since = pulse.at if health.flat_since is None else health.flat_since
    kept = pulse if last is None or not silent else Pulse(pulse.at, last.running, last.work, pulse.cpu_seconds)
    return Health(last=kept, flat_since=since, hung_since=health.hung_since, silent=silent)


def needs_probe(health: Health, now: float) -> bool:
    """True when an engine looks hung, so that one token should be asked of it before it is called so."""
    return health.flat_since is not None and now - health.flat_since >= FLAT_SECONDS / 2


def is_hung(health: Health, now: float, *, probe_answered: bool, cpu_share: float) -> bool:
    """True for requests running, nothing done for a minute and a probe unanswered.

    One that answers nothing but computes is busy (a long prompt silences
    llama-server altogether), until that has lasted ten minutes.
    """
    if health.flat_since is None or probe_answered:
        return False
    limit = SILENT_SECONDS if health.silent and cpu_share >= IDLE_CPU_SHARE else FLAT_SECONDS
    return now - health.flat_since >= limit


def must_restart(hung_since: float, now: float) -> bool:
    """True when a hung engine had its second minute."""
    return now - hung_since >= RESTART_AFTER_SECONDS
