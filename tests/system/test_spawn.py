"""Programs that outlive us, are found again, and leave nothing behind when ended."""
from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest

from llmgw.domain.command import Command
from llmgw.domain.errors import CommandFailed
from llmgw.system import proc, spawn

MARK = "LLMGW_TEST_MARK"


def wait_for(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.01)


@pytest.fixture
def marker(tmp_path):
    value = (MARK, str(tmp_path))
    yield value
    spawn.stop(value, grace_seconds=0.0)
    spawn.leave_all()


def run(marker, tmp_path, code, **env):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(code))
    command = Command((sys.executable, "-S", str(program)), env={"PATH": os.environ["PATH"], **env})
    return spawn.start(command, marker, str(tmp_path / "log"))


SLEEPS = "import time; print('up', flush=True); time.sleep(600)"
DEAF = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
# the child has a session of its own, as vLLM's workers may, and the parent waits for nothing
ORPHANING = """
    import subprocess, sys
    subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
    print("up", flush=True)
    import time; time.sleep(600)
"""
CLEANING = """
    import subprocess, sys
    subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], env={})
    print("up", flush=True)
    import time; time.sleep(600)
"""


def is_up(tmp_path):
    return (tmp_path / "log").exists() and "up" in (tmp_path / "log").read_text()


def test_a_program_has_its_own_session_its_log_and_only_the_given_environment(marker, tmp_path):
    code = "import os, sys; print('session', os.getsid(0) == os.getpid(), sorted(os.environ), flush=True)"
    run(marker, tmp_path, code, ONE="1")
    wait_for(lambda: (tmp_path / "log").read_text().endswith("\n"))
    text = (tmp_path / "log").read_text()
    assert "session True" in text and "'ONE'" in text and MARK in text and "PYTHONPATH" not in text


def test_a_program_that_cannot_start_is_an_error_of_ours(marker, tmp_path):
    with pytest.raises(CommandFailed, match="cannot run /no/such"):
        spawn.start(Command(("/no/such",)), marker, str(tmp_path / "log"))


def test_a_program_is_known_from_the_moment_that_its_start_returns(marker, tmp_path):
    for number in range(40):              # the kernel shows the environment of a new program a little after its exec
        mine = (marker[0], f"{marker[1]}-{number}")
        identity = spawn.start(Command(("/bin/sleep", "60"), env={"PATH": "/usr/bin:/bin"}), mine, str(tmp_path / "log"))
        try:
            assert spawn.alive(identity) and spawn.find(mine) == identity
        finally:
            assert spawn.stop(mine, grace_seconds=5.0) == []
            spawn.forget(identity.pid)


def test_identity_is_the_pid_its_start_the_boot_and_the_marker_together(marker, tmp_path):
    identity = run(marker, tmp_path, SLEEPS)
    wait_for(lambda: is_up(tmp_path))
    assert spawn.alive(identity) and spawn.find(marker) == identity
    assert not spawn.alive(dataclasses.replace(identity, start=identity.start + 1))
    assert not spawn.alive(dataclasses.replace(identity, boot_id="another boot"))
    assert not spawn.alive(dataclasses.replace(identity, marker_value="another"))


def test_a_reused_pid_is_neither_adopted_nor_killed(marker, tmp_path):
    stranger = subprocess.Popen([sys.executable, "-S", "-c", SLEEPS], stdout=subprocess.DEVNULL)
    try:
        row = spawn.Identity(proc.boot_id(), stranger.pid, proc.stat(stranger.pid).start, *marker)
        assert not spawn.alive(row) and spawn.find(marker) is None
        assert spawn.stop(marker, grace_seconds=1.0) == [] and stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


@pytest.mark.parametrize("code", [SLEEPS, DEAF, ORPHANING, CLEANING],
                         ids=["plain", "deaf to TERM", "grandchild with its own session", "child without environment"])
def test_stopping_leaves_nothing(marker, tmp_path, code):
    run(marker, tmp_path, code)
    wait_for(lambda: is_up(tmp_path))
    members = {process.pid for process in spawn.tree(marker)}
    assert spawn.stop(marker, grace_seconds=1.0) == []
    assert spawn.tree(marker) == [] and not any(
        (stat := proc.stat(pid)) is not None and stat.lives for pid in members)


def test_a_leader_that_is_gone_does_not_hide_its_children(marker, tmp_path):
    identity = run(marker, tmp_path, ORPHANING)
    wait_for(lambda: is_up(tmp_path))
    os.kill(identity.pid, signal.SIGKILL)
    wait_for(lambda: not spawn.alive(identity))
    assert len(spawn.tree(marker)) == 1
    assert spawn.stop(marker, grace_seconds=1.0) == [] and spawn.tree(marker) == []


def test_a_zombie_is_dead_and_is_reaped(marker, tmp_path):
    identity = run(marker, tmp_path, "import sys; sys.exit(7)")
    wait_for(lambda: not spawn.alive(identity))
    wait_for(lambda: spawn.reap(identity.pid) is not None)     # its memory goes, and with it its marker, a moment earlier
    assert spawn.reap(identity.pid) == 7 and proc.stat(identity.pid) is None
    spawn.forget(identity.pid)
    assert spawn.reap(identity.pid) is None


def test_the_exit_code_of_a_program_whose_first_thread_ended_first_is_waited_for(marker, tmp_path):
    """Its leader is a zombie that cannot be reaped yet, as llama-server is for a moment when it exits."""
    identity = run(marker, tmp_path, """
        import ctypes, os, threading, time
        threading.Thread(target=lambda: (time.sleep(0.7), os._exit(7))).start()
        ctypes.CDLL(None).pthread_exit(None)
        """)
    wait_for(lambda: not spawn.alive(identity))
    assert spawn.exit_code(identity.pid) == 7
    spawn.forget(identity.pid)


def test_a_program_outlives_whoever_started_it_and_is_found_again(marker, tmp_path):
    starter = textwrap.dedent(f"""
        import os
        from llmgw.domain.command import Command
        from llmgw.system import spawn
        spawn.start(Command(({sys.executable!r}, "-S", "-c", {SLEEPS!r})), {marker!r}, {str(tmp_path / 'log')!r})
        """)
    done = subprocess.run([sys.executable, "-c", starter], timeout=60, check=False,
                          env={**os.environ, "LLMGW_FAILPOINT": "spawn-after-exec:kill"})
    assert done.returncode == -9
    wait_for(lambda: is_up(tmp_path))
    found = spawn.find(marker)
    assert found is not None and spawn.alive(found)
    assert spawn.reap(found.pid) is None                # somebody else's child: its code is unknown
    assert spawn.stop(marker, grace_seconds=5.0) == []


def test_the_listener_of_a_port_is_known(marker, tmp_path):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        assert proc.listening_inodes(port) == set()
        server.listen(1)
        assert proc.listening_inodes(port) and proc.listening_inodes(port) <= proc.socket_inodes(os.getpid())


def test_numbers_of_a_process():
    me = os.getpid()
    assert proc.stat(me).lives and proc.stat(me).parent == os.getppid()
    assert proc.memory_bytes(me) > 1 << 20 and proc.page_faults(me) > 0 and proc.read_bytes(me) > 0
    assert proc.stat(2 ** 22 + 1) is None and proc.memory_bytes(2 ** 22 + 1) == 0
    assert len(proc.boot_id()) == 36
