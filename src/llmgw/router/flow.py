"""One request on its way through the router: choose, send, perhaps once more, pass on what comes."""
from __future__ import annotations

import re
import time
import zlib
from typing import TYPE_CHECKING, List, Optional

from llmgw.decide.routing import choose
from llmgw.domain.model import Task
from llmgw.domain.route import RoutedKey
from llmgw.parse.http1 import ResponseHead
from llmgw.parse.openai import BadBody, read_request, with_model
from llmgw.relay.forward import request_bytes
from llmgw.relay.lease import Lease, Outcome, Owner
from llmgw.relay.reply import Reply, error_reply, relayed_head
from llmgw.relay.server import Request
from llmgw.router.answers import engine_answer, failure_reply, model_not_found, not_ready, wrong_task
from llmgw.router.metrics import ModelStats
from llmgw.router.table import Model, Replica

if TYPE_CHECKING:
    from llmgw.router.app import Router

FIRST_BYTE_SECONDS = 600.0
SILENCE_SECONDS = 120.0
MAX_ATTEMPTS = 2              # that an engine may have seen
MAX_TRIES = 4                 # with those whose connection was refused
AVOID_SECONDS = 1.0
MAX_BUSY_SECONDS = 30.0
ERROR_BODY_BYTES = 1 << 20
_COUNTED_FAILURES = frozenset((500, 502, 504))
_USAGE = re.compile(rb'"usage"\s*:\s*\{\s*"prompt_tokens"\s*:\s*([0-9]{1,12})\s*,'
                    rb'\s*"completion_tokens"\s*:\s*([0-9]{1,12})')
_COUNT = re.compile(rb'"(prompt|completion)_tokens"\s*:\s*([0-9]{1,12})')    # in any other order


class Endpoint:
    """One path that models serve."""

    __slots__ = ("path", "name", "task")

    def __init__(self, path: bytes, task: Task) -> None:
        self.path, self.task = path, task
        self.name = path.decode("ascii")[len("/v1/"):]


class Flow(Owner):
    """Owns the leases of one request, one after the other."""

    model: Optional[Model] = None
    stats: Optional[ModelStats] = None
    lease: Optional[Lease] = None
    body = b""
    affinity = 0
    sticky = False
    retrying = False
    refused = 0                       # tries that no engine has seen
    status = 0
    over = False

    def __init__(self, router: "Router", request: Request, endpoint: Endpoint, key: RoutedKey) -> None:
        self.router = router
        self.request = request
        self.endpoint = endpoint
        self.key = key
        self.tried: List[Replica] = []
        router.active += 1

    def start(self) -> None:
        """The body is there."""
        request = self.request
        try:
            asked = read_request(request.body)
        except BadBody as error:
            self._reply(error_reply(400, error.message, error.code, param=error.param))
            return
        model = self.router.table.models.get(asked.model)  # type: ignore[union-attr]
        if model is None or (self.key.models and model.routed.name not in self.key.models):
            self._reply(model_not_found(asked.model))
            return
        self.model = model
        self.stats = self.router.metrics.model(model.routed.name)
        if model.routed.task is not self.endpoint.task:
            self._reply(wrong_task(model, self.endpoint.name))
            return
        self.body = request.body if asked.model == model.routed.name else with_model(request.body, model.routed.name)
        self._set_affinity(asked.prefix)
        self._attempt()

    def _set_affinity(self, prefix: str) -> None:
        session = self.request.head.headers.get(b"x-session-id")
        if session:
            self.affinity, self.sticky = zlib.crc32(session) >> 2, True
        elif prefix:
            self.affinity, self.sticky = zlib.crc32(prefix.encode("utf-8", "surrogatepass")) >> 2, True
        else:
            self.affinity, self.sticky = self.router.next_turn(), False

    def _attempt(self) -> bool:
        """Send the request to a replica; answer 503 when there is none. Return whether it was sent."""
        model, router = self.model, self.router
        assert model is not None
        candidates = router.candidates(model, self.tried)
        if not candidates:
            self._reply(not_ready(model))
            return False
        self._send(choose(candidates, self.affinity, self.sticky))
        return True

    def _send(self, replica: Replica) -> None:
        request = self.request
        self.tried.append(replica)
        replica.breaker.started()
        if len(self.tried) == 1:
            self.stats.overhead.observe(time.monotonic() - request.started)  # type: ignore[union-attr]
        lease = self.lease = Lease(self, replica, request, self.router.first_byte_seconds)
        lease.start(request_bytes(b"POST", self.endpoint.path, replica.lines, request.head, request.id, self.body))

    # What the lease tells.

    def head_arrived(self, lease: Lease, head: ResponseHead) -> None:
        status = head.status
        if status < 300:
            self._relay(lease, head)
            return
        gate = head.headers.get(b"x-llmgw-error-code") if status == 502 else None
        if gate in (b"engine_refused", b"engine_reset"):     # as if we had met the engine's silence ourselves
            outcome = Outcome.REFUSED if gate == b"engine_refused" else Outcome.RESET
            lease.release(outcome)
            self.failed(lease, outcome, "the engine gave no answer")
            return
        if status in (429, 503, 401, 403):        # busy; or a gate that has not learned of our key yet
            self._mark_busy(lease, head)
            reason = "busy" if status in (429, 503) else "replica_auth"
            if self._in_budget() and self._may_retry() and self._retry(lease, reason, counted=True):
                return
        lease.limit_seconds = SILENCE_SECONDS
        lease.collect(ERROR_BODY_BYTES)

    def _relay(self, lease: Lease, head: ResponseHead) -> None:
        request = self.request
        self.status = head.status
        lease.limit_seconds = SILENCE_SECONDS
        chunked = head.length is None and request.head.minor == 1
        if head.length is None and not chunked:
            request.close = True
        stream = head.headers.get(b"content-type", b"").startswith(b"text/event-stream")
        more = b"X-Request-Id: %b\r\n" % request.id
        if stream:
            more += b"X-Accel-Buffering: no\r\n"
            if b"cache-control" not in head.headers:
                more += b"Cache-Control: no-cache\r\n"
        replica: Replica = lease.target  # type: ignore[assignment]
        lease.relay(relayed_head(head, request.connection.listener.stamp.lines, chunked=chunked,
                                 close=request.close, secret=replica.secret, more=more),
                    chunked=chunked, scan=stream)

    def collected(self, lease: Lease, body: bytes) -> None:
        assert lease.head is not None
        self._reply(engine_answer(lease.head, body))

    def failed(self, lease: Lease, outcome: Outcome, why: str) -> None:
        if outcome is Outcome.REFUSED:
            self.refused += 1
        # no budget: what a dying replica leaves behind is sent once more, all of it
        if outcome is not Outcome.LATE and self._may_retry() and self._retry(lease, outcome.value):
            return
        self._reply(failure_reply(outcome))

    def ended(self, lease: Lease, outcome: Outcome) -> None:
        replica: Replica = lease.target  # type: ignore[assignment]
        now = time.monotonic()
        status = lease.head.status if lease.head is not None else 0
        if outcome is Outcome.WHOLE and status < 300:
            replica.breaker.succeeded(now)
            replica.answered_at = now
            self._count_tokens(lease)
        elif outcome is Outcome.WHOLE and status in _COUNTED_FAILURES or outcome is Outcome.TRUNCATED:
            self.router.troubled = True
            replica.breaker.failed(now, self.affinity if self.sticky else 0)
        elif outcome in (Outcome.WHOLE, Outcome.GIVEN_UP):
            replica.breaker.neutral()
        else:
            self.router.troubled = True
            replica.breaker.failed(now)
            replica.busy_until = max(replica.busy_until, now + AVOID_SECONDS)
        if lease.scanner is not None and outcome in (Outcome.TRUNCATED, Outcome.BROKEN):
            self.router.metrics.streams_truncated += 1
        if lease.relayed and (outcome is Outcome.WHOLE or self.request.answered):
            self._finish(now)

    def _count_tokens(self, lease: Lease) -> None:
        tokens = self.stats.tokens  # type: ignore[union-attr]
        if lease.scanner is not None:
            usage = lease.scanner.usage
            if usage is not None:
                tokens[0] += usage[0]
                tokens[1] += usage[1]
            return
        at = lease.last.rfind(b'"usage"')         # a copy is read; the answer itself has passed on
        if at < 0:
            return
        usual = _USAGE.match(lease.last, at)
        if usual is not None:
            tokens[0] += int(usual.group(1))
            tokens[1] += int(usual.group(2))
            return
        for kind, count in _COUNT.findall(lease.last, at, at + 512):
            tokens[0 if kind == b"prompt" else 1] += int(count)

    # Another try.

    def _may_retry(self) -> bool:
        return (len(self.tried) < MAX_TRIES and len(self.tried) - self.refused < MAX_ATTEMPTS
                and not self.over and not self.request.answered)

    def _in_budget(self) -> bool:
        """Return whether a replica's "busy" may be answered by asking another: not by all, where all are busy."""
        return self.retrying or self.router.retry_budget()

    def _retry(self, lease: Lease, reason: str, counted: bool = False) -> bool:
        """Send the request to another replica; False when there is none. ``counted``: in the budget."""
        assert self.model is not None and self.router.table is not None
        name = self.model.routed.name             # the table may be another since the first attempt
        self.model = self.router.table.models.get(name, self.model)
        candidates = [item for item in self.router.candidates(self.model, self.tried) if item not in self.tried]
        if not candidates:
            return False
        lease.release(Outcome.GIVEN_UP)
        self.router.metrics.retry(reason)
        if counted and not self.retrying:
            self.router.retrying += 1
            self.retrying = True
        self._send(choose(candidates, self.affinity, self.sticky))
        return True

    def _mark_busy(self, lease: Lease, head: ResponseHead) -> None:
        replica: Replica = lease.target  # type: ignore[assignment]
        given = head.headers.get(b"retry-after", b"")
        seconds = float(given) if given.isdigit() and len(given) < 6 else 1.0
        replica.busy_until = time.monotonic() + min(seconds, MAX_BUSY_SECONDS)
        self.router.troubled = True

    # How it ends.

    def _reply(self, reply: Reply) -> None:
        self.status = reply.status
        self._finish(time.monotonic())
        self.request.reply(reply)

    def _finish(self, now: float) -> None:
        if self.over:
            return
        self.over = True
        router = self.router
        router.active -= 1
        if self.retrying:
            router.retrying -= 1
        stats = self.stats
        if stats is None:
            router.metrics.refuse(self.status)
            return
        code = (self.endpoint.name, self.status)
        stats.codes[code] = stats.codes.get(code, 0) + 1
        started = self.request.started
        stats.seconds.observe(now - started)
        if self.lease is not None and self.lease.scanner is not None:
            stats.ttft.observe((self.request.answered_at or now) - started)

    def client_gone(self) -> None:
        if not self.over:
            self.router.metrics.client_disconnects += 1
            self.status = 499             # nginx's number for it; nobody is sent this
        if self.lease is not None:
            self.lease.release(Outcome.GIVEN_UP)
        self._finish(time.monotonic())

    def end(self, why: str) -> None:
        """End the request now: with the error event where an answer has begun, else with a 503."""
        if self.lease is not None:
            self.lease.end_now(why)
        if not self.over:
            self._reply(error_reply(503, why, "draining", retry_after=1))

    def pause(self) -> None:
        if self.lease is not None:
            self.lease.pause()

    def resume(self) -> None:
        if self.lease is not None:
            self.lease.resume()

    def sweep(self, now: float) -> None:
        lease = self.lease
        if lease is None:
            return
        if lease.target.retired and lease.head is None:
            lease.fail_now("the replica is gone")
        else:
            lease.sweep(now, self.request.connection.stalled)
