"""Watching an engine that serves: does it work when it has work?"""
from __future__ import annotations

import os
import threading
from typing import Optional

from llmgw.agent.readiness import EngineDoor
from llmgw.decide import progress
from llmgw.domain.errors import LlmgwError
from llmgw.engines.base import Engine
from llmgw.system import proc

EVERY_SECONDS = 5.0
PROBE_SECONDS = 30.0


def start_sign(pid: int, log_path: str) -> progress.Sign:
    """Return what grows while a program starts: of all its processes, as often another one loads the model."""
    try:
        log_bytes = os.stat(log_path).st_size
    except OSError:
        log_bytes = 0
    family = [process.pid for process in proc.sessions({pid})] or [pid]
    return progress.Sign(log_bytes, sum(map(proc.memory_bytes, family)), sum(map(proc.read_bytes, family)),
                         sum(map(proc.page_faults, family)))


class Watch:
    """Reads an engine's metrics every five seconds; asks for a token only when it looks hung."""

    def __init__(self, engine: Engine, door: EngineDoor, pid: int) -> None:
        self._engine, self._door, self._pid = engine, door, pid
        self._health = progress.Health()
        self._cpu_mark: Optional[float] = None        # CPU seconds when it went flat
        self._hung_since: Optional[float] = None
        self._probe: Optional[threading.Thread] = None
        self._answered = False
        self._next = 0.0

    def turn(self, now: float) -> str:
        """Return why it is hung, empty while it is well."""
        if now >= self._next:
            self._next = now + EVERY_SECONDS
            self._look(now)
        if self._hung_since is None:
            return ""
        what = "answers nothing" if self._health.silent else "has requests running and computes nothing"
        return f"the engine {what}; it is restarted unless that changes within a minute"

    def must_restart(self, now: float) -> bool:
        return self._hung_since is not None and progress.must_restart(self._hung_since, now)

    def _look(self, now: float) -> None:
        stat = proc.stat(self._pid)
        cpu = stat.cpu_seconds if stat else 0.0
        page = self._door.metrics()
        running = self._engine.gauges(page).running if page is not None else None
        work = self._engine.work(page) if page is not None else None
        self._health = progress.after_pulse(self._health, progress.Pulse(now, running, work, cpu))
        flat_since = self._health.flat_since
        if flat_since is None:
            self._cpu_mark, self._hung_since, self._answered = None, None, False
            return
        if self._cpu_mark is None:
            self._cpu_mark = cpu
        if progress.needs_probe(self._health, now):
            self._ask()
        share = (cpu - self._cpu_mark) / max(now - flat_since, 1.0)
        hung = progress.is_hung(self._health, now, probe_answered=self._answered, cpu_share=share)
        if not hung:
            self._hung_since = None
        elif self._hung_since is None:
            self._hung_since = now

    def _ask(self) -> None:
        """Ask for one token in the background; an answer, even a refusal, is a sign of life."""
        if self._probe is None or not self._probe.is_alive():
            self._probe = threading.Thread(target=self._ask_once, name="hung-probe", daemon=True)
            self._probe.start()

    def _ask_once(self) -> None:
        try:
            self._answered = self._door.one_token(PROBE_SECONDS).status == 200
        except LlmgwError:
            self._answered = False
