"""What a node is made of."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Mapping, Optional, Tuple


@dataclass(frozen=True)
class OsRelease:
    """What /etc/os-release says; ``id`` is empty when there is no such file."""

    id: str = ""
    id_like: Tuple[str, ...] = ()
    version_id: str = ""
    pretty_name: str = ""


@dataclass(frozen=True)
class Gpu:
    """A GPU, known by its uuid: indexes move when a card is lost. ``None`` means unknown, never 0."""

    uuid: str
    index: int
    name: str
    memory_total_bytes: Optional[int] = None
    memory_used_bytes: Optional[int] = None
    compute_capability: Optional[str] = None
    mig: bool = False


@dataclass(frozen=True)
class NodeFacts:
    """What one probe of a machine found. Empty text means that the probe could not tell."""

    os: OsRelease = field(default_factory=OsRelease)
    kernel: str = ""
    arch: str = ""                          # as uname says: x86_64, aarch64
    libc: str = ""                          # "glibc 2.36", "musl 1.2.4"
    python: str = ""
    cpu_model: str = ""
    cpu_count: int = 0
    vector_extensions: Tuple[str, ...] = ()  # of: avx avx2 fma f16c avx512f amx_int8 neon sve ...
    memory_total_bytes: int = 0
    memory_available_bytes: int = 0
    disk_total_bytes: int = 0               # of the filesystem that holds data_dir
    disk_free_bytes: int = 0
    nvidia_driver: Optional[str] = None
    gpus: Tuple[Gpu, ...] = ()
    reboot_needed: str = ""                 # why the GPUs cannot be used before the machine is rebooted
    warnings: Tuple[str, ...] = ()          # sentences, shown wherever the node is shown


@dataclass(frozen=True)
class NodeIdentity:
    """Who is talking: the same for every heartbeat of one agent process."""

    name: str
    agent_version: str
    boot_id: str
    address: str = "127.0.0.1"              # where routers reach the gate
    gate_port: int = 0                      # 0: no gate yet
    labels: Mapping[str, str] = field(default_factory=dict)
    fabric_address: str = ""                # in the network between nodes
    instance: str = ""                      # of its data folder: two agents of one machine are told apart by it
