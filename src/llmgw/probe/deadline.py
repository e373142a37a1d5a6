"""Ask this machine a question and wait only so long for the answer."""
from __future__ import annotations

import threading
from typing import Callable, Dict, List, Tuple, TypeVar

from llmgw.domain.errors import LlmgwError

T = TypeVar("T")

_hanging: Dict[str, threading.Thread] = {}


def within(seconds: float, what: str, question: Callable[[], T], unknown: T) -> Tuple[T, str]:
    """Return (answer, ""), or (``unknown``, a sentence) when it fails or does not end in time.

    A question that hangs (a dead network disk, a broken driver) keeps its thread;
    it is not asked again while that one hangs, so hanging threads do not pile up.
    """
    stuck = _hanging.get(what)
    if stuck is not None and stuck.is_alive():
        return unknown, f"{what}: still no answer to an earlier question"
    answer: List[T] = []
    problem: List[str] = []

    def ask() -> None:
        try:
            answer.append(question())
        except LlmgwError as error:
            problem.append(f"{what}: {error.message}")
        except (OSError, ValueError) as error:
            problem.append(f"{what}: {getattr(error, 'strerror', None) or error}")

    thread = threading.Thread(target=ask, name=f"probe-{what}", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        _hanging[what] = thread
        return unknown, f"{what}: no answer within {seconds:g} seconds"
    return (answer[0], "") if answer else (unknown, problem[0] if problem else f"{what}: failed")
