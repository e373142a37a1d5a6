"""The router's own numbers, and their page."""
from __future__ import annotations

from bisect import bisect_left
from typing import Dict, Iterable, List, Tuple

Labels = Tuple[Tuple[str, str], ...]
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
           600.0)
SMALL_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)


class Histogram:
    """Counts of values by their size."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def lines(self, name: str, labels: Labels) -> Iterable[str]:
        running = 0
        for bound, count in zip([f"{bound:g}" for bound in self.bounds] + ["+Inf"], self.counts):
            running += count
            yield line(f"{name}_bucket", labels + (("le", bound),), running)
        yield line(f"{name}_sum", labels, self.total)
        yield line(f"{name}_count", labels, running)


class ModelStats:
    """What is counted of one model."""

    __slots__ = ("codes", "seconds", "ttft", "overhead", "tokens")

    def __init__(self) -> None:
        self.codes: Dict[Tuple[str, int], int] = {}       # (endpoint, status)
        self.seconds = Histogram(SECONDS)
        self.ttft = Histogram(SECONDS)
        self.overhead = Histogram(SMALL_SECONDS)
        self.tokens = [0, 0]                              # of prompts, of answers


class Metrics:
    """All counters. ``models`` holds only models of the table: a client cannot make a label."""

    def __init__(self) -> None:
        self.models: Dict[str, ModelStats] = {}
        self.refused: Dict[int, int] = {}                 # answers without a model, by status
        self.retries: Dict[str, int] = {}
        self.client_disconnects = 0
        self.streams_truncated = 0
        self.panics = 0                                   # choices with every breaker open

    def model(self, name: str) -> ModelStats:
        stats = self.models.get(name)
        if stats is None:
            stats = self.models[name] = ModelStats()
        return stats

    def refuse(self, status: int) -> None:
        self.refused[status] = self.refused.get(status, 0) + 1

    def retry(self, reason: str) -> None:
        self.retries[reason] = self.retries.get(reason, 0) + 1

    def lines(self) -> List[str]:
        out = ["# TYPE llmgw_router_requests_total counter"]
        for name, stats in self.models.items():
            out += [line("llmgw_router_requests_total", (("model", name), ("endpoint", endpoint), ("code", str(code))),
                         count) for (endpoint, code), count in stats.codes.items()]
        out += [line("llmgw_router_requests_total", (("model", ""), ("endpoint", ""), ("code", str(code))), count)
                for code, count in self.refused.items()]
        for kind in ("seconds", "ttft", "overhead"):
            full = {"seconds": "request_seconds", "ttft": "ttft_seconds", "overhead": "overhead_seconds"}[kind]
            out.append(f"# TYPE llmgw_router_{full} histogram")
            for name, stats in self.models.items():
                out += getattr(stats, kind).lines(f"llmgw_router_{full}", (("model", name),))
        out.append("# TYPE llmgw_router_tokens_total counter")
        for name, stats in self.models.items():
            out += [line("llmgw_router_tokens_total", (("model", name), ("kind", kind)), count)
                    for kind, count in zip(("prompt", "completion"), stats.tokens)]
        out.append("# TYPE llmgw_router_retries_total counter")
        out += [line("llmgw_router_retries_total", (("reason", reason),), count)
                for reason, count in self.retries.items()]
        for name, value in (("client_disconnects", self.client_disconnects),
                            ("streams_truncated", self.streams_truncated), ("panics", self.panics)):
            out += [f"# TYPE llmgw_router_{name}_total counter", line(f"llmgw_router_{name}_total", (), value)]
        return out


def line(name: str, labels: Labels, value: float) -> str:
    """Return one sample as text."""
    shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels)
    return f"{name}{{{shown}}} {value:.10g}" if shown else f"{name} {value:.10g}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
