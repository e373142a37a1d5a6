"""What `up` tells a person while things get ready: the nodes' own sentences, each once."""
from __future__ import annotations

import re
from typing import Dict, Iterable, List, Optional, Sequence, Set, Tuple

from llmgw.domain.engine import EngineObserved, EnginePhase
from llmgw.domain.model import WeightsObserved, WeightsPhase
from llmgw.domain.view import ModelView, NodeView, ReplicaView

_NUMBERS = re.compile(r"\d[\d.,]*")
_Kind = Tuple[str, Optional[int]]             # a sentence without its numbers, tenths done


class Told:
    """Remembers what was said about each subject, so that only changes are said."""

    def __init__(self) -> None:
        self._last: Dict[str, _Kind] = {}
        self._tried: Dict[str, Set[_Kind]] = {}

    def news(self, nodes: Sequence[NodeView], models: Sequence[ModelView],
             replicas: Sequence[ReplicaView]) -> List[str]:
        """Return the sentences that are new since the last call; counting numbers alone are not news."""
        fresh = []
        for subject, sentence, tenth in _sentences(nodes, models, replicas):
            kind = (_NUMBERS.sub("#", sentence), tenth)
            if sentence and self._last.get(subject) != kind and not self._is_again(subject, kind):
                fresh.append(sentence)
            self._last[subject] = kind
        return list(dict.fromkeys(fresh))

    def _is_again(self, subject: str, kind: _Kind) -> bool:
        """Say whether this is what an earlier try to get an engine or weights said too."""
        if not subject.startswith(("engine ", "model ")):
            return False
        tried = self._tried.setdefault(subject, set())
        if kind in tried:
            return True
        tried.add(kind)
        return False


def _sentences(nodes: Sequence[NodeView], models: Sequence[ModelView],
               replicas: Sequence[ReplicaView]) -> Iterable[Tuple[str, str, Optional[int]]]:
    """Yield (subject, sentence, tenths done) in the order in which things get ready."""
    for node in nodes:
        for warning in node.warnings:
            yield f"warning {node.name} {warning}", f"{node.name}: {warning}", None
        if node.state != "ready":
            yield f"node {node.name}", f"{node.name}: {node.message or node.state}", None
        for engine in node.engines:
            yield (f"engine {engine.name} {engine.version}",) + _engine(engine)
        for weights in node.weights:
            yield (f"weights {weights.name}",) + _weights(weights)
    placed = {replica.model for replica in replicas}
    messages = [engine.message for node in nodes for engine in node.engines if engine.message]
    for model in models:
        if model.name not in placed and model.ready < model.wanted:
            whys = [why for why in model.why_not if not any(message in why for message in messages)]
            yield f"model {model.name}", "; ".join(_about(model.name, why) for why in whys), None
    for replica in replicas:
        if replica.state != "fetching":      # the weights were told of, in numbers
            said = replica.state if replica.state == "ready" else replica.message or replica.state
            yield f"replica {replica.id}", f"{replica.model}: {said}", None


def _about(name: str, why: str) -> str:
    return why if name in why else f"{name}: {why}"


def _engine(engine: EngineObserved) -> Tuple[str, Optional[int]]:
    head = f"{engine.name} {engine.version}: "
    if engine.phase is EnginePhase.INSTALLED:
        return f"{head}installed", None
    said = engine.sentence + (f" (try: {engine.hint})" if engine.hint else "")
    return said, _tenth(engine.done_bytes, engine.total_bytes)


def _weights(weights: WeightsObserved) -> Tuple[str, Optional[int]]:
    if weights.phase is WeightsPhase.WHOLE:
        return f"{weights.name}: weights are here", None
    if weights.phase is WeightsPhase.ABSENT:
        return "", None
    said = weights.message or f"{weights.phase.value} weights"
    tenth = _tenth(weights.done_bytes, weights.total_bytes)
    if tenth is not None and "%" not in said:
        said += f", {weights.done_bytes * 100 // weights.total_bytes} %"
    return _about(weights.name, said), tenth


def _tenth(done: Optional[int], total: Optional[int]) -> Optional[int]:
    return None if done is None or not total else done * 10 // total
