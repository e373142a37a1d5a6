"""Children that end with their owner, and their start from what runs now."""
from __future__ import annotations

import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest

from llmgw.domain.errors import CommandFailed
from llmgw.system import own_program, ports
from llmgw.system.children import Owner

SRC = str(pathlib.Path(__file__).resolve().parents[2] / "src")

OWNER = """
import sys, time
sys.path.insert(0, {src!r})
from llmgw.system.children import Owner
owner = Owner({logs!r})
child = owner.start("child", [sys.executable, "-c", {child!r}], {{"PYTHONPATH": {src!r}}})
print(child.pid, flush=True)
time.sleep(600)
"""
ORDERLY = ("import threading; from llmgw.system import owned; stop = threading.Event(); owned.watch(stop);"
           "print('watching', flush=True); stop.wait(); print('stopped in order', flush=True)")
STUBBORN = ("import threading; from llmgw.system import owned; owned.watch(threading.Event(), grace_seconds=0.2);"
            "print('watching', flush=True); threading.Event().wait()")


def wait_for(true, seconds=40):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def gone(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize("child, last", [(ORDERLY, "stopped in order"), (STUBBORN, "watching")],
                         ids=["orderly", "stubborn"])
def test_kill_9_of_the_owner_ends_the_child(tmp_path, child, last):
    code = OWNER.format(src=SRC, logs=str(tmp_path), child=child)
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        pid = int(owner.stdout.readline())
        log = tmp_path / "child.log"
        wait_for(lambda: "watching" in log.read_text())
        assert not gone(pid)
        owner.send_signal(signal.SIGKILL)
        wait_for(lambda: gone(pid))
        assert log.read_text().splitlines()[-1] == last
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()


def test_a_child_does_not_hold_the_pipe_open_for_its_siblings(tmp_path):
    code = OWNER.format(src=SRC, logs=str(tmp_path), child=ORDERLY).replace(
        "time.sleep(600)",
        "owner.start('second', [sys.executable, '-c', 'import time; time.sleep(5)'], {}); time.sleep(600)")
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    pid = int(owner.stdout.readline())
    wait_for(lambda: (tmp_path / "second.log").exists() and "watching" in (tmp_path / "child.log").read_text())
    owner.kill()
    owner.wait()
    owner.stdout.close()
    wait_for(lambda: gone(pid), 4)


def test_a_child_is_told_apart_by_its_exit_code_and_keeps_the_log_of_the_run_before(tmp_path):
    owner = Owner(str(tmp_path))
    for words in ("first", "second"):
        child = owner.start("x", [sys.executable, "-c", f"print({words!r}); raise SystemExit(7)"], {})
        assert child.wait(40) and child.code == 7 and child.last_lines() == [words]
    assert (tmp_path / "x.log.1").read_text() == "first\n"
    with pytest.raises(CommandFailed, match="cannot start x: No such file"):
        owner.start("x", ["/nowhere/program"], {})
    owner.close()


def test_kill_ends_what_the_child_started_too(tmp_path):
    owner = Owner(str(tmp_path))
    child = owner.start("x", ["/bin/sh", "-c", "sleep 600 & echo $!; wait"], {"PATH": os.environ["PATH"]})
    wait_for(lambda: child.last_lines())
    below = int(child.last_lines()[0])
    child.kill()
    wait_for(lambda: gone(below))
    child.ask_to_stop()                        # too late, and no harm
    owner.close()


def test_without_an_owner_there_is_nothing_to_watch(monkeypatch):
    import threading

    from llmgw.system import owned
    monkeypatch.delenv(owned.OWNER_FD, raising=False)
    assert owned.watch(threading.Event()) is None


def test_what_runs_is_started_again_as_it_was(tmp_path):
    words = [sys.executable, "-c", "from llmgw.system import own_program as p; print(p.own_command())"]
    shown = subprocess.run(words, env={"PYTHONPATH": SRC}, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert "'-m', 'llmgw'" in shown
    env = own_program.own_environment()
    assert env.get("PYTHONPATH", SRC) == SRC


def test_a_taken_port_is_seen_and_replaced():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert not ports.is_free("127.0.0.1", port)
        other = ports.free_port("127.0.0.1", port)
        assert other != port and ports.is_free("127.0.0.1", other)
    assert ports.free_port("127.0.0.1", other) == other
