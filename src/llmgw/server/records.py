"""What lies under which key of the store, and as which record."""
from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any, Dict, List, Mapping, Optional, Tuple

from llmgw.api import wire
from llmgw.domain.cluster import ClusterConfig
from llmgw.domain.codec import Codec, Record, text, texts, tuple_of, whole
from llmgw.domain.model import Weights
from llmgw.domain.replica import Replica
from llmgw.server.store import Delete, Entry, Operation, Put, Store

EPOCH = "epoch"               # of this leadership: grows with every start
APPLIED = "config/applied"    # the configuration that is in force: {"sha256", "config"}
LAST_ROUTES = "routes/last"   # the table as routers last got it
PEER_SECRET = "peers/secret"  # {"secret"}: what nodes show to each other's gates is made of it
RESTORED = "restored"         # a backup was put back: look first, act later
NODES = "nodes/"              # NAME -> {"name", "first_seen", "draining", "address"}
REPLICAS = "replicas/"        # ID -> REPLICA, its weights without chunks
WEIGHTS = "weights/"          # FINGERPRINT -> WEIGHTS, whole, while a replica has them
MANIFESTS = "manifests/"      # NAME -> WEIGHTS: what the mirror offers
NOTES = "notes/"              # NAME -> {"notes"}: what else was known of a model where it came from
PULLS = "pulls/"              # NAME -> {"source", "name"}: asked for by an admin, not here yet
FILES = "files/"              # SHA256 OF PATH -> {"path", "mtime_ns", "size_bytes", "weights"}
ARCHIVES = "archives/"        # ENGINE/VERSION/ASSET -> ENGINE_ARCHIVE
LOCKS = "locks/"              # ENGINE/VERSION/PLATFORM -> LOCK_VIEW, of the newest date that was asked for
LOCK_TEXTS = "lock-texts/"    # SHA256 -> {"text"}
KEYS = "keys/"                # ID -> a user's key
TOKENS = "tokens/"            # ID -> {"id", "role", "sha256", "first", …}: see admissions.py
EVENTS = "events/"            # NUMBER -> EVENT_VIEW

CLUSTER_CONFIG = Record(ClusterConfig, cluster=text, host=text, port=whole, engines=tuple_of(wire.ENGINE_WANTED),
                        models=tuple_of(wire.MODEL_SPEC), warnings=texts, names=texts, tls_certificate=text,
                        tls_key=text, tls_ca=text, mirror_bytes_per_second=whole)


class Cached:
    """Decoded objects of one prefix; an entry is decoded again only when its revision changed."""

    def __init__(self, store: Store, prefix: str, codec: Codec[Any]) -> None:
        self._store, self._prefix, self._codec = store, prefix, codec
        self._known: Dict[str, Tuple[int, Any]] = {}
        self._lock = threading.Lock()

    def all(self) -> List[Tuple[Entry, Any]]:
        """Return (entry, value) of every object, by key."""
        with self._lock:
            found, known = [], {}
            for entry in self._store.range(self._prefix):
                before = self._known.get(entry.key)
                value = before[1] if before is not None and before[0] == entry.revision \
                    else self._codec.decode(entry.value, entry.key)
                known[entry.key] = (entry.revision, value)
                found.append((entry, value))
            self._known = known
        return found


class Replicas:
    """The rows of all replicas, whole: the chunk lists of their weights are kept once per fingerprint."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._rows = Cached(store, REPLICAS, wire.REPLICA)
        self._weights = Cached(store, WEIGHTS, wire.WEIGHTS)

    def all(self) -> List[Tuple[Entry, Replica]]:
        """Return every row with its entry, by id."""
        whole_weights: Mapping[str, Weights] = {value.fingerprint: value for _, value in self._weights.all()}
        return [(entry, _with_chunks(row, whole_weights)) for entry, row in self._rows.all()]

    def writing(self, row: Replica) -> List[Operation]:
        """Return the operations that write a row."""
        bare = replace(row.weights, files=tuple(replace(file, chunks=()) for file in row.weights.files))
        operations: List[Operation] = [Put(REPLICAS + row.id, wire.REPLICA.encode(replace(row, weights=bare)))]
        if self._store.get(WEIGHTS + row.weights.fingerprint) is None:
            operations.append(Put(WEIGHTS + row.weights.fingerprint, wire.WEIGHTS.encode(row.weights)))
        return operations

    def removing(self, row: Replica, others: List[Replica]) -> List[Operation]:
        """Return the operations that forget a row, and its weights when nobody else has them."""
        operations: List[Operation] = [Delete(REPLICAS + row.id)]
        if all(other.id == row.id or other.weights.fingerprint != row.weights.fingerprint for other in others):
            operations.append(Delete(WEIGHTS + row.weights.fingerprint))
        return operations


def _with_chunks(row: Replica, whole_weights: Mapping[str, Weights]) -> Replica:
    found = whole_weights.get(row.weights.fingerprint)
    if found is None:
        return row
    chunks = {file.name: file.chunks for file in found.files}
    return replace(row, weights=replace(row.weights, files=tuple(
        replace(file, chunks=chunks.get(file.name, ())) for file in row.weights.files)))


def number(store: Store, key: str) -> int:
    """Return the whole number under ``key``, 0 when there is none."""
    entry: Optional[Entry] = store.get(key)
    return int(entry.value) if entry is not None else 0
