"""What the control plane shows: the same values for ctl, the page and programs."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Optional, Tuple

from llmgw.domain.engine import Asset, EngineObserved
from llmgw.domain.model import Weights, WeightsObserved
from llmgw.domain.node import NodeFacts, NodeIdentity
from llmgw.domain.replica import GpuSlot, ShardObserved
from llmgw.domain.route import Gauges


@dataclass(frozen=True)
class NodeView:
    """``state`` is ready, suspect, unreachable, lost or stopped; ``message`` says why not ready."""

    name: str
    state: str
    message: str
    identity: NodeIdentity
    facts: NodeFacts
    probed: bool
    seen_seconds_ago: float
    draining: bool = False
    clock_skew_seconds: float = 0.0
    engines: Tuple[EngineObserved, ...] = ()
    weights: Tuple[WeightsObserved, ...] = ()
    replicas: Tuple[str, ...] = ()
    warnings: Tuple[str, ...] = ()


@dataclass(frozen=True)
class WeightsOnNode:
    """Where one node stands with a model's weights."""

    node: str
    phase: str                # absent, fetching, whole, damaged, failed
    percent: int = 0
    seconds_left: Optional[int] = None
    message: str = ""


@dataclass(frozen=True)
class ModelView:
    """``why_not`` holds one sentence per node, or why there is no replica to place yet."""

    name: str
    engine: str
    engine_version: str
    task: str
    weights: str
    wanted: int
    ready: int
    aliases: Tuple[str, ...] = ()
    replicas: Tuple[str, ...] = ()
    why_not: Tuple[str, ...] = ()
    context_length: Optional[int] = None
    size_bytes: Optional[int] = None
    vision: bool = False
    nodes: Tuple[WeightsOnNode, ...] = ()


@dataclass(frozen=True)
class ShardView:
    """A replica's part on a node, wanted and observed side by side."""

    rank: int
    node: str
    gpus: Tuple[GpuSlot, ...] = ()
    observed: Optional[ShardObserved] = None


@dataclass(frozen=True)
class ReplicaView:
    """``state`` sums up the shards; ``message`` is the node's own sentence."""

    id: str
    model: str
    engine: str
    engine_version: str
    wish: str
    state: str
    reason: str
    message: str
    created_at: float
    shards: Tuple[ShardView, ...] = ()
    gauges: Optional[Gauges] = None


@dataclass(frozen=True)
class EngineView:
    """One wanted engine over the fleet."""

    name: str
    version: str
    assets: Tuple[Asset, ...] = ()
    assets_problem: str = ""
    nodes: Tuple[Tuple[str, EngineObserved], ...] = ()


@dataclass(frozen=True)
class KeyView:
    """A user's key without its secret. ``secret`` is filled once, in the answer that makes it."""

    id: str
    name: str
    created_at: float
    models: Tuple[str, ...] = ()
    revoked_at: Optional[float] = None
    secret: str = ""


@dataclass(frozen=True)
class TokenView:
    """A token without its secret. ``kind``: join (a string to join with), credential (of who joined), api.

    ``secret`` is filled once, in the answer that makes it.
    """

    id: str
    role: str
    kind: str
    made_at: float
    expires_at: Optional[float] = None
    name: str = ""
    uses: int = 0
    used: int = 0
    revoked_at: Optional[float] = None
    secret: str = ""
    line: str = ""            # what to run on the new machine; it holds the secret


@dataclass(frozen=True)
class EventView:
    """Something changed: what, when, why."""

    id: int
    at: float
    subject: str              # node/NAME, model/NAME, replica/ID, engine/NAME, config, server
    reason: str
    message: str


@dataclass(frozen=True)
class EngineArchive:
    """An engine file that the mirror holds."""

    engine: str
    version: str
    asset: Asset
    imported_at: float = 0.0
    source: str = ""          # "import" or the address it came from


@dataclass(frozen=True)
class LockView:
    """The fleet's list of packages for an engine on one platform. ``sha256`` empty: a new one is to be made."""

    engine: str
    version: str
    platform: str
    as_of: str                # the packages are those that there were then
    sha256: str = ""
    packages: int = 0
    source: str = ""          # "llmgw" for one that came with it, or node/NAME
    made_at: float = 0.0


@dataclass(frozen=True)
class WeightsUse:
    """Who uses weights of the mirror: models of server.yaml, replicas that are there, nodes that hold them."""

    name: str
    models: Tuple[str, ...] = ()
    replicas: Tuple[str, ...] = ()
    nodes: Tuple[str, ...] = ()
    damaged: Tuple[str, ...] = ()    # files of it that the mirror has lost, or found damaged


@dataclass(frozen=True)
class MirrorView:
    """What the mirror holds, and what is under way."""

    models: Tuple[Weights, ...] = ()
    engines: Tuple[EngineArchive, ...] = ()
    activity: Tuple[str, ...] = ()   # sentences: "pulling hf:…: 43 %"
    free_bytes: int = 0
    uses: Tuple[WeightsUse, ...] = ()
    total_bytes: int = 0             # of the filesystem
