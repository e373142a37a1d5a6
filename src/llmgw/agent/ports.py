"""Loopback ports for engines: from the agent's block, held until given back, tried before use."""
from __future__ import annotations

import threading
from typing import Iterable, Set, Tuple

from llmgw.domain.errors import PortTaken
from llmgw.system.ports import answers, is_free

BLOCK = 100


class Ports:
    """A new start gets the next port of the block, so that nobody's old connection reaches it."""

    def __init__(self, first: int, count: int = BLOCK) -> None:
        self._first, self._count = first, count
        self._next = 0
        self._held: Set[int] = set()
        self._lock = threading.Lock()

    def take(self, host: str = "127.0.0.1") -> int:
        """Return a port where nobody answers and where a server can listen, on ``host`` and on loopback."""
        with self._lock:
            for _ in range(self._count):
                port = self._first + self._next
                self._next = (self._next + 1) % self._count
                if port not in self._held and all(not answers(place, port) and is_free(place, port)
                                                  for place in {"127.0.0.1", host}):
                    self._held.add(port)
                    return port
        raise PortTaken(f"no free port from {self._first} to {self._first + self._count - 1}",
                        hint="choose another block with --engine-ports")

    def take_all(self, count: int, host: str = "127.0.0.1") -> Tuple[int, ...]:
        """Return so many of them, or give those back that there were."""
        taken: Tuple[int, ...] = ()
        try:
            while len(taken) < count:
                taken += (self.take(host),)
        except PortTaken:
            self.give_back(taken)
            raise
        return taken

    def hold(self, ports: Iterable[int]) -> None:
        """Note the ports of an adopted program."""
        with self._lock:
            self._held.update(ports)

    def give_back(self, ports: Iterable[int]) -> None:
        with self._lock:
            self._held.difference_update(ports)
