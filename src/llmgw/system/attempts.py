"""How often somebody shows a wrong token. Only the wrong ones are slowed down: nobody can lock others out."""
from __future__ import annotations

import ipaddress
import threading
import time
from collections import OrderedDict
from typing import Callable, Tuple

EACH_SECONDS = 60.0
MOST = 10
MOST_ON_LOOPBACK = 300        # this machine's own programs, many at once
REMEMBERED = 4096             # networks


class FailedAttempts:
    """Counts per /24, or /64 of IPv6, and minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: "OrderedDict[str, Tuple[float, int]]" = OrderedDict()

    def count(self, address: str) -> int:
        """Note a wrong token from ``address``; return how many more than allowed there were within the minute."""
        network, most = _network(address)
        now = self._clock()
        with self._lock:
            since, number = self._seen.pop(network, (now, 0))
            if now - since >= EACH_SECONDS:
                since, number = now, 0
            self._seen[network] = (since, number + 1)
            while len(self._seen) > REMEMBERED:
                self._seen.popitem(last=False)
        return max(0, number + 1 - most)


def _network(address: str) -> Tuple[str, int]:
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address, MOST
    mapped = getattr(found, "ipv4_mapped", None)
    found = mapped or found
    if found.is_loopback:
        return "loopback", MOST_ON_LOOPBACK
    return str(ipaddress.ip_network(f"{found}/{24 if found.version == 4 else 64}", strict=False)), MOST
