"""The OpenAI-compatible endpoint: who may ask what, and which replicas can be asked."""
from __future__ import annotations

import hashlib
import time
from typing import Dict, List, Optional, Sequence
from urllib.parse import unquote_to_bytes

from llmgw.decide.breaker import State
from llmgw.domain.model import Task
from llmgw.domain.route import Gauges, RoutedKey, RouterReport, RouteTable
from llmgw.relay.forward import request_id
from llmgw.relay.listener import Listener
from llmgw.relay.reply import Reply, error_reply, json_reply, no_room, too_large
from llmgw.relay.server import MAX_BODY_BYTES, Application, Request
from llmgw.router import answers, page
from llmgw.router.flow import FIRST_BYTE_SECONDS, Endpoint, Flow
from llmgw.router.metrics import Metrics
from llmgw.router.table import Model, Replica, Table

ENDPOINTS: Dict[bytes, Endpoint] = {path: Endpoint(path, task) for path, task in (
    (b"/v1/chat/completions", Task.CHAT), (b"/v1/completions", Task.CHAT), (b"/v1/embeddings", Task.EMBED),
    (b"/v1/rerank", Task.RERANK))}
MODELS = b"/v1/models"
GAUGES_STALE_SECONDS = 5.0
ANSWERING_SECONDS = 6.0
# What clients of other servers ask for.
_OTHERS = (b"/api/", b"/chat", b"/completion", b"/generate", b"/embed", b"/infill", b"/tokenize", b"/models",
           b"/invocations", b"/v2/")
RETRY_SHARE = 0.2
RETRIES_AT_LEAST = 3


class Router(Application):
    """Serves the current table. Everything here runs in the event loop's thread."""

    def __init__(self, name: str, first_byte_seconds: float = FIRST_BYTE_SECONDS) -> None:
        self.name = name
        self.table: Optional[Table] = None
        self.table_at = 0.0               # when a control plane last said that it is right
        self.metrics = Metrics()
        self.listener = Listener(self)
        self.first_byte_seconds = first_byte_seconds
        self.active = 0
        self.retrying = 0
        self.troubled = False             # some replica may be busy, or its breaker not closed
        self._turn = 0

    def swap(self, routed: RouteTable) -> None:
        """Serve from ``routed`` from now on."""
        self.table = Table(routed, self.table)

    # Answering.

    def check(self, request: Request) -> Optional[Reply]:
        head = request.head
        request.id = request_id(head.headers)
        endpoint = ENDPOINTS.get(head.path)
        if endpoint is None or head.method != b"POST":
            return self._counted(self._other(request))
        memo = head.memo                          # the same head, under the same table: the same key
        if memo is not None and memo[0] is self.table:
            key = memo[1]
        else:
            key = self._key(request)
            if not isinstance(key, RoutedKey):
                return self._counted(key)
            head.memo = (self.table, key)
        listener = self.listener
        if head.length > MAX_BODY_BYTES:
            return self._counted(too_large(MAX_BODY_BYTES))
        if listener.body_bytes + head.length > listener.max_body_bytes:
            return self._counted(no_room())
        if listener.draining:
            return self._counted(answers.draining())
        request.owner = Flow(self, request, endpoint, key)
        return None

    def serve(self, request: Request) -> None:
        if request.owner is not None:
            request.owner.start()
        else:                                     # the body of a request that ``check`` let pass
            request.reply(error_reply(404, "there is nothing here", "not_found"))

    def _counted(self, reply: Reply) -> Reply:
        self.metrics.refuse(reply.status)
        return reply

    def _key(self, request: Request) -> "RoutedKey | Reply":
        """Return the known key of a request, or what to answer without one."""
        authorization = request.head.headers.get(b"authorization")
        if authorization is None:
            return answers.no_key()
        if authorization[:7].lower() != b"bearer ":
            return self.listener.wrong_key(request, answers.wrong_key())
        if self.table is None:
            return answers.no_table()
        # Found by digest: the time of the look-up tells nothing of the key.
        key = self.table.keys.get(hashlib.sha256(authorization[7:].strip()).digest())
        return key if key is not None else self.listener.wrong_key(request, answers.wrong_key())

    def _other(self, request: Request) -> Reply:
        """Answer what is not the work of a model."""
        path, method = request.head.path, request.head.method
        if method == b"OPTIONS":
            return Reply(204, fields=((b"Allow", self._allowed(path)),))
        if path in ENDPOINTS or path in (b"/healthz", b"/ready", b"/metrics", MODELS) or path.startswith(
                MODELS + b"/"):
            if method not in (b"GET", b"HEAD") or path in ENDPOINTS:
                return error_reply(405, f"{request.head.path.decode('ascii')[:100]} does not take this method",
                                   "method_not_allowed", fields=((b"Allow", self._allowed(path)),))
        if path == b"/healthz":
            return json_reply({"status": "ok"})
        if path == b"/ready":
            return self._readiness()
        if path == b"/metrics":
            return self._metrics_page(request)
        if path == MODELS or path.startswith(MODELS + b"/"):
            return self._models(request)
        if path.startswith(_OTHERS):
            return error_reply(404, "this is an OpenAI-compatible endpoint: use /v1/chat/completions, /v1/completions, "
                               "/v1/embeddings or /v1/models", "not_found")
        return error_reply(404, "there is nothing here; the API is under /v1", "not_found")

    @staticmethod
    def _allowed(path: bytes) -> bytes:
        return b"POST, OPTIONS" if path in ENDPOINTS else b"GET, HEAD, OPTIONS"

    def _readiness(self) -> Reply:
        if self.listener.draining:
            return answers.draining()
        if self.table is None:
            return answers.no_table()
        return json_reply({"status": "ready", "table_revision": self.table.routed.revision,
                           "table_age_seconds": round(time.monotonic() - self.table_at, 1)})

    def _metrics_page(self, request: Request) -> Reply:
        peer = request.connection.transport.get_extra_info("peername")
        if not (isinstance(peer, tuple) and peer[0] in ("127.0.0.1", "::1")):
            key = self._key(request)
            if not isinstance(key, RoutedKey):
                return key
        text = page.metrics_page(self, time.monotonic())
        return Reply(200, text.encode("utf-8"), b"text/plain; version=0.0.4; charset=utf-8")

    def _models(self, request: Request) -> Reply:
        key = self._key(request)
        if not isinstance(key, RoutedKey):
            return key
        assert self.table is not None
        if request.head.path == MODELS:
            return json_reply({"object": "list", "data": [
                page.model_object(name, model) for model in self.table.listed
                for name in (model.routed.name, *model.routed.aliases) if may_use(key, model)]})
        name = unquote_to_bytes(request.head.path[len(MODELS) + 1:]).decode("utf-8", "replace")
        model = self.table.models.get(name)
        if model is None or not may_use(key, model):
            return answers.model_not_found(name)
        return json_reply(page.model_object(name, model))

    # Choosing.

    def candidates(self, model: Model, tried: Sequence[Replica]) -> List[Replica]:
        """Return the replicas that a request may go to: without those tried, left out for failing, or busy.

        Of those left out, all are back when there would be none else.
        """
        ready = model.ready
        if not self.troubled and not tried:
            return ready
        now = time.monotonic()
        good = [item for item in ready if item.busy_until <= now and item not in tried and item.breaker.allows(now)]
        if good or not ready:
            return good
        untried = [item for item in ready if item not in tried]
        allowed = [item for item in untried if item.breaker.allows(now)]
        if untried and not allowed:
            self.metrics.panics += 1
        return allowed or untried

    def retry_budget(self) -> bool:
        """Return whether one more second attempt is within the share that retries may have."""
        return self.retrying < max(RETRIES_AT_LEAST, int(RETRY_SHARE * self.active))

    def next_turn(self) -> int:
        self._turn += 1
        return (self._turn * 0x9E3779B1 & 0xFFFFFFFF) >> 2

    # Looking after itself.

    def sweep(self, now: float) -> None:
        """Close idle connections, and forget gauges that are too old."""
        if self.table is None:
            return
        self.troubled = any(replica.busy_until > now or replica.breaker.state is not State.CLOSED
                            for replica in self.table.replicas)
        for replica in self.table.replicas:
            replica.sweep(now)
            if replica.gauges is not None and now - replica.scraped_at > GAUGES_STALE_SECONDS:
                replica.forget_gauges()

    def end_all(self) -> None:
        """End every running request; a stream gets its error event."""
        for connection in list(self.listener.connections):
            if connection.request is not None and connection.request.owner is not None:
                connection.request.owner.end("the router was stopped")

    def report(self, now: float) -> Optional[RouterReport]:
        """Return what to tell the control plane; None without a table."""
        if self.table is None:
            return None
        gauges: Dict[str, Gauges] = {}
        answering = []
        for replica in self.table.replicas:
            seen = replica.gauges or Gauges()
            gauges[replica.routed.id] = Gauges(seen.running, seen.waiting, seen.kv_used, seen.generated_tokens,
                                               replica.in_flight)
            if now - max(replica.scraped_at, replica.answered_at) < ANSWERING_SECONDS:
                answering.append(replica.routed.id)
        return RouterReport(self.name, self.table.routed.revision, gauges, tuple(answering))


def may_use(key: RoutedKey, model: Model) -> bool:
    """Return whether the key opens the model; no list means all."""
    return not key.models or model.routed.name in key.models
