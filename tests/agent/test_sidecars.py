"""Programs beside an engine: each is ready before the next starts, and what is not says what was waited for."""
from __future__ import annotations

import sys
import threading

import pytest

from llmgw.agent import sidecars
from llmgw.domain.command import Command
from llmgw.domain.errors import EngineFailed
from llmgw.engines.base import Program
from llmgw.system import spawn
from tests.agent.conftest import free_block, wait_for

LISTENS = """
import os, socket, sys, time
print("started", sys.argv[2], flush=True)
while not os.path.exists(sys.argv[3]): time.sleep(0.01)
door = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("listens", sys.argv[2], flush=True)
time.sleep(600)
"""


@pytest.fixture
def marker(tmp_path):
    yield "LLMGW_TEST_MARK", str(tmp_path)
    assert spawn.stop(("LLMGW_TEST_MARK", str(tmp_path)), grace_seconds=2.0) == []


def program(name, port, gate, script=LISTENS):
    return Program(name, Command((sys.executable, "-c", script, str(port), name, str(gate)), env={"PATH": "/usr/bin:/bin"}),
                   title=f"{name} start", ready_at=("127.0.0.1", port))


def test_the_next_program_starts_only_when_the_one_before_it_listens(tmp_path, marker):
    first, log = free_block(4), tmp_path / "log"
    one, two = program("one", first, tmp_path / "a"), program("two", first + 1, tmp_path / "b")
    done = []
    thread = threading.Thread(target=lambda: done.append(sidecars.start([one, two], marker, str(log), threading.Event(), 120.0)))
    thread.start()
    try:
        wait_for(lambda: log.exists() and "started one" in log.read_text(), 60)
        assert "two" not in log.read_text() and not done
        (tmp_path / "a").write_text("")
        wait_for(lambda: "started two" in log.read_text(), 60)
        assert not done
        (tmp_path / "b").write_text("")
    finally:
        thread.join(120)
    said = log.read_text().splitlines()
    assert said == ["started one", "listens one", "started two", "listens two"]
    assert len(done[0]) == 2 and all(map(spawn.alive, done[0]))


def test_one_that_never_listens_ends_the_start_at_its_deadline_and_is_named(tmp_path, marker):
    port = free_block(4)
    with pytest.raises(EngineFailed) as failed:
        sidecars.start([program("one", port, tmp_path / "never"), program("two", port + 1, tmp_path)], marker, str(tmp_path / "log"),
                       threading.Event(), 0.5)
    assert failed.value.message == f"one start did not become ready: nothing listens at 127.0.0.1:{port} after 0 seconds"
    assert "two" not in (tmp_path / "log").read_text()


def test_one_that_ends_and_a_stop_meanwhile_end_the_start_at_once(tmp_path, marker):
    port, stopping = free_block(4), threading.Event()
    with pytest.raises(EngineFailed) as failed:
        sidecars.start([program("one", port, tmp_path, "import sys; sys.exit(3)")], marker, str(tmp_path / "log"), stopping)
    assert failed.value.message == "one start ended with code 3 before it was ready"
    stopping.set()
    with pytest.raises(EngineFailed) as failed:
        sidecars.start([program("one", port, tmp_path / "never")], marker, str(tmp_path / "log"), stopping)
    assert failed.value.message == "stopped while one start was starting"
