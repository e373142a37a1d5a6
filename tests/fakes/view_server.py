"""A control plane that shows what it is given: the real page, HTTP server and wire format, no cluster behind."""
from __future__ import annotations

from llmgw.api import paths, wire
from llmgw.server import page
from llmgw.system.http_server import HttpServer
from llmgw.system.routes import Caller, Route, RouteTable, json_response

READERS = ("viewer", "admin")
CODECS = {
    "models": (paths.MODELS, wire.MODEL_VIEW), "nodes": (paths.NODES, wire.NODE_VIEW),
    "replicas": (paths.REPLICAS, wire.REPLICA_VIEW), "engines": (paths.ENGINES, wire.ENGINE_VIEW),
    "events": (paths.EVENTS, wire.EVENT_VIEW)}


class ViewServer:
    """``views`` maps models, nodes, replicas, engines, events to their records; change it at any time.

    ``tokens`` maps a token to its role. ``close`` and ``open`` take it away and back at the same port.
    """

    def __init__(self, **views):
        self.views = {name: () for name in CODECS}
        self.views.update(views)
        self.tokens = {"llmgw_viewer_test": "viewer", "llmgw_node_test": "node"}
        self.problem = None                  # an LlmgwError: every list answers with it
        self.besides = {}                    # name -> what its answer holds besides the items
        self.seen = []                       # (path, query, headers) of every list that was asked for
        self._port = 0
        self.open()

    def open(self):
        routes = page.routes() + tuple(
            Route("GET", path, READERS, self._list(name, codec)) for name, (path, codec) in CODECS.items())
        self._server = HttpServer("127.0.0.1", self._port, RouteTable(routes, self._authenticate))
        self._port = self._server.port
        self._server.start()
        self.url = self._server.url

    def close(self):
        self._server.stop(1.0)

    def _authenticate(self, token):
        role = self.tokens.get(token)
        return Caller(role) if role else None

    def _list(self, name, codec):
        def answer(request):
            self.seen.append((request.path, dict(request.query), dict(request.headers)))
            if self.problem is not None:
                raise self.problem
            items = self.views[name]
            if name == "events":
                items = [event for event in items if event.id > request.number("after", 0, 1e15)]
            return json_response({"items": [codec.encode(item) for item in items], **self.besides.get(name, {})})
        return answer
