"""Routes that only look: nodes, models, replicas, engines, events, health, numbers, logs."""
from __future__ import annotations

from typing import Any, Dict, Iterable, List

from llmgw import __version__
from llmgw.api import paths, wire
from llmgw.domain.codec import Codec
from llmgw.domain.errors import NotFound
from llmgw.domain.replica import Replica
from llmgw.server import metrics, views
from llmgw.server.http_numbers import HttpNumbers
from llmgw.server.loop import Parts, Reconciler
from llmgw.system.routes import PUBLIC, Request, Response, Route, json_response

READERS = ("viewer", "admin")
MOST_WAIT_SECONDS = 30.0
LOG_WAIT_SECONDS = 40.0       # a node hears of the question with its next heartbeat
LOG_BYTES = 64 << 10
MOST_LOG_BYTES = 1 << 20


class ViewHandlers:
    """All of it is read from the last turn's snapshot."""

    def __init__(self, parts: Parts, reconciler: Reconciler, numbers: HttpNumbers) -> None:
        self._parts, self._reconciler, self._numbers = parts, reconciler, numbers

    def routes(self) -> List[Route]:
        return [
            Route("GET", paths.HEALTH, (PUBLIC,), self.health),
            Route("GET", paths.METRICS, READERS, self.metrics),
            Route("GET", paths.NODES, READERS, self.nodes),
            Route("GET", paths.MODELS, READERS, self.models),
            Route("GET", paths.REPLICAS, READERS, self.replicas),
            Route("GET", paths.ENGINES, READERS, self.engines),
            Route("GET", paths.EVENTS, READERS, self.events),
            Route("GET", paths.REPLICA_LOG, ("admin",), self.replica_log),
        ]

    def health(self, request: Request) -> Response:
        """Say that the server is up; whether its configuration is in order is no secret, its words are."""
        state = self._parts.config.state
        config = "held" if state.held is not None else "invalid" if state.problem else "ok"
        data: Dict[str, Any] = {"status": "ok", "version": __version__, "epoch": self._reconciler.epoch,
                                "config": config}
        if not self._reconciler.turned.is_set():
            data["status"] = "starting"
        return json_response(data)

    def metrics(self, request: Request) -> Response:
        parts = self._parts
        body = metrics.page(
            self._reconciler.snapshot, epoch=self._reconciler.epoch, heartbeats=parts.nodes.heartbeats,
            connections=self._numbers.connections(), revision=parts.store.revision,
            routers=len(parts.routers.fresh()), answers=self._numbers.answers(),
            mirror_bytes=parts.sources.sent_bytes())
        return Response(body=body, content_type="text/plain; version=0.0.4; charset=utf-8")

    def nodes(self, request: Request) -> Response:
        snapshot, heard = self._reconciler.snapshot, self._parts.nodes.heard()
        placed: Dict[str, List[str]] = {}
        for row in snapshot.replicas:
            for shard in row.shards:
                placed.setdefault(shard.node, []).append(row.id)
        now = self._parts.clock.monotonic()
        found = []
        for name, node in snapshot.nodes.items():
            said = heard.get(name)
            view = views.node_view(node, said.skew_seconds if said is not None else 0.0, tuple(placed.get(name, ())))
            data = wire.NODE_VIEW.encode(view)
            if said is not None:
                data["seen_seconds_ago"] = max(0.0, now - said.at)
            found.append(data)
        return json_response({"items": found, "suspicion": snapshot.suspicion})

    def models(self, request: Request) -> Response:
        snapshot, state = self._reconciler.snapshot, self._parts.config.state
        answer = _items(wire.MODEL_VIEW, (views.model_view(want, snapshot) for want in snapshot.wanted))
        return json_response({**answer, "config_problem": state.problem, "held": list(state.held_because)})

    def replicas(self, request: Request) -> Response:
        snapshot = self._reconciler.snapshot
        found = (views.replica_view(row, snapshot.nodes, self._parts.routers.gauges(row.id))
                 for row in snapshot.replicas)
        reads_logs = request.caller.role == "admin"
        return json_response(_items(wire.REPLICA_VIEW, found if reads_logs else map(views.without_logs, found)))

    def engines(self, request: Request) -> Response:
        snapshot = self._reconciler.snapshot
        return json_response(_items(wire.ENGINE_VIEW, (
            views.engine_view(self._parts.engines.wanted(engine), snapshot.nodes)
            for engine in snapshot.config.engines)))

    def events(self, request: Request) -> Response:
        after = int(request.number("after", 0, 1 << 53))
        found = self._parts.events.after(after, request.number("wait", 0, MOST_WAIT_SECONDS))
        return json_response(_items(wire.EVENT_VIEW, found))

    def replica_log(self, request: Request) -> Response:
        row = self._row(request.args["replica"])
        size = int(request.number("bytes", LOG_BYTES, MOST_LOG_BYTES))
        shard = row.shards[0]
        tail = self._parts.nodes.ask_log_tail(shard.node, f"{row.id}.{shard.rank}", size, LOG_WAIT_SECONDS)
        return Response(body=wire.dumps(wire.LOG_TAIL, tail))

    def _row(self, name: str) -> Replica:
        for _, row in self._parts.rows.all():
            if row.id == name:
                return row
        raise NotFound(f"no such replica: {name:.100}", hint="llmgw.pyz ctl replicas shows them")


def _items(codec: Codec[Any], values: Iterable[Any]) -> Dict[str, Any]:
    return {"items": [codec.encode(value) for value in values]}
