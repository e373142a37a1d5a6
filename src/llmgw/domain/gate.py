"""What the gate of a node lets through."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Tuple


@dataclass(frozen=True)
class GateEntry:
    """One door: whoever shows the key with this sha256 (hex) reaches this loopback port.

    The key itself passes through to the engine, which demands it once more.
    """

    replica: str
    key_sha256: str
    engine: str               # chooses the allow-list of paths
    port: int
    incarnation: int = 0


@dataclass(frozen=True)
class PeerDoor:
    """Another node: whoever shows the key with this sha256 (hex) may read blobs here, and nothing else."""

    node: str
    key_sha256: str


@dataclass(frozen=True)
class GateTable:
    """Written by the agent, read by the gate whenever it changes. Holds no secret."""

    host: str
    port: int
    entries: Tuple[GateEntry, ...] = ()
    certificate: str = ""     # a file with certificate and key: the gate speaks TLS
    root: str = ""            # the agent's data folder, whose blobs the peers may read
    peers: Tuple[PeerDoor, ...] = ()
