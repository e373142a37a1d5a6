"""What server.yaml and agent.yaml say, decoded."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Mapping, Optional, Tuple

from llmgw.domain.engine import EngineWanted
from llmgw.domain.model import ModelSpec


@dataclass(frozen=True)
class ClusterConfig:
    """Desired state as a person wrote it. Invalid files never become one of these."""

    cluster: str = "llmgw"
    host: str = "127.0.0.1"
    port: int = 7800
    engines: Tuple[EngineWanted, ...] = ()
    models: Tuple[ModelSpec, ...] = ()
    warnings: Tuple[str, ...] = ()
    names: Tuple[str, ...] = ()              # by which others call the control plane, besides its own
    tls_certificate: str = ""                # the operator's own, instead of one that is made
    tls_key: str = ""
    tls_ca: str = ""
    mirror_bytes_per_second: int = 0         # what all nodes together may fetch; 0: no limit


@dataclass(frozen=True)
class OperatorEngine:
    """An engine that agent.yaml names on purpose: a program of the operator's own."""

    name: str
    path: str                 # a llama-server binary, or a Python interpreter


@dataclass(frozen=True)
class AgentConfig:
    """agent.yaml, or the flags that stand for it."""

    servers: Tuple[str, ...] = ()
    node: str = ""            # empty: the machine's host name
    data_dir: str = ""        # empty: the default folder
    address: str = "127.0.0.1"
    fabric_address: str = ""
    gate_port: int = 7802
    engine_ports: int = 7900  # first of the block
    labels: Mapping[str, str] = field(default_factory=dict)
    exclude_gpus: Tuple[int, ...] = ()
    install_packages: bool = True
    engine_user: str = ""     # empty: llmgw-engine when the agent is root, else the agent's own user
    operator_engines: Tuple[OperatorEngine, ...] = ()
    cpu_engines: Tuple[str, ...] = ()         # whose CPU build is taken on purpose
    token_file: str = ""
    http_proxy: Optional[str] = None
    package_index: Optional[str] = field(default=None, repr=False)    # may hold a login
