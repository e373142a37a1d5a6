"""Routes that change something: keys, the configuration, draining, backup."""
from __future__ import annotations

import os
import secrets
from typing import List

from llmgw.api import paths, wire
from llmgw.domain.errors import Conflict, ParseError
from llmgw.domain.view import LockView
from llmgw.server import plan
from llmgw.server.handlers_fleet import wanted_python_engine
from llmgw.server.handlers_mirror import object_of
from llmgw.server.loop import Parts, Reconciler
from llmgw.server.store_sqlite import SqliteStore
from llmgw.system import files
from llmgw.system.routes import Request, Response, Route, json_response

ADMIN = ("admin",)
READERS = ("viewer", "admin")
CONFIG_BYTES = 1 << 20


class AdminHandlers:
    """What an admin may do."""

    def __init__(self, parts: Parts, reconciler: Reconciler, data_dir: str) -> None:
        self._parts, self._reconciler, self._dir = parts, reconciler, data_dir

    def routes(self) -> List[Route]:
        return [
            Route("GET", paths.KEYS, ADMIN, self.keys),
            Route("POST", paths.KEYS, ADMIN, self.make_key),
            Route("DELETE", paths.KEY, ADMIN, self.revoke_key),
            Route("DELETE", paths.NODE, ADMIN, self.forget_node),
            Route("POST", paths.DRAIN_NODE, ADMIN, self.drain),
            Route("DELETE", paths.DRAIN_NODE, ADMIN, self.undrain),
            Route("GET", paths.ENGINE_LOCKS, READERS, self.locks),
            Route("DELETE", paths.ENGINE_LOCKS, ADMIN, self.relock),
            Route("POST", paths.PLAN, ADMIN, self.plan, CONFIG_BYTES),
            Route("POST", paths.APPLY, ADMIN, self.apply),
            Route("GET", paths.BACKUP, ADMIN, self.backup),
        ]

    def keys(self, request: Request) -> Response:
        return json_response({"items": [wire.KEY_VIEW.encode(key) for key in self._parts.tokens.keys()]})

    def locks(self, request: Request) -> Response:
        engine = wanted_python_engine(self._parts, request.args["engine"], request.args["version"])
        engines = self._parts.engines
        found = [wire.LOCK_VIEW.encode(view) for view in engines.locks.views(engine)]
        return json_response({"items": found, "as_of": engines.locks.as_of(engine)[0], "tools": engines.tools(engine),
                              "with_ray": engine.with_ray})

    def relock(self, request: Request) -> Response:
        engine = wanted_python_engine(self._parts, request.args["engine"], request.args["version"])
        gone = self._parts.engines.locks.relock(engine)
        self._parts.nodes.poke.set()
        return _locks(gone)

    def make_key(self, request: Request) -> Response:
        data = object_of(request)
        name, models = data.get("name"), data.get("models", [])
        if not isinstance(name, str) or not isinstance(models, list):
            raise ParseError("a key needs a name (text), and may have models (a list of names)")
        made = self._parts.tokens.make_key(name, tuple(models))
        self._parts.events.add("server", "KeyMade", f"key {made.id} ({made.name})")
        self._parts.nodes.poke.set()
        return json_response(wire.KEY_VIEW.encode(made), 201)

    def revoke_key(self, request: Request) -> Response:
        gone = self._parts.tokens.revoke_key(request.args["key"])
        self._parts.events.add("server", "KeyRevoked", f"key {gone.id} ({gone.name})")
        self._parts.nodes.poke.set()
        return json_response(wire.KEY_VIEW.encode(gone))

    def drain(self, request: Request) -> Response:
        return self._set_drain(request.args["node"], True)

    def undrain(self, request: Request) -> Response:
        return self._set_drain(request.args["node"], False)

    def _set_drain(self, node: str, draining: bool) -> Response:
        self._parts.nodes.drain(node, draining)
        self._parts.events.add(f"node/{node}", "Drain" if draining else "Undrain", "by an admin")
        return Response(204)

    def forget_node(self, request: Request) -> Response:
        """Forget a node that is gone for good; its replicas are replaced at once."""
        node = request.args["node"]
        there = [row.id for row in self._reconciler.snapshot.replicas
                 if any(shard.node == node for shard in row.shards)]
        reached = sorted(self._parts.routers.answering().intersection(there))
        if reached:
            raise Conflict(f"node {node} is not gone: routers still reach its replica {', '.join(reached)}",
                           hint=f"llmgw.pyz ctl drain {node} moves what it serves; or end what runs there")
        self._parts.nodes.forget(node)
        self._parts.events.add(f"node/{node}", "Forgotten", "by an admin")
        return json_response({"replicas": there})

    # The configuration.

    def plan(self, request: Request) -> Response:
        loaded = self._parts.config.plan(request.body)
        wanted = self._reconciler.wanted(loaded.config)
        return json_response(plan.plan(loaded.config, wanted, self._reconciler.snapshot, self._reconciler.traffic()))

    def apply(self, request: Request) -> Response:
        data = object_of(request) if request.body else {}
        state = self._parts.config.apply(confirmed=data.get("confirm") is True)
        self._parts.nodes.poke.set()
        if state.problem:
            raise ParseError(state.problem, hint="the configuration in force was kept")
        return json_response({"applied": state.held is None, "needs_confirm": list(state.held_because)})

    def backup(self, request: Request) -> Response:
        store = self._parts.store
        assert isinstance(store, SqliteStore)
        scratch = os.path.join(self._dir, f".backup-{secrets.token_hex(6)}")
        try:
            store.backup(scratch)
            source = open(scratch, "rb")
        finally:
            files.remove(scratch)
        return Response(file=source, content_type="application/vnd.sqlite3")


def _locks(found: List[LockView]) -> Response:
    return json_response({"items": [wire.LOCK_VIEW.encode(view) for view in found]})
