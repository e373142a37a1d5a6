"""Whom a node asks for its weights."""
from __future__ import annotations

from llmgw.decide.peers import MOST_PEERS, asked, shares
from llmgw.domain.heartbeat import Share
from llmgw.domain.replica import ReplicaWish
from tests.decide.fleet import LOST, UNREACHABLE, node, row, spec


def fleet(*nodes):
    return {one.name: one for one in nodes}


def test_nodes_that_shall_have_the_same_weights_ask_each_other():
    rows = [row("r1", "a"), row("r2", "b"), row("r3", "c", spec("other"))]
    assert asked(rows, fleet(node("a"), node("b"), node("c"))) == {"a": {"b": ("m",)}, "b": {"a": ("m",)}}


def test_a_node_that_holds_them_and_runs_nothing_of_them_is_asked_and_asks_nobody():
    assert asked([row("r1", "a")], fleet(node("a"), node("b", weights=("m",)), node("c", weights=("x",)))) == {
        "a": {"b": ("m",)}}


def test_several_models_of_one_peer_stand_together():
    rows = [row("r1", "a"), row("r2", "b"), row("r3", "a", spec("n")), row("r4", "b", spec("n"))]
    assert asked(rows, fleet(node("a"), node("b")))["a"] == {"b": ("m", "n")}


def test_who_cannot_answer_is_not_asked_and_who_is_gone_does_not_ask():
    rows = [row("r1", "a"), row("r2", "b"), row("r3", "c"), row("r4", "d"), row("r5", "e", wish=ReplicaWish.STOP),
            row("r6", "gone")]
    nodes = fleet(node("a"), node("b", gate_port=0), node("c", heard=False), node("d", liveness=LOST), node("e"))
    assert asked(rows, nodes).get("a") is None
    assert set(asked(rows, nodes)) == {"b", "c", "d"}              # they will be heard again, and then ask a
    assert asked([row("r1", "a"), row("r2", "b")], fleet(node("a"), node("b", liveness=UNREACHABLE)))["a"]


def test_in_a_large_fleet_each_asks_a_few_and_is_asked_by_a_few():
    names = [f"n{number:02}" for number in range(30)]
    found = asked([row(f"r-{name}", name) for name in names], fleet(*(node(name) for name in names)))
    assert all(len(found[name]) == MOST_PEERS for name in names)
    assert all(sum(name in found[other] for other in names) == MOST_PEERS for name in names)
    assert list(found["n28"]) == ["n00", "n01", "n02", "n03", "n04", "n29"]


def test_each_of_those_that_shall_have_weights_begins_elsewhere():
    rows = [row("r1", "b"), row("r2", "a"), row("r3", "c", spec("other")), row("r4", "d", wish=ReplicaWish.STOP), row("r5", "gone")]
    assert shares(rows, fleet(*map(node, "abcd"))) == {"a": (Share("m", 0, 2),), "b": (Share("m", 1, 2),)}
