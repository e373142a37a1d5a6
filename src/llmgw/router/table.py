"""The routing table as the router uses it: looked up by name, swapped whole."""
from __future__ import annotations

import hashlib
from typing import Any, Dict, List, Optional, Tuple

from llmgw.decide.breaker import Breaker
from llmgw.domain.errors import ConfigError
from llmgw.domain.route import Gauges, RoutedKey, RoutedModel, RoutedReplica, RouteTable
from llmgw.engines import registry
from llmgw.engines.base import Engine
from llmgw.parse.address import is_loopback
from llmgw.relay.forward import target_lines
from llmgw.relay.upstream import Target
from llmgw.system import tls


class Replica(Target):
    """One replica: where it is, what was read of it, how requests to it fare."""

    __slots__ = ("routed", "lines", "secret", "engine", "breaker", "seed", "slots", "queue", "in_flight_then",
                 "kv_used", "gauges", "scraped_at", "answered_at", "busy_until", "draining")

    def __init__(self, routed: RoutedReplica, context: Any = None) -> None:
        # off loopback nothing is sent without TLS, whatever the table says
        is_plain = not routed.tls_name and is_loopback(routed.host)
        super().__init__(routed.host, routed.port, None if is_plain else context or tls.nobody_context(),
                         routed.tls_name or routed.host)
        key = routed.key.reveal()
        self.lines = target_lines(routed.host, routed.port, key)
        self.secret = key.encode("latin-1")
        self.engine = _engine(routed.engine)
        self.breaker = Breaker()
        self.seed = int.from_bytes(hashlib.sha256(routed.id.encode()).digest()[:4], "big") >> 2
        self.queue: Optional[float] = None
        self.in_flight_then = 0
        self.kv_used: Optional[float] = None
        self.gauges: Optional[Gauges] = None
        self.scraped_at = float("-inf")
        self.answered_at = float("-inf")
        self.busy_until = 0.0             # it said 429 or 503
        self.update(routed)

    def update(self, routed: RoutedReplica) -> None:
        """Take what may change without its being another replica."""
        self.routed = routed
        self.slots = max(1, routed.slots)
        self.draining = routed.draining

    def forget_gauges(self) -> None:
        """What was read is too old: unknown, which is not 0."""
        self.queue = self.kv_used = self.gauges = None

    @property
    def identity(self) -> Tuple[object, ...]:
        return _identity(self.routed)


class Model:
    """One model; ``ready`` are the replicas that take new requests."""

    __slots__ = ("routed", "ready", "replicas")

    def __init__(self, routed: RoutedModel, replicas: List[Replica]) -> None:
        self.routed = routed
        self.replicas = replicas
        self.ready = [replica for replica in replicas if not replica.draining]


class Table:
    """A compiled RouteTable. Built from the one before, so that replicas that stay keep their state."""

    def __init__(self, routed: RouteTable, before: Optional["Table"] = None) -> None:
        self.routed = routed
        is_same_ca = before is not None and before.routed.ca == routed.ca
        self.context: Any = before.context if before is not None and is_same_ca else _context(routed.ca)
        known: Dict[Tuple[object, ...], Replica] = {}
        for replica in before.replicas if before is not None else ():
            stays = is_same_ca or replica.context is None
            known[replica.identity if stays else (replica.identity, "under another CA")] = replica
        self.replicas: List[Replica] = []
        self.models: Dict[str, Model] = {}        # by name and by alias
        self.listed: List[Model] = []
        for item in routed.models:
            replicas = [self._replica(known, one) for one in item.replicas]
            model = Model(item, replicas)
            self.listed.append(model)
            for alias in item.aliases:
                self.models.setdefault(alias, model)
        for model in self.listed:                 # a name wins over another model's alias
            self.models[model.routed.name] = model
        self.keys: Dict[bytes, RoutedKey] = {bytes.fromhex(key.sha256): key for key in routed.keys}
        for gone in known.values():
            gone.retire()

    def _replica(self, known: Dict[Tuple[object, ...], Replica], routed: RoutedReplica) -> Replica:
        replica = known.pop(_identity(routed), None)
        if replica is None:
            replica = Replica(routed, self.context)
        else:
            replica.update(routed)
        self.replicas.append(replica)
        return replica


def _identity(routed: RoutedReplica) -> Tuple[object, ...]:
    return (routed.id, routed.incarnation, routed.host, routed.port, routed.key, routed.engine,
            routed.tls_name)


def _context(ca: str) -> Any:
    """Return what verifies gates; without a CA nobody is believed who says that he speaks TLS."""
    return tls.client_context(ca) if ca else tls.nobody_context()


def _engine(name: str) -> Optional[Engine]:
    try:
        return registry.get(name)
    except ConfigError:                           # a newer control plane's: served, its gauges unknown
        return None
