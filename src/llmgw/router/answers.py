"""What the router says in its own words, and what it lets an engine say."""
from __future__ import annotations

import json
from typing import Any, Dict, Optional

from llmgw.parse.http1 import ResponseHead
from llmgw.relay.lease import Outcome
from llmgw.relay.reply import Fields, Reply, error_reply
from llmgw.router.table import Model

_PLACES = {"chat": "chat/completions or completions", "embed": "embeddings", "rerank": "rerank"}


def no_key() -> Reply:
    return error_reply(401, "no API key: send it as Authorization: Bearer KEY", "missing_api_key")


def wrong_key() -> Reply:
    return error_reply(401, "this API key is not known, or was revoked", "invalid_api_key")


def no_table() -> Reply:
    return error_reply(503, "the router has not yet learned from a control plane what to serve", "no_routing_table",
                       retry_after=5)


def draining() -> Reply:
    return error_reply(503, "the router is about to stop", "draining", retry_after=1)


def model_not_found(name: str) -> Reply:
    return error_reply(404, f"the model {_short(name)} does not exist, or this key may not use it", "model_not_found",
                       param="model")


def wrong_task(model: Model, endpoint: str) -> Reply:
    task = model.routed.task.value
    return error_reply(400, f"the model {_short(model.routed.name)} does not serve /v1/{endpoint}: ask it at "
                       f"/v1/{_PLACES[task]}", "wrong_endpoint", param="model")


def not_ready(model: Model) -> Reply:
    """Return the 503 of a model without a replica, in the nodes' own words."""
    why = model.routed.why_not or "no replica of it takes requests right now"
    return error_reply(503, f"the model {_short(model.routed.name)} is not ready: {why}", "model_not_ready",
                       retry_after=max(1, model.routed.retry_after_seconds))


def failure_reply(outcome: Outcome) -> Reply:
    """Return the answer for an attempt that brought none."""
    if outcome is Outcome.REFUSED:
        return error_reply(503, "no replica of the model could be reached", "upstream_unreachable", retry_after=1)
    if outcome is Outcome.LATE:
        return error_reply(504, "the model did not answer in time", "upstream_timeout")
    return error_reply(502, "the replica ended the connection before it answered", "upstream_disconnected")


def engine_answer(head: ResponseHead, body: bytes) -> Reply:
    """Return an engine's own error: as it is when it is an OpenAI error object, else wrapped in one."""
    code = head.headers.get(b"x-llmgw-error-code", b"").decode("latin-1")
    if head.status in (401, 403) or code == "too_many_wrong_keys":   # our key, so our fault: the client's was right
        return error_reply(502, "the replica refused the router's key", "replica_auth")
    if code == "path_not_allowed":
        return error_reply(404, "this model's engine does not offer this endpoint", "not_offered")
    fields: Fields = ()
    if b"retry-after" in head.headers:
        fields = ((b"Retry-After", head.headers[b"retry-after"]),)
    if head.status < 400:
        return error_reply(502, "the replica answered with a redirect", "bad_upstream_answer")
    if _error(body) is not None:
        content_type = head.headers.get(b"content-type", b"application/json")
        return Reply(head.status, body, content_type, fields)
    return error_reply(head.status, _text(body) or f"the engine answered with status {head.status}", "engine_error",
                       fields=fields)


def _error(body: bytes) -> Optional[Dict[str, Any]]:
    """Return the error object of ``body`` when it is one of OpenAI's shape."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        return None
    error = data.get("error") if isinstance(data, dict) else None
    return error if isinstance(error, dict) and isinstance(error.get("message"), str) else None


def _text(body: bytes) -> str:
    """Return what an error that is no OpenAI object says, when that is a short text."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    for key in ("error", "message", "detail"):
        value = data.get(key) if isinstance(data, dict) else None
        if isinstance(value, str) and value:
            return value[:500]
    return ""


def _short(name: str) -> str:
    return repr(name[:100])
