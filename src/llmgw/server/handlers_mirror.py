"""Routes of the mirror: what it holds, uploads, manifests, notes, pulls, looking after it."""
from __future__ import annotations

from typing import Any, Dict, List, Mapping, Sequence

from llmgw.api import paths, wire
from llmgw.domain.digest import sha256_hex
from llmgw.domain.errors import Conflict, NotFound, ParseError
from llmgw.domain.model import Weights, WeightsPhase
from llmgw.domain.view import MirrorView, WeightsUse
from llmgw.server import linking
from llmgw.server.loop import Parts, Reconciler
from llmgw.server.mirror import Mirror
from llmgw.server.mirror_care import Care
from llmgw.server.pulls import Pulls
from llmgw.system import files
from llmgw.system.routes import Request, Response, Route, json_response

ADMIN = ("admin",)
READERS = ("viewer", "admin")
MANIFEST_BYTES = 16 << 20
NOTES_BYTES = 2 << 20
MOST_NAMED = 20                # nodes of one model in a list


class MirrorHandlers:
    """What an admin does with weights and engine archives."""

    def __init__(self, parts: Parts, reconciler: Reconciler, mirror: Mirror, pulls: Pulls) -> None:
        self._parts, self._reconciler, self._mirror, self._pulls = parts, reconciler, mirror, pulls
        self._care = Care(mirror)

    def routes(self) -> List[Route]:
        return [
            Route("GET", paths.MIRROR, READERS, self.mirror),
            Route("GET", paths.UPLOAD, ADMIN, self.upload_state),
            Route("PUT", paths.UPLOAD, ADMIN, self.upload_piece, paths.PIECE_BYTES),
            Route("POST", paths.UPLOAD_FINISH, ADMIN, self.upload_finish),
            Route("POST", paths.UPLOAD_LINK, ADMIN, self.upload_link),
            Route("GET", paths.MIRROR_MODEL, READERS, self.model),
            Route("PUT", paths.MIRROR_MODEL, ADMIN, self.put_model, MANIFEST_BYTES),
            Route("DELETE", paths.MIRROR_MODEL, ADMIN, self.remove_model),
            Route("GET", paths.MIRROR_NOTES, READERS, self.notes),
            Route("PUT", paths.MIRROR_NOTES, ADMIN, self.put_notes, NOTES_BYTES),
            Route("PUT", paths.MIRROR_ENGINE, ADMIN, self.put_archive),
            Route("DELETE", paths.MIRROR_ENGINE, ADMIN, self.remove_archive),
            Route("POST", paths.MIRROR_VERIFY, ADMIN, self.verify),
            Route("POST", paths.MIRROR_GC, ADMIN, self.collect),
            Route("POST", paths.MIRROR_PULLS, ADMIN, self.pull),
            Route("DELETE", paths.MIRROR_PULLS, ADMIN, self.give_up_pull),
        ]

    # What there is.

    def mirror(self, request: Request) -> Response:
        parts = self._parts
        models = {weights.name: weights for weights in self._wanted_weights()}
        models.update((weights.name, weights) for weights in self._mirror.models())
        held = [models[name] for name in sorted(models)]
        activity = dict.fromkeys([*parts.sources.activity(), *parts.engines.activity()])
        view = MirrorView(tuple(held), tuple(self._mirror.archives()), tuple(activity),
                          files.free_bytes(self._mirror.folder), tuple(map(self._use, held)),
                          files.total_bytes(self._mirror.folder))
        return Response(body=wire.dumps(wire.MIRROR_VIEW, view))

    def _use(self, weights: Weights) -> WeightsUse:
        snapshot = self._reconciler.snapshot
        models = [want.spec.name for want in snapshot.wanted
                  if want.spec.weights == f"mirror:{weights.name}" or (
                      want.weights is not None and want.weights.name == weights.name
                      and not want.spec.weights.startswith("mirror:"))]
        nodes = [name for name, node in snapshot.nodes.items() if node.observed is not None and any(
            seen.fingerprint == weights.fingerprint and seen.phase is WeightsPhase.WHOLE
            for seen in node.observed.weights)]
        replicas = [row.id for row in snapshot.replicas if row.weights.fingerprint == weights.fingerprint]
        return WeightsUse(weights.name, tuple(models), tuple(replicas), tuple(nodes[:MOST_NAMED]),
                          self._mirror.lost(weights))

    def _wanted_weights(self) -> List[Weights]:
        return [want.weights for want in self._reconciler.snapshot.wanted if want.weights is not None]

    def _needed(self) -> List[Weights]:
        """Return all weights that something wants, besides what the mirror has under a name."""
        return [*(row.weights for _, row in self._parts.rows.all()), *self._wanted_weights()]

    # Uploads.

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
        size = size_of(object_of(request))
        self._mirror.finish(sha256_hex(request.args["digest"]), size)
        return json_response({"received_bytes": size, "complete": True})

    def upload_link(self, request: Request) -> Response:
        path = object_of(request).get("path")
        if not isinstance(path, str):
            raise ParseError("a link needs a path")
        size = linking.link(self._mirror, path, sha256_hex(request.args["digest"]))
        return json_response({"received_bytes": size, "complete": True})

    # Manifests and notes.

    def model(self, request: Request) -> Response:
        return Response(body=wire.dumps(wire.WEIGHTS, self._found(request.args["model"])))

    def _found(self, name: str) -> Weights:
        found = self._mirror.model(name) or next((one for one in self._wanted_weights() if one.name == name), None)
        if found is None:
            raise NotFound(f"no such model in the mirror: {name:.100}", hint="llmgw.pyz ctl mirror list shows them")
        return found

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
        found = self._mirror.model(name)
        force = request.query.get("force") == "1"
        if found is not None and not force:
            _refuse_used(self._use(found))
        self._mirror.remove_model(name, self._needed())
        self._parts.events.add(f"model/{name}", "RemovedFromMirror", "by an admin, although it is in use"
                               if force and found is not None and self._use(found).models else "by an admin")
        self._parts.nodes.poke.set()
        return Response(204)

    def notes(self, request: Request) -> Response:
        return json_response({"notes": self._mirror.notes(self._found(request.args["model"]).name)})

    def put_notes(self, request: Request) -> Response:
        notes = object_of(request).get("notes")
        if not isinstance(notes, dict) or not all(isinstance(text, str) for text in notes.values()):
            raise ParseError("notes are an object of texts")
        self._mirror.put_notes(request.args["model"], notes)
        return Response(204)

    # Engine archives.

    def put_archive(self, request: Request) -> Response:
        data, args = object_of(request), request.args
        digest = data.get("sha256")
        if not isinstance(digest, str):
            raise ParseError("an archive needs sha256 and size_bytes")
        made = self._mirror.register_archive(args["engine"], args["version"], args["asset"], digest, size_of(data))
        self._parts.events.add(f"engine/{made.engine}", "Imported", f"{made.version}: {made.asset.name}")
        self._parts.nodes.poke.set()
        return Response(body=wire.dumps(wire.ENGINE_ARCHIVE, made))

    def remove_archive(self, request: Request) -> Response:
        args = request.args
        self._mirror.remove_archive(args["engine"], args["version"], args["asset"])
        self._parts.nodes.poke.set()
        return Response(204)

    # Looking after it.

    def verify(self, request: Request) -> Response:
        """Read one blob again; a damaged one loses its name, and what is good of it is kept for the next upload."""
        digest = sha256_hex(request.args["digest"])
        problem = self._care.verify(digest, self._needed())
        if problem:
            self._parts.events.add("server", "BlobDamaged", f"{digest}: {problem}")
            self._parts.nodes.poke.set()
        return json_response({"sha256": digest, "problem": problem})

    def collect(self, request: Request) -> Response:
        data = object_of(request)
        found = self._care.unused(self._needed())
        if data.get("dry_run") is not True:
            self._care.remove(found)
        return json_response({"items": [{"path": leftover.path, "size_bytes": leftover.size_bytes,
                                         "what": leftover.what} for leftover in found]})

    def pull(self, request: Request) -> Response:
        """Want a model from Hugging Face, or ask again how far it is."""
        data = object_of(request)
        source, name = data.get("source"), data.get("name")
        if not isinstance(source, str) or not isinstance(name, str):
            raise ParseError("a pull needs source and name")
        return json_response(self._pulls.want(source, name))

    def give_up_pull(self, request: Request) -> Response:
        self._pulls.forget(request.query.get("name", ""))
        return Response(204)


def _refuse_used(use: WeightsUse) -> None:
    broken = [f"{_named(use.models)} would lose the weights"] if use.models else []
    broken += [f"{len(use.replicas)} running replicas ({_named(use.replicas)}) could not start again on another node"
               ] if use.replicas else []
    if broken:
        raise Conflict(f"the weights {use.name} are in use: {'; '.join(broken)}",
                       hint="remove the model from server.yaml first, or insist with --force")


def _named(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def object_of(request: Request) -> Mapping[str, Any]:
    """Return the body as a JSON object; refuse anything else."""
    data: Dict[str, Any] = request.json()
    if not isinstance(data, dict):
        raise ParseError("the body must be a JSON object")
    return data


def size_of(data: Mapping[str, Any]) -> int:
    """Return ``size_bytes`` of a body."""
    size = data.get("size_bytes")
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise ParseError("size_bytes must be a whole number")
    return size
