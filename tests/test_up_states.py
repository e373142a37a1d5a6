"""What `up` says while things get ready."""
from __future__ import annotations

from llmgw.domain.engine import EngineObserved, EnginePhase
from llmgw.domain.model import WeightsObserved, WeightsPhase
from llmgw.domain.node import NodeFacts, NodeIdentity
from llmgw.domain.view import ModelView, NodeView, ReplicaView
from llmgw.up_children import last_words
from llmgw.up_states import Told


def node(engines=(), weights=(), warnings=(), state="ready", message=""):
    return NodeView("alpha", state, message, NodeIdentity("alpha", "0", "b"), NodeFacts(), True, 1.0,
                    engines=tuple(engines), weights=tuple(weights), warnings=tuple(warnings))


def engine(phase, message="", **more):
    return EngineObserved("llama.cpp", "b10991", phase, message, **more)


MODEL = ModelView("gemma", "llama.cpp", "b10991", "chat", "mirror:gemma", 1, 0,
                  why_not=("alpha: llama.cpp b10991: checking",))


def test_counting_numbers_are_said_every_tenth_only():
    told, said = Told(), []
    for done in range(0, 1001):
        seen = engine(EnginePhase.DOWNLOADING, f"x.tar.gz, {done} of 1000 MB", done_bytes=done, total_bytes=1000)
        said += told.news([node([seen])], [], [])
    assert len(said) == 11 and said[0] == "llama.cpp b10991: x.tar.gz, 0 of 1000 MB"


def test_every_sentence_is_the_nodes_own_and_said_once():
    told = Told()
    missing = engine(EnginePhase.MISSING, "libgomp.so.1 is missing", hint="apt-get install libgomp1")
    news = told.news([node([missing], warnings=["no AVX2"])], [MODEL], [])
    assert news == ["alpha: no AVX2", "llama.cpp b10991: libgomp.so.1 is missing (try: apt-get install libgomp1)",
                    "gemma: alpha: llama.cpp b10991: checking"]
    assert told.news([node([missing], warnings=["no AVX2"])], [MODEL], []) == []
    assert told.news([node([engine(EnginePhase.INSTALLED, "whatever")])], [], []) == ["llama.cpp b10991: installed"]


def test_weights_and_replicas_are_followed_to_the_end():
    told = Told()
    fetching = WeightsObserved("gemma", "f", WeightsPhase.FETCHING, 50, 100)
    assert told.news([node(weights=[fetching])], [MODEL], []) == [
        "gemma: fetching weights, 50 %", "gemma: alpha: llama.cpp b10991: checking"]
    starting = ReplicaView("gemma-1", "gemma", "llama.cpp", "b10991", "run", "starting", "", "loading the model", 1.0)
    assert told.news([node()], [MODEL], [starting]) == ["gemma: loading the model"]
    ready = ReplicaView("gemma-1", "gemma", "llama.cpp", "b10991", "run", "ready", "", "answers", 1.0)
    assert told.news([node()], [MODEL], [ready]) == ["gemma: ready"]


def test_a_try_that_fails_as_the_one_before_is_not_told_again():
    told = Told()
    asking, failed = engine(EnginePhase.RESOLVING, "asking"), engine(EnginePhase.RESOLVING, "no answer after 3 s")
    said = [told.news([node([seen])], [], []) for seen in (asking, failed, asking, failed, asking)]
    assert said == [["llama.cpp b10991: asking"], ["llama.cpp b10991: no answer after 3 s"], [], [], []]


def test_the_last_words_of_a_role_are_its_own_complaint():
    assert last_words(["2026 INFO x: fine", "llmgw: port 1 is taken: a", "  try: another"]) == (
        "port 1 is taken: a", "another")
    assert last_words(["llmgw: no hint", "other"]) == ("no hint", "")
    logged = ["2026-11-30T12:00:00.000Z ERROR server.main: disk full", "2026 INFO x: bye"]
    assert last_words(logged) == ("disk full", "")
    bug = ["Traceback (most recent call last):", "  File x", "ModuleNotFoundError: No module named 'x'"]
    assert last_words(bug) == ("ModuleNotFoundError: No module named 'x'", "")
    assert last_words([]) == ("", "")
