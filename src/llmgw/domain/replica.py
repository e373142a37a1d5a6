"""One served copy of a model: what is wanted, and what a node sees of its part."""
from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Optional, Tuple

from llmgw.domain.model import ModelSpec, Weights
from llmgw.domain.secret import Secret

CANNOT_STOP = "CannotStop"        # the reason of a shard of which something does not end, even by KILL
WAITING_FOR_GANG = "WaitingForGang"   # of one that could start, and waits for the other ranks


@dataclass(frozen=True)
class GpuSlot:
    """A GPU as placement used it: the uuid names it, the index numbers it for CUDA_VISIBLE_DEVICES."""

    uuid: str
    index: int


@dataclass(frozen=True)
class Shard:
    """A replica's part on one node; rank 0 leads and serves."""

    rank: int
    node: str
    gpus: Tuple[GpuSlot, ...] = ()


@dataclass(frozen=True)
class Gang:
    """What a shard of a replica over several nodes is told of the others."""

    size: int                 # how many nodes
    turn: int                 # counts the starts of the whole: all ranks run in the same one
    address: str              # this node's own, in the network between nodes
    lead_address: str         # rank 0's
    meet_port: int = 0        # where rank 0 is met; 0: it has not said so yet
    lead_ready: bool = False  # rank 0 has answered, which takes every rank
    waits_for: str = ""       # rank 0 only: who cannot start yet, so that it would wait in vain


class ReplicaWish(str, enum.Enum):
    """What the control plane wants of a replica."""

    RUN = "run"
    DRAIN = "drain"           # no new requests; keep running until idle or the grace is over
    STOP = "stop"             # nodes end it; the row goes when every node says so


@dataclass(frozen=True)
class Replica:
    """Desired: one complete served copy, as the store keeps it."""

    id: str
    model: ModelSpec
    engine_version: str
    weights: Weights
    shards: Tuple[Shard, ...]
    key: Secret
    wish: ReplicaWish = ReplicaWish.RUN
    created_at: float = 0.0
    wish_since: float = 0.0   # wall clock; when ``wish`` last changed
    reason: str = ""          # why it is drained or stopped
    turn: int = 1             # of a gang: counts the starts of the whole


@dataclass(frozen=True)
class ShardWanted:
    """Desired, as one node is told: run this until it is no longer in the list."""

    id: str                   # REPLICA.RANK
    replica: str
    rank: int
    model: ModelSpec
    engine_version: str
    weights: Weights
    key: Secret
    gpus: Tuple[GpuSlot, ...] = ()
    gang: Optional[Gang] = None       # None: the replica is on this node alone


class ShardState(str, enum.Enum):
    """The life of a shard on its node; decide/lifecycle.py has the table."""

    WAITING = "waiting"       # for its engine
    FETCHING = "fetching"     # weights
    STARTING = "starting"
    READY = "ready"
    UNREADY = "unready"       # runs, but does not answer as it must
    BACKOFF = "backoff"       # ended unasked; will be started again
    CRASHLOOP = "crashloop"   # ended unasked too often; tried again every five minutes
    STOPPING = "stopping"
    STOPPED = "stopped"


@dataclass(frozen=True)
class FirstFailure:
    """What the first failure of a row of failures looked like; kept until the shard has been well."""

    at: float                 # wall clock of the node
    message: str
    command: str              # without secrets
    log_tail: str


@dataclass(frozen=True)
class ShardObserved:
    """Observed: what a node says of one shard."""

    id: str
    state: ShardState
    reason: str = ""
    message: str = ""
    since: float = 0.0        # wall clock of the node, for display only
    incarnation: int = 0      # counts starts; a new process never gets an old socket
    pid: Optional[int] = None
    port: Optional[int] = None
    restarts: int = 0
    first_failure: Optional[FirstFailure] = None
    turn: int = 0             # of its gang, in which its program was started last
    meet_port: int = 0        # where the other ranks meet this one
    outdated: str = ""        # why what runs is not what would be started now, in words
