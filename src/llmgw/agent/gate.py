"""The one door of a node: who shows a replica's key reaches that engine's allowed paths; another node, with a key
of its own, the blobs; nobody else anything."""
from __future__ import annotations

import hashlib
import hmac
import os
from typing import Dict, FrozenSet, Optional, Tuple

from llmgw.agent import gate_blobs
from llmgw.agent.gate_blobs import BlobDoor
from llmgw.domain.errors import ConfigError
from llmgw.domain.gate import GateEntry, GateTable
from llmgw.engines import registry
from llmgw.parse.http1 import ResponseHead
from llmgw.relay.forward import request_bytes, request_id, target_lines
from llmgw.relay.lease import Lease, Outcome, Owner
from llmgw.relay.reply import Reply, error_reply, json_reply, no_room, relayed_head, too_large
from llmgw.relay.server import MAX_BODY_BYTES, Application, Request
from llmgw.relay.upstream import Target

# The router decides how long an answer may take; when it loses patience it closes, and so do we.
PATIENCE_SECONDS = 24 * 3600.0


class Door:
    """One entry of the table, with its connections to the engine."""

    def __init__(self, entry: GateEntry) -> None:
        self.entry = entry
        self.target = Target("127.0.0.1", entry.port)
        self.paths = _paths(entry.engine)


class Gate(Application):
    """Serves the doors of the current table, which is swapped whole."""

    def __init__(self) -> None:
        self._doors: Dict[str, Door] = {}         # by the key's sha256
        self.blobs = BlobDoor()
        self.table_sha256 = ""

    def swap(self, table: GateTable, table_sha256: str) -> None:
        """Take a new table; doors that are the same keep their connections."""
        old, self._doors = self._doors, {}
        for entry in table.entries:
            kept = old.pop(entry.key_sha256, None)
            if kept is not None and kept.entry != entry:
                kept.target.retire()
                kept = None
            self._doors[entry.key_sha256] = kept or Door(entry)
        for door in old.values():
            door.target.retire()
        self.blobs.swap(table)
        self.table_sha256 = table_sha256

    def sweep(self, now: float) -> None:
        for door in self._doors.values():
            door.target.sweep(now)

    def check(self, request: Request) -> Optional[Reply]:
        head = request.head
        request.id = request_id(head.headers)
        if request.head.path == b"/healthz" and head.method == b"GET":
            return json_reply({"status": "ok", "pid": os.getpid(), "table_sha256": self.table_sha256})
        authorization = head.headers.get(b"authorization", b"")
        if head.path.startswith(gate_blobs.PREFIX):
            return self.blobs.check(request, bearer(authorization))
        door = self._door(authorization)
        if door is None:
            reply = error_reply(401, "no replica of this node has this key", "invalid_replica_key")
            if not authorization:
                return reply
            # a router may have a key before we have it: it is not to stay away for a minute
            return request.connection.listener.wrong_key(request, reply, wait_seconds=1)
        if (head.method.decode("ascii"), request.head.path.decode("ascii")) not in door.paths:
            return error_reply(404, "the gate does not let this path through", "path_not_allowed")
        if head.length > MAX_BODY_BYTES:
            return too_large(MAX_BODY_BYTES)
        if request.connection.listener.body_bytes + head.length > request.connection.listener.max_body_bytes:
            return no_room()
        return None

    def serve(self, request: Request) -> None:
        if request.head.path.startswith(gate_blobs.PREFIX):
            self.blobs.serve(request, bearer(request.head.headers.get(b"authorization", b"")))
            return
        door = self._door(request.head.headers.get(b"authorization", b""))
        if door is None:                          # the table changed while the body came
            request.reply(error_reply(401, "no replica of this node has this key", "invalid_replica_key"))
            return
        request.owner = Passage(request, door)
        request.owner.start()

    def _door(self, authorization: bytes) -> Optional[Door]:
        key = bearer(authorization)
        if not key:
            return None
        digest = hashlib.sha256(key).hexdigest()
        door = self._doors.get(digest)
        if door is None or not hmac.compare_digest(digest, door.entry.key_sha256):
            return None
        return door


class Passage(Owner):
    """One request on its way through the gate."""

    __slots__ = ("request", "door", "lease")

    def __init__(self, request: Request, door: Door) -> None:
        self.request, self.door = request, door
        self.lease = Lease(self, door.target, request, PATIENCE_SECONDS)

    def start(self) -> None:
        request, head = self.request, self.request.head
        key = bearer(head.headers[b"authorization"]).decode("latin-1")
        self.lease.start(request_bytes(
            head.method, head.path, target_lines("127.0.0.1", self.door.entry.port, key), head,
            request.id, request.body))

    def head_arrived(self, lease: Lease, head: ResponseHead) -> None:
        request = self.request
        chunked = head.length is None and request.head.minor == 1
        request.close = request.close or (head.length is None and not chunked)
        lease.relay(relayed_head(head, request.connection.listener.stamp.lines, chunked=chunked, close=request.close),
                    chunked=chunked, scan=False)

    def failed(self, lease: Lease, outcome: Outcome, why: str) -> None:
        if outcome is Outcome.REFUSED:
            message, code = "the engine does not accept connections", "engine_refused"
        else:
            message, code = "the engine ended the connection without an answer", "engine_reset"
        self.request.reply(error_reply(502, message, code))

    def ended(self, lease: Lease, outcome: Outcome) -> None:
        pass

    def client_gone(self) -> None:
        self.lease.release(Outcome.GIVEN_UP)

    def pause(self) -> None:
        self.lease.pause()

    def resume(self) -> None:
        self.lease.resume()

    def sweep(self, now: float) -> None:
        self.lease.sweep(now, self.request.connection.stalled)


def bearer(authorization: bytes) -> bytes:
    """Return the key of an Authorization header, empty when it is not a Bearer."""
    scheme, _, key = authorization.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


def _paths(name: str) -> FrozenSet[Tuple[str, str]]:
    try:
        engine = registry.get(name)
    except ConfigError:                           # an engine of a newer agent: nothing of it is open
        return frozenset()
    return engine.allowed_paths | {("GET", path) for path in (engine.health_path, engine.metrics_path,
                                                              engine.models_path)}
