"""What a router needs to serve with every control plane down."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Mapping, Optional, Tuple

from llmgw.domain.model import Task
from llmgw.domain.secret import Secret


@dataclass(frozen=True)
class RoutedReplica:
    """One replica behind the gate of its node."""

    id: str
    node: str
    host: str
    port: int                 # of the gate
    key: Secret
    engine: str
    slots: int = 1            # requests it runs at once
    incarnation: int = 0      # part of the connection pool's key
    draining: bool = False
    tls_name: str = ""        # in the certificate of its gate; empty: no TLS


@dataclass(frozen=True)
class RoutedModel:
    """One model; ``why_not`` is the nodes' own sentence while nothing is ready."""

    name: str
    engine: str
    aliases: Tuple[str, ...] = ()
    task: Task = Task.CHAT
    created: int = 0
    context_length: Optional[int] = None
    replicas: Tuple[RoutedReplica, ...] = ()
    why_not: str = ""
    retry_after_seconds: int = 5


@dataclass(frozen=True)
class RoutedKey:
    """A user's key, known only by its sha256 (hex). ``models`` empty: all."""

    id: str
    sha256: str
    models: Tuple[str, ...] = ()


@dataclass(frozen=True)
class RouteTable:
    """Swapped whole. ``revision`` grows with every change."""

    cluster: str
    epoch: int
    revision: int
    models: Tuple[RoutedModel, ...] = ()
    keys: Tuple[RoutedKey, ...] = ()
    ca: str = ""              # that signs the certificates of gates, as PEM


@dataclass(frozen=True)
class Gauges:
    """Numbers read from an engine's metrics page; ``None`` is unknown, never 0."""

    running: Optional[float] = None
    waiting: Optional[float] = None
    kv_used: Optional[float] = None          # 0..1
    generated_tokens: Optional[float] = None  # a counter
    in_flight: int = 0                       # the router's own


@dataclass(frozen=True)
class RouterReport:
    """What a router tells the control plane, every few seconds."""

    router: str
    table_revision: int
    replicas: Mapping[str, Gauges] = field(default_factory=dict)
    answering: Tuple[str, ...] = ()          # replicas that answered a request or scrape just now
