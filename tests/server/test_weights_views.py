"""What is shown of a model's weights on every node."""
from __future__ import annotations

from llmgw.ctl.models import weights_word
from llmgw.decide.liveness import NodeLife, NodeLiveness
from llmgw.decide.placement import NodeState
from llmgw.domain.heartbeat import NodeObserved
from llmgw.domain.model import Weights, WeightsFile, WeightsObserved, WeightsPhase
from llmgw.domain.node import NodeFacts, NodeIdentity
from llmgw.server.weights_views import weights_on_nodes

WEIGHTS = Weights("m", "f", (WeightsFile("m.gguf", 1000, "a" * 64),))


def node(name, *seen, life=NodeLife.READY):
    return NodeState(name, NodeLiveness(life, "", 0.0), NodeObserved(
        NodeIdentity(name, "0", "b"), NodeFacts(), True,
        weights=tuple(WeightsObserved("m", "f", *one) for one in seen)))


def words(*nodes):
    found = weights_on_nodes(WEIGHTS, (), {one.name: one for one in nodes})
    return {on.node: weights_word(on) for on in found}


def test_every_node_of_a_small_fleet_says_where_it_stands():
    assert words(node("none"), node("new", (WeightsPhase.FETCHING, 430, 1000, "", 0)),
                 node("half", (WeightsPhase.FETCHING, 430, 1000, "", 5)), node("all", (WeightsPhase.WHOLE, 1000, 1000)),
                 node("bad", (WeightsPhase.DAMAGED, 0, 1000, "1 of 2 chunks had changed")),
                 node("full", (WeightsPhase.FAILED, 0, 1000, "no space left"))) == {
        "none": "absent", "new": "43 %", "half": "43 % (1m left)", "all": "whole",
        "bad": "damaged: 1 of 2 chunks had changed", "full": "failed: no space left"}


def test_of_a_large_fleet_only_those_that_have_to_do_with_it():
    many = [node(f"n{number}") for number in range(20)]
    assert words(*many, node("all", (WeightsPhase.WHOLE, 1000, 1000))) == {"all": "whole"}
    assert weights_on_nodes(None, (), {}) == ()


def test_a_node_that_is_silent_says_nothing():
    assert words(node("gone", (WeightsPhase.WHOLE, 1000, 1000), life=NodeLife.LOST)) == {}


def test_what_was_repaired_is_told():
    assert words(node("all", (WeightsPhase.WHOLE, 1000, 1000, "1 of 2 chunks fetched again"))) == {
        "all": "whole: 1 of 2 chunks fetched again"}
