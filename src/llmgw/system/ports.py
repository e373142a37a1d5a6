"""Which TCP ports of this machine are free."""
from __future__ import annotations

import socket


def is_free(host: str, port: int) -> bool:
    """Say whether a server could listen there now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def free_port(host: str, wanted: int) -> int:
    """Return ``wanted`` when it is free, else one that the system picks; it stays free only by luck."""
    if is_free(host, wanted):
        return wanted
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def answers(host: str, port: int) -> bool:
    """Say whether somebody accepts connections there: with SO_REUSEPORT a port can be taken and bindable."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((host, port)) == 0
