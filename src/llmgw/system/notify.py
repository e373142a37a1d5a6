"""Tell systemd that this service is ready and alive; without systemd nothing happens."""
from __future__ import annotations

import os
import socket
import threading
from typing import Callable, Mapping


def tell(state: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Send ``READY=1`` and its like to the service manager; whether there is one that took it."""
    address = environment.get("NOTIFY_SOCKET", "")
    if address[:1] not in ("/", "@"):
        return False
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.settimeout(1.0)
            sock.sendto(state.encode("utf-8"), address if address[0] == "/" else "\0" + address[1:])
        return True
    except OSError:                # it must never hinder the service itself
        return False


def watchdog_seconds(environment: Mapping[str, str] = os.environ) -> float:
    """Return how often the service manager wants to hear of us at least; 0: it does not."""
    text = environment.get("WATCHDOG_USEC", "")
    if environment.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()) or not text.isdigit():
        return 0.0
    return int(text) / 1e6


def ready(is_alive: Callable[[], bool], stop: threading.Event) -> None:
    """Say that the service is ready, and again and again that it lives, as long as ``is_alive`` says so."""
    tell("READY=1")
    seconds = watchdog_seconds()
    if not seconds:
        return

    def repeat() -> None:
        while not stop.wait(seconds / 4):
            if is_alive():
                tell("WATCHDOG=1")
    threading.Thread(target=repeat, name="watchdog", daemon=True).start()
