"""When an ended program is started again: growing pauses, and a crash loop as a state of its own."""
from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import List, Optional, Tuple

FIRST_DELAY = 1.0
LONGEST_DELAY = 60.0
WINDOW_SECONDS = 600.0            # failures older than this no longer count
MANY_FAILURES = 5                 # within the window: a crash loop
OUT_OF_MEMORY = "out of memory"    # the signature of being ended by the kernel for it
MANY_OUT_OF_MEMORY = 2            # in a row: starting it again only takes others down with it
SAME_FAILURES = 3                 # with one signature, none ever ready: a crash loop sooner
CRASHLOOP_DELAY = 300.0
WELL_AFTER_SECONDS = 600.0        # ready for so long: the row of failures is over


@dataclass(frozen=True)
class Failure:
    """One unasked end. ``signature`` is what its last words have in common with the next one's."""

    at: float
    signature: str = ""
    was_ready: bool = False
    crashloop: bool = False       # the verdict on it


@dataclass(frozen=True)
class Verdict:
    """When to start again, and whether to call it a crash loop until then."""

    crashloop: bool
    not_before: float
    failures: Tuple[Failure, ...]


def after_failure(before: Tuple[Failure, ...], failure: Failure, jitter: float) -> Verdict:
    """Return the verdict on ``failure``; ``jitter`` in 0..1 spreads nodes that failed together.

    A pause of 1, 2, 4 ... 60 seconds, of which at least half is waited.
    """
    recent = tuple(item for item in before if failure.at - item.at < WINDOW_SECONDS) + (failure,)
    # the long pauses of a crash loop must not age it out of its own window
    still = bool(before) and before[-1].crashloop and not failure.was_ready
    last = recent[-SAME_FAILURES:]
    same = (len(last) == SAME_FAILURES and all(_alike(item.signature, failure.signature) for item in last)
            and not any(item.was_ready for item in last))
    killed = [item.signature == OUT_OF_MEMORY for item in recent[-MANY_OUT_OF_MEMORY:]]
    oom = len(killed) == MANY_OUT_OF_MEMORY and all(killed)
    if still or same or oom or len(recent) >= MANY_FAILURES:
        marked = dataclasses.replace(failure, crashloop=True)
        return Verdict(True, failure.at + CRASHLOOP_DELAY, recent[:-1] + (marked,))
    delay = min(FIRST_DELAY * 2 ** (len(recent) - 1), LONGEST_DELAY)
    return Verdict(False, failure.at + delay * (0.5 + 0.5 * jitter), recent)


def how_it_ended(code: Optional[int]) -> str:
    """Return how a program ended, by its exit code (negative: a signal; None: nobody knows)."""
    if code is None:
        return "ended unasked"
    return f"was ended by signal {-code}" if code < 0 else f"ended unasked with code {code}"


def is_well(ready_since: float, now: float) -> bool:
    """True when a shard has been ready so long that its earlier failures say nothing any more."""
    return now - ready_since >= WELL_AFTER_SECONDS


def signature(log_tail: str, code: str) -> str:
    """Return what two failures with one cause share: the first line that tells of an error, without its numbers.

    Not the last: a dying llama-server does not always get all of its lines out. Only ``code`` when it
    got none of them out.
    """
    telling = next(filter(_tells, _lines(log_tail)), "")
    return code + ":" + "".join("#" if char.isdigit() else char for char in telling)[:200]


def _alike(one: str, other: str) -> bool:
    """True for equal signatures, and when one has only the code in common with the other's."""
    return one.startswith(other) or other.startswith(one)


def last_words(log_tail: str) -> str:
    """Return the line of a log's end that is most likely the reason: the last that tells of an error."""
    lines = _lines(log_tail)
    return next(filter(_tells, reversed(lines)), lines[-1] if lines else "")[:300]


def _lines(text: str) -> List[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _tells(line: str) -> bool:
    lowered = line.lower()
    return any(word in lowered for word in ("error", "fatal", "failed", "exception", "out of memory"))
