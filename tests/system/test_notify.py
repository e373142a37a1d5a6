"""What systemd is told, over a real socket."""
from __future__ import annotations

import os
import socket
import threading

import pytest

from llmgw.system import notify


@pytest.fixture
def manager(tmp_path, monkeypatch):
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(path)
        sock.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", path)
        yield sock


def test_without_a_service_manager_nothing_happens(monkeypatch):
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert not notify.tell("READY=1")
    assert not notify.tell("READY=1", {"NOTIFY_SOCKET": "/nowhere/at/all"})
    assert not notify.tell("READY=1", {"NOTIFY_SOCKET": "nonsense"})


def test_it_is_told_once_that_we_are_ready_and_again_and_again_that_we_live(manager, monkeypatch):
    monkeypatch.setenv("WATCHDOG_USEC", "200000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    stop, alive = threading.Event(), [True]
    notify.ready(lambda: alive[0], stop)
    assert [manager.recv(100) for _ in range(3)] == [b"READY=1", b"WATCHDOG=1", b"WATCHDOG=1"]
    alive[0] = False
    manager.settimeout(0.5)
    with pytest.raises(socket.timeout):
        for _ in range(3):                       # one may have been on its way
            manager.recv(100)
    stop.set()


@pytest.mark.parametrize("environment, seconds", [
    ({}, 0.0), ({"WATCHDOG_USEC": "30000000"}, 30.0), ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, 0.0),
    ({"WATCHDOG_USEC": "x"}, 0.0)])
def test_the_watchdog_is_for_this_process_only(environment, seconds):
    assert notify.watchdog_seconds(environment) == seconds
