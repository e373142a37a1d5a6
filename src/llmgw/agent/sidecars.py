"""Programs of a shard that run beside its engine: each is started, and ready, before the next one is."""
from __future__ import annotations

import dataclasses
import threading
import time
from typing import List, Mapping, Sequence, Tuple

from llmgw.domain.errors import EngineFailed
from llmgw.engines.base import Program
from llmgw.system import spawn
from llmgw.system.ports import answers

READY_SECONDS = 120.0
LOOK_SECONDS = 0.1


def marked(program: Program, marks: Mapping[str, str], run_as: object) -> Program:
    """Return the program with our marks in its environment, to be run as the shard's user."""
    command = program.command
    return dataclasses.replace(program, command=dataclasses.replace(
        command, env={**command.env, **marks}, run_as=run_as))  # type: ignore[arg-type]


def start(programs: Sequence[Program], marker: spawn.Marker, log_path: str, stopping: threading.Event,
          seconds: float = READY_SECONDS) -> Tuple[spawn.Identity, ...]:
    """Start each program and wait for it; EngineFailed says which did not become ready, and what was waited for."""
    started: List[spawn.Identity] = []
    for program in programs:
        identity = spawn.start(program.command, marker, log_path)
        started.append(identity)
        _wait(program, identity, stopping, seconds)
    return tuple(started)


def _wait(program: Program, identity: spawn.Identity, stopping: threading.Event, seconds: float) -> None:
    host, port = program.ready_at
    name = program.title or program.name
    deadline = time.monotonic() + seconds
    while port and not answers(host, port):
        if not spawn.alive(identity):
            code = spawn.exit_code(identity.pid)
            raise EngineFailed(f"{name} ended with code {code} before it was ready")
        if stopping.is_set():
            raise EngineFailed(f"stopped while {name} was starting")
        if time.monotonic() >= deadline:
            raise EngineFailed(f"{name} did not become ready: nothing listens at {host}:{port} "
                               f"after {seconds:.0f} seconds")
        stopping.wait(LOOK_SECONDS)
