"""Routes of agents and routers: heartbeats, logs, blobs, archives, the routing table."""
from __future__ import annotations

from typing import Any, List, Mapping

from llmgw.api import paths, wire
from llmgw.domain.digest import sha256_hex
from llmgw.domain.engine import PYTHON_ENGINES, EngineWanted
from llmgw.domain.errors import Forbidden, NotFound, ParseError, Unauthorized
from llmgw.domain.names import check_name
from llmgw.server.engine_assets import EngineAssets
from llmgw.server.loop import Parts, Reconciler
from llmgw.server.mirror import Mirror
from llmgw.system.routes import Request, Response, Route

HEARTBEAT_BYTES = 4 << 20
LOCK_BYTES = 8 << 20
MOST_WAIT_SECONDS = 30.0
BINARY = "application/octet-stream"


class FleetHandlers:
    """What nodes and routers may do, and nothing else of it."""

    def __init__(self, parts: Parts, reconciler: Reconciler, mirror: Mirror) -> None:
        self._parts, self._reconciler, self._mirror = parts, reconciler, mirror

    def routes(self) -> List[Route]:
        return [
            Route("POST", paths.HEARTBEAT, ("node",), self.heartbeat, HEARTBEAT_BYTES),
            Route("POST", paths.LOG_TAIL, ("node",), self.log_tail),
            Route("GET", paths.BLOB, ("node", "admin"), self.blob),
            Route("GET", paths.ENGINE_ASSET, ("node", "admin"), self.engine_asset),
            Route("GET", paths.ENGINE_LOCK, ("node", "viewer", "admin"), self.lock),
            Route("PUT", paths.ENGINE_LOCK, ("node", "admin"), self.propose_lock, LOCK_BYTES),
            Route("GET", paths.ROUTES, ("router", "admin"), self.table),
            Route("POST", paths.ROUTER_REPORT, ("router",), self.report),
        ]

    def heartbeat(self, request: Request) -> Response:
        observed = wire.NODE_OBSERVED.decode(request.json(), "heartbeat")
        check_name(observed.identity.name, "node")
        if observed.identity.name != request.args["node"]:
            raise ParseError(f"a heartbeat of {observed.identity.name} was sent for {request.args['node']:.100}")
        self._parts.admissions.check_node(request.caller, observed.identity.name)
        self._parts.nodes.hear(observed)
        answer = self._parts.nodes.answer(observed, self._parts.config.state.current.cluster, self._reconciler.epoch)
        return _record(wire.HEARTBEAT_ANSWER, answer)

    def log_tail(self, request: Request) -> Response:
        self._parts.admissions.check_node(request.caller, request.args["node"])
        self._parts.nodes.take_log_tail(wire.LOG_TAIL.decode(request.json(), "log tail"))
        return Response(204)

    def blob(self, request: Request) -> Response:
        digest = sha256_hex(request.args["digest"])
        pace = self._mirror.pace
        pace.bytes_per_second = self._parts.config.state.current.mirror_bytes_per_second
        return Response(file=self._mirror.open(digest), content_type=BINARY, etag=digest, pace=pace.take)

    def engine_asset(self, request: Request) -> Response:
        args, engines = request.args, self._parts.engines
        assert isinstance(engines, EngineAssets)
        for name in ("engine", "version", "asset"):
            check_name(args[name].replace("+", "-"), name)   # builds of Python have one
        file, digest = engines.open(args["engine"], args["version"], args["asset"])
        return Response(file=file, content_type=BINARY, etag=digest)

    def lock(self, request: Request) -> Response:
        engine = self._engine(request.args)
        text = self._parts.engines.locks.text(engine, request.args["platform"])
        return Response(body=text.encode("ascii"), content_type="text/plain; charset=utf-8")

    def propose_lock(self, request: Request) -> Response:
        given = wire.PACKAGE_LIST.decode(request.json(), "list of packages")
        engine, platform, locks = self._engine(request.args), request.args["platform"], self._parts.engines.locks
        if request.caller.role == "admin":
            kept = locks.vouch(engine, platform, given.as_of, given.text)
        else:
            self._parts.admissions.check_node(request.caller, check_name(given.node, "node"))
            kept = locks.propose(engine, platform, given.as_of, given.text, given.node)
        self._parts.nodes.poke.set()
        return _record(wire.LOCK_VIEW, kept)

    def _engine(self, args: Mapping[str, str]) -> EngineWanted:
        return wanted_python_engine(self._parts, args["engine"], args["version"])

    def table(self, request: Request) -> Response:
        after = int(request.number("after", 0, 1 << 53))
        wait = request.number("wait", 0, MOST_WAIT_SECONDS)
        table = self._parts.feed.after(after if "after" in request.query else -1, wait)
        if not self._parts.admissions.is_in_force(request.caller):
            raise Unauthorized("this token was revoked")
        return Response(304) if table is None else _record(wire.ROUTE_TABLE, table)

    def report(self, request: Request) -> Response:
        report = wire.ROUTER_REPORT.decode(request.json(), "report")
        check_name(report.router, "router")
        if report.router != request.args["router"]:
            raise ParseError(f"a report of {report.router} was sent for {request.args['router']:.100}")
        if request.caller.name not in ("", report.router):
            raise Forbidden(f"this is the credential of {request.caller.name}, not of {report.router:.100}")
        self._parts.routers.hear(report)
        return Response(204)


def _record(codec: Any, value: Any) -> Response:
    return Response(body=wire.dumps(codec, value))


def wanted_python_engine(parts: Parts, name: str, version: str) -> EngineWanted:
    """Return the engine as the configuration wants it; NotFound when it wants none such."""
    for engine in parts.config.state.current.engines:
        if (engine.name, engine.version) == (name, version) and name in PYTHON_ENGINES:
            return engine
    raise NotFound(f"{name:.60} {version:.60} is not among the wanted engines that are made of packages")
