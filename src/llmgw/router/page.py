"""What the router shows: its metrics page and its models."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, List, Tuple

from llmgw.decide.breaker import State
from llmgw.router.metrics import line
from llmgw.router.table import Model, Replica

if TYPE_CHECKING:
    from llmgw.router.app import Router

_BREAKER = {State.CLOSED: 0, State.OPEN: 1, State.HALF_OPEN: 2}


def model_object(name: str, model: Model) -> Any:
    """Return a model as OpenAI's API lists it."""
    found = {"id": name, "object": "model", "created": model.routed.created, "owned_by": "llmgw"}
    if model.routed.context_length is not None:
        found["context_length"] = model.routed.context_length
    return found


def metrics_page(router: "Router", now: float) -> str:
    """Return the Prometheus page; a gauge that is unknown is left out."""
    lines = router.metrics.lines()
    lines += ["# TYPE llmgw_router_active_requests gauge", line("llmgw_router_active_requests", (), router.active),
              "# TYPE llmgw_router_connections gauge",
              line("llmgw_router_connections", (), len(router.listener.connections)),
              "# TYPE llmgw_router_body_bytes gauge", line("llmgw_router_body_bytes", (), router.listener.body_bytes)]
    if router.table is not None:
        lines += ["# TYPE llmgw_router_table_revision gauge",
                  line("llmgw_router_table_revision", (), router.table.routed.revision),
                  "# TYPE llmgw_router_table_age_seconds gauge",
                  line("llmgw_router_table_age_seconds", (), max(0.0, now - router.table_at))]
        for model in router.table.listed:
            for replica in model.replicas:
                lines += _replica_lines(model.routed.name, replica, now)
    return "\n".join(lines) + "\n"


def _replica_lines(model: str, replica: Replica, now: float) -> List[str]:
    labels = (("model", model), ("replica", replica.routed.id))
    values: List[Tuple[str, float]] = [
        ("inflight", replica.in_flight), ("breaker_state", _BREAKER[replica.breaker.state])]
    if replica.scraped_at > float("-inf"):
        values.append(("scrape_age_seconds", now - replica.scraped_at))
    if replica.gauges is not None:
        values += [(f"engine_{name}", value) for name, value in (
            ("running", replica.gauges.running), ("waiting", replica.gauges.waiting), ("kv", replica.gauges.kv_used))
            if value is not None]
    return [line(f"llmgw_router_{name}", labels, value) for name, value in values]
