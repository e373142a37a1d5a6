"""The HTTP server's own counters, for handlers that are made before it."""
from __future__ import annotations

from typing import Dict, Optional, Tuple

from llmgw.system.http_server import HttpServer


class HttpNumbers:
    """Zero until ``server`` is set."""

    def __init__(self) -> None:
        self.server: Optional[HttpServer] = None

    def connections(self) -> int:
        return self.server.connections if self.server is not None else 0

    def answers(self) -> Dict[Tuple[str, int], int]:
        return dict(self.server.counts) if self.server is not None else {}
