"""The one call between agent and control plane: what was observed, and the answer."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping, Optional, Tuple

from llmgw.domain.engine import EngineObserved, EngineWanted
from llmgw.domain.model import WeightsObserved
from llmgw.domain.node import NodeFacts, NodeIdentity
from llmgw.domain.replica import ShardObserved, ShardWanted


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
class NodeDesired:
    """The whole desired state of one node. What is not in here is not wanted."""

    engines: Tuple[EngineWanted, ...] = ()
    shards: Tuple[ShardWanted, ...] = ()


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
