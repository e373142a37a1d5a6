"""The one call between agent and control plane: what was observed, and the answer."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping, Optional, Tuple

from llmgw.domain.engine import EngineObserved, EngineWanted
from llmgw.domain.gate import PeerDoor
from llmgw.domain.model import WeightsObserved
from llmgw.domain.node import NodeFacts, NodeIdentity
from llmgw.domain.replica import ShardObserved, ShardWanted
from llmgw.domain.secret import Secret


@dataclass(frozen=True)
class LogTail:
    """The answer to a request for a log's end."""

    request: str
    text: str
    problem: str = ""


@dataclass(frozen=True)
class NodeObserved:
    """Everything one node last saw. ``probed`` false: an empty engine list means nothing yet."""

    identity: NodeIdentity
    facts: NodeFacts
    probed: bool
    epoch: int = 0            # of the desired state it acts on
    generation: int = 0
    engines: Tuple[EngineObserved, ...] = ()
    weights: Tuple[WeightsObserved, ...] = ()
    shards: Tuple[ShardObserved, ...] = ()
    clock: float = 0.0        # the node's wall clock, only to show its skew
    stopping: bool = False    # the agent's last words: it is being shut down on purpose


@dataclass(frozen=True)
class Peer:
    """Another node that has, or fetches, weights that this one wants; its gate gives them for the key."""

    node: str
    host: str
    port: int
    key: Secret
    fingerprints: Tuple[str, ...]
    tls_name: str = ""        # in the certificate of its gate; empty: it speaks plain HTTP, on loopback


@dataclass(frozen=True)
class Share:
    """Which part of weights a node fetches first: ``place`` of ``count``, each of another node's another."""

    fingerprint: str
    place: int
    count: int


@dataclass(frozen=True)
class NodeDesired:
    """The whole desired state of one node. What is not in here is not wanted."""

    engines: Tuple[EngineWanted, ...] = ()
    shards: Tuple[ShardWanted, ...] = ()
    peers: Tuple[Peer, ...] = ()          # to be asked for weights, before the control plane
    readers: Tuple[PeerDoor, ...] = ()    # nodes that may read blobs here
    shares: Tuple[Share, ...] = ()        # of weights that several nodes shall have


@dataclass(frozen=True)
class NodeRequest:
    """A small question that rides in the answer, such as: send the tail of this log."""

    id: str
    kind: str                 # "log-tail"; unknown kinds are refused with a sentence
    args: Mapping[str, str]


@dataclass(frozen=True)
class HeartbeatAnswer:
    """``desired`` is absent when the node already acts on ``(epoch, generation)``."""

    cluster: str
    epoch: int
    generation: int
    call_again_seconds: float
    desired: Optional[NodeDesired] = None
    requests: Tuple[NodeRequest, ...] = ()
