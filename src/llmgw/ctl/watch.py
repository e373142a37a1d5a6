"""Show something again and again: on a terminal in place, elsewhere whenever it changed."""
from __future__ import annotations

import argparse
import contextlib
import io
import select
import sys
import time
from typing import Callable

from llmgw.ctl import output
from llmgw.domain.errors import Unreachable

EVERY_SECONDS = 2.0


def arguments(parser: argparse.ArgumentParser, *, watch: bool = True) -> None:
    """Give a read command ``--json`` and, when it can, ``--watch``."""
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    if watch:
        parser.add_argument("--watch", action="store_true",
                            help=f"show it again every {EVERY_SECONDS:g} seconds, until Ctrl-C")


def show(options: argparse.Namespace, once: Callable[[], None]) -> int:
    """Run ``once``, or run it until interrupted; a server that is away for a while ends nothing."""
    if not options.watch:
        once()
        return 0
    before = None
    while True:
        shown = _captured(once)
        if shown != before:
            _show(shown)
            before = shown
        pause()


def pause() -> None:
    """Wait for the next look; BrokenPipeError as soon as whoever reads has gone (`... | head`)."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)        # faults only: they are always told
    except (OSError, ValueError):
        time.sleep(EVERY_SECONDS)                    # no file behind stdout
        return
    if poll.poll(EVERY_SECONDS * 1000):
        raise BrokenPipeError


def _captured(once: Callable[[], None]) -> str:
    """Return what ``once`` prints, or the sentence that says why it cannot."""
    page = _Page(sys.stdout)
    try:
        with contextlib.redirect_stdout(page), contextlib.redirect_stderr(page):
            once()
    except Unreachable as error:
        return page.getvalue() + output.clean(f"llmgw: {error.message}") + "\n"
    return page.getvalue()


def _show(shown: str) -> None:
    if sys.stdout.isatty():
        shown = "\x1b[H\x1b[2J" + shown      # home, clear
    sys.stdout.write(shown)
    sys.stdout.flush()


class _Page(io.StringIO):
    """Collects text, but says of itself what the real stream says."""

    def __init__(self, real: object) -> None:
        super().__init__()
        self._real = real

    def isatty(self) -> bool:
        return bool(self._real.isatty())     # type: ignore[attr-defined]

    @property
    def encoding(self) -> str:               # type: ignore[override]
        return getattr(self._real, "encoding", None) or "utf-8"
