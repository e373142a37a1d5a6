"""Routes that change something: keys, the mirror, the configuration, draining, backup."""
from __future__ import annotations

import os
import secrets
from typing import Any, List, Mapping

from llmgw.api import paths, wire
from llmgw.domain.digest import sha256_hex
from llmgw.domain.errors import Conflict, ParseError
from llmgw.domain.model import Weights
from llmgw.domain.view import LockView, MirrorView
from llmgw.server import plan
from llmgw.server.handlers_fleet import wanted_python_engine
from llmgw.server.loop import Parts, Reconciler
from llmgw.server.mirror import Mirror
from llmgw.server.store_sqlite import SqliteStore
from llmgw.system import files
from llmgw.system.routes import Request, Response, Route, json_response

ADMIN = ("admin",)
READERS = ("viewer", "admin")
MANIFEST_BYTES = 16 << 20
CONFIG_BYTES = 1 << 20


class AdminHandlers:
    """What an admin may do."""

    def __init__(self, parts: Parts, reconciler: Reconciler, mirror: Mirror, data_dir: str) -> None:
        self._parts, self._reconciler, self._mirror, self._dir = parts, reconciler, mirror, data_dir

    def routes(self) -> List[Route]:
        return [
            Route("GET", paths.KEYS, ADMIN, self.keys),
            Route("POST", paths.KEYS, ADMIN, self.make_key),
            Route("DELETE", paths.KEY, ADMIN, self.revoke_key),
            Route("DELETE", paths.NODE, ADMIN, self.forget_node),
            Route("POST", paths.DRAIN_NODE, ADMIN, self.drain),
            Route("DELETE", paths.DRAIN_NODE, ADMIN, self.undrain),
            Route("GET", paths.MIRROR, READERS, self.mirror),
            Route("GET", paths.UPLOAD, ADMIN, self.upload_state),
            Route("PUT", paths.UPLOAD, ADMIN, self.upload_piece, paths.PIECE_BYTES),
            Route("POST", paths.UPLOAD_FINISH, ADMIN, self.upload_finish),
            Route("GET", paths.MIRROR_MODEL, READERS, self.model),
            Route("PUT", paths.MIRROR_MODEL, ADMIN, self.put_model, MANIFEST_BYTES),
            Route("DELETE", paths.MIRROR_MODEL, ADMIN, self.remove_model),
            Route("PUT", paths.MIRROR_ENGINE, ADMIN, self.put_archive),
            Route("DELETE", paths.MIRROR_ENGINE, ADMIN, self.remove_archive),
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
        return json_response({"items": found, "as_of": engines.locks.as_of(engine)[0], "tools": engines.tools(engine)})

    def relock(self, request: Request) -> Response:
        engine = wanted_python_engine(self._parts, request.args["engine"], request.args["version"])
        gone = self._parts.engines.locks.relock(engine)
        self._parts.nodes.poke.set()
        return _locks(gone)

    def make_key(self, request: Request) -> Response:
        data = _object(request)
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
        self._parts.nodes.forget(node)
        self._parts.events.add(f"node/{node}", "Forgotten", "by an admin")
        return Response(204)

    # The mirror.

    def mirror(self, request: Request) -> Response:
        parts = self._parts
        models = {weights.name: weights for weights in self._wanted_weights()}
        models.update((weights.name, weights) for weights in self._mirror.models())
        view = MirrorView(tuple(models[name] for name in sorted(models)), tuple(self._mirror.archives()),
                          tuple([*parts.sources.activity(), *parts.engines.activity()]),
                          files.free_bytes(self._mirror.folder))
        return Response(body=wire.dumps(wire.MIRROR_VIEW, view))

    def _wanted_weights(self) -> List[Weights]:
        return [want.weights for want in self._reconciler.snapshot.wanted if want.weights is not None]

    def upload_state(self, request: Request) -> Response:
        received, complete = self._mirror.received(sha256_hex(request.args["digest"]))
        return json_response({"received_bytes": received, "complete": complete})

    def upload_piece(self, request: Request) -> Response:
        if "offset" not in request.query:
            raise ParseError("say with ?offset=N where the piece belongs")
        offset = int(request.number("offset", 0, 1 << 53))
        received = self._mirror.append(sha256_hex(request.args["digest"]), offset, request.body)
        return json_response({"received_bytes": received, "complete": False})

    def upload_finish(self, request: Request) -> Response:
        size = _size(_object(request))
        self._mirror.finish(sha256_hex(request.args["digest"]), size)
        return json_response({"received_bytes": size, "complete": True})

    def model(self, request: Request) -> Response:
        found = self._mirror.model(request.args["model"])
        if found is None:
            found = next((one for one in self._wanted_weights() if one.name == request.args["model"]), None)
        if found is None:
            return json_response({"reason": "NotFound", "message": "no such model in the mirror", "hint": None}, 404)
        return Response(body=wire.dumps(wire.WEIGHTS, found))

    def put_model(self, request: Request) -> Response:
        given = wire.WEIGHTS.decode(request.json(), "manifest")
        if given.name != request.args["model"]:
            raise ParseError(f"a manifest of {given.name:.100} was sent for {request.args['model']:.100}")
        made = self._mirror.register_model(given)
        self._parts.events.add(f"model/{made.name}", "Imported", f"{len(made.files)} files, {made.size_bytes} bytes")
        self._parts.nodes.poke.set()
        return Response(body=wire.dumps(wire.WEIGHTS, made))

    def remove_model(self, request: Request) -> Response:
        name = request.args["model"]
        users = [want.spec.name for want in self._reconciler.snapshot.wanted if want.spec.weights == f"mirror:{name}"]
        if users:
            raise Conflict(f"the weights {name} are used by {', '.join(users)}",
                           hint="remove the model from server.yaml first")
        rows = [row.weights for _, row in self._parts.rows.all()]
        self._mirror.remove_model(name, [*rows, *self._wanted_weights()])
        self._parts.events.add(f"model/{name}", "RemovedFromMirror", "by an admin")
        return Response(204)

    def put_archive(self, request: Request) -> Response:
        data, args = _object(request), request.args
        digest = data.get("sha256")
        if not isinstance(digest, str):
            raise ParseError("an archive needs sha256 and size_bytes")
        made = self._mirror.register_archive(args["engine"], args["version"], args["asset"], digest, _size(data))
        self._parts.events.add(f"engine/{made.engine}", "Imported", f"{made.version}: {made.asset.name}")
        self._parts.nodes.poke.set()
        return Response(body=wire.dumps(wire.ENGINE_ARCHIVE, made))

    def remove_archive(self, request: Request) -> Response:
        args = request.args
        self._mirror.remove_archive(args["engine"], args["version"], args["asset"])
        self._parts.nodes.poke.set()
        return Response(204)

    # The configuration.

    def plan(self, request: Request) -> Response:
        loaded = self._parts.config.plan(request.body)
        wanted = self._reconciler.wanted(loaded.config)
        return json_response(plan.plan(loaded.config, wanted, self._reconciler.snapshot, self._reconciler.traffic()))

    def apply(self, request: Request) -> Response:
        data = _object(request) if request.body else {}
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


def _object(request: Request) -> Mapping[str, Any]:
    data = request.json()
    if not isinstance(data, dict):
        raise ParseError("the body must be a JSON object")
    return data


def _size(data: Mapping[str, Any]) -> int:
    size = data.get("size_bytes")
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise ParseError("size_bytes must be a whole number")
    return size


def _locks(found: List[LockView]) -> Response:
    return json_response({"items": [wire.LOCK_VIEW.encode(view) for view in found]})
