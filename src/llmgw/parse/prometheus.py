"""An engine's metrics page, as numbers. What is not there is unknown (None), never 0.

Only exact names are read, malformed lines and samples that are not finite are
passed over: a page of HTML, of another engine, or none at all gives no numbers.
"""
from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Dict, Iterable, List, Mapping, Optional, Tuple

MAX_PAGE_BYTES = 1 << 20
MAX_LINE_BYTES = 16 << 10
MAX_SAMPLES = 4096

_NUMBER = rb"[+-]?(?:[0-9]{1,40}(?:\.[0-9]{0,40})?|\.[0-9]{1,40})(?:[eE][+-]?[0-9]{1,4})?"
_LINE = re.compile(rb"([a-zA-Z_:][a-zA-Z0-9_:]*)"
                   rb"[ \t]*(?:\{((?:[^\"}]|\"(?:[^\"\\]|\\.)*\")*)\})?"
                   rb"[ \t]+(" + _NUMBER + rb")"
                   rb"(?:[ \t]+" + _NUMBER + rb")?"         # a timestamp
                   rb"[ \t]*(?:#.*)?")                      # an OpenMetrics exemplar
_LABEL = re.compile(rb"[ \t]*,?[ \t]*([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*\"((?:[^\"\\]|\\.)*)\"")
_ESCAPE = re.compile(rb"\\(.)", re.DOTALL)


@dataclass(frozen=True)
class Sample:
    """One series of a metric."""

    labels: Mapping[str, str]
    value: float


Samples = Dict[str, Tuple[Sample, ...]]


def read(page: bytes, names: Iterable[str]) -> Samples:
    """Return the samples of each of ``names`` that the page holds; a page over the cap holds none."""
    if len(page) > MAX_PAGE_BYTES:
        return {}
    wanted = {name.encode("ascii"): name for name in names}
    starts = tuple(wanted)
    found: Dict[str, List[Sample]] = {}
    count = 0
    for line in page.split(b"\n"):
        if not line.startswith(starts) or len(line) > MAX_LINE_BYTES:
            continue
        match = _LINE.fullmatch(line.rstrip(b"\r"))
        if match is None or match.group(1) not in wanted:
            continue
        value = float(match.group(3))
        if not math.isfinite(value):
            continue
        count += 1
        if count > MAX_SAMPLES:
            return {}
        found.setdefault(wanted[match.group(1)], []).append(Sample(_labels(match.group(2) or b""), value))
    return {name: tuple(samples) for name, samples in found.items()}


def total(samples: Samples, *names: str) -> Optional[float]:
    """Return the count that the first of ``names`` present gives: summed over engines, None if absent.

    Every tensor-parallel rank of one engine may report the same queue, so ranks
    of one engine count once (their largest).
    """
    groups = _groups(samples, names)
    return sum(groups.values()) if groups else None


def peak(samples: Samples, *names: str) -> Optional[float]:
    """Return the largest value of the first of ``names`` present: a mean would hide one full engine."""
    groups = _groups(samples, names)
    return max(groups.values()) if groups else None


def _groups(samples: Samples, names: Tuple[str, ...]) -> Dict[Tuple[str, str], float]:
    for name in names:
        groups: Dict[Tuple[str, str], float] = {}
        for sample in samples.get(name, ()):
            if sample.value < 0:                     # a count or a share: garbage is unknown
                continue
            key = (sample.labels.get("dp_rank", ""), sample.labels.get("engine", ""))
            groups[key] = max(sample.value, groups.get(key, 0.0))
        if groups:
            return groups
    return {}


def _labels(text: bytes) -> Dict[str, str]:
    return {match.group(1).decode("ascii"): _unescaped(match.group(2)) for match in _LABEL.finditer(text)}


def _unescaped(text: bytes) -> str:
    return _ESCAPE.sub(lambda match: b"\n" if match.group(1) == b"n" else match.group(1),
                       text).decode("utf-8", "replace")
