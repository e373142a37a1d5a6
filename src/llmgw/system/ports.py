"""Which TCP ports of this machine are free."""
from __future__ import annotations

import errno
import socket

from llmgw.domain.errors import ConfigError, LlmgwError, PortTaken


def cannot_listen(who: str, host: str, port: int, error: Exception, hint: str) -> LlmgwError:
    """Return our error for a bind that failed; ``hint`` is what to do when another program has the port."""
    number, where = getattr(error, "errno", None), f"{who} cannot listen on {host}:{port}"
    if number == errno.EADDRINUSE:
        return PortTaken(f"{where}: another program listens there", hint=hint)
    if number == errno.EACCES:
        return ConfigError(f"{where}: not allowed to", hint="choose a port above 1023")
    return ConfigError(f"{where}: {getattr(error, 'strerror', None) or error}",
                       hint="is it an address of this machine?")


def listening(host: str, port: int, backlog: int) -> socket.socket:
    """Return a socket that listens there; OSError or OverflowError when it cannot."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(backlog)
        return sock
    except (OSError, OverflowError):
        sock.close()
        raise


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
