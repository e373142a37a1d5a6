"""Replicas over several nodes: what each rank is told, when all start again, when it serves, where it is placed."""
from __future__ import annotations

import dataclasses

import pytest

from llmgw.decide import gangs, replicas, routes_table
from llmgw.decide.placement import Board, Need, Placed, Unplaced
from llmgw.decide.replicas import Drain, Place, Remove, Restart, Traffic, Wanted
from llmgw.decide.shards import Seen, Step, next_step, why_wait
from llmgw.domain.engine import EngineObserved, EnginePhase
from llmgw.domain.model import ModelSpec
from llmgw.domain.replica import Gang, GpuSlot, Replica, ReplicaWish, Shard, ShardObserved, ShardState
from llmgw.domain.secret import Secret
from tests.decide.fleet import LOST, SILENT, gpu, node, weights

SPEC = ModelSpec("m", "vllm", "mirror:m", nodes=2, gpus=1, fabric="10.0.0.0/24")
READY, BACKOFF = ShardState.READY, ShardState.BACKOFF


def row(**more):
    return Replica("m-1", SPEC, "0.30.0", weights(), (Shard(0, "a"), Shard(1, "b")), Secret("k"), **more)


def fleet(*seen, **more):
    """Two nodes in the fabric; ``seen`` are (state, turn, meet_port) of rank 0 and 1, None where nothing is said."""
    found = {}
    for rank, (name, said) in enumerate(zip("ab", seen)):
        made = node(name, gpus=[gpu(0, node=name)], fabric=f"10.0.0.{rank + 1}", **more)
        shards = () if said is None else (ShardObserved(f"m-1.{rank}", said[0], "Ended", "it ended", turn=said[1], meet_port=said[2]),)
        found[name] = dataclasses.replace(made, observed=dataclasses.replace(made.observed, shards=shards))
    return found


def test_ranks_are_told_of_each_other_and_where_rank_0_is_met_in_this_turn():
    nodes = fleet((READY, 1, 7901), None)
    assert gangs.told(row(), row().shards[1], nodes) == Gang(2, 1, "10.0.0.2", "10.0.0.1", 7901, True)
    assert gangs.told(row(turn=2), row().shards[1], nodes) == Gang(2, 2, "10.0.0.2", "10.0.0.1", 0, False)
    assert gangs.told(dataclasses.replace(row(), shards=(Shard(0, "a"),)), Shard(0, "a"), nodes) is None


@pytest.mark.parametrize("seen, is_lost", [
    (((READY, 1, 1), (READY, 1, 0)), False), (((READY, 1, 1), (BACKOFF, 1, 0)), True), (((BACKOFF, 1, 1), (READY, 1, 0)), True),
    (((READY, 1, 1), (ShardState.FETCHING, 1, 0)), True), (((READY, 1, 1), (ShardState.FETCHING, 0, 0)), False),
    (((READY, 1, 1), (ShardState.CRASHLOOP, 1, 0)), True), (((READY, 2, 1), (BACKOFF, 1, 0)), True), ((None, None), False),
    (((BACKOFF, 0, 1), (BACKOFF, 0, 0)), False)])
def test_a_rank_that_ended_in_this_turn_restarts_all_and_once(seen, is_lost):
    nodes = fleet(*seen)
    assert bool(gangs.lost(row(), nodes)) is is_lost
    steps = replicas.reconcile([Wanted(SPEC, "0.30.0", weights())], [row()], tuple(nodes.values()), Traffic()).steps
    assert [step for step in steps if isinstance(step, Restart)] == ([Restart("m-1", gangs.lost(row(), nodes))] if is_lost else [])
    assert not gangs.lost(row(turn=2), fleet((BACKOFF, 1, 1), (BACKOFF, 1, 0)))


def test_a_gang_with_a_node_that_is_silent_for_long_makes_room_unless_a_router_hears_it():
    nodes = fleet((READY, 1, 1), (READY, 1, 0))
    nodes["b"] = dataclasses.replace(nodes["b"], liveness=SILENT)
    wanted = [Wanted(SPEC, "0.30.0", weights())]
    (step,) = replicas.reconcile(wanted, [row()], tuple(nodes.values()), Traffic()).steps
    assert step == Drain("m-1", "node b is silent, and the other ranks cannot serve without it")
    assert replicas.reconcile(wanted, [row()], tuple(nodes.values()), Traffic(frozenset(("m-1",)))).steps == ()


@pytest.mark.parametrize("seen, whole", [
    (((READY, 1, 1), (READY, 1, 0)), True), (((READY, 1, 1), (BACKOFF, 1, 0)), False), (((READY, 1, 1), (READY, 0, 0)), False),
    (((READY, 1, 1), None), False), (((ShardState.STARTING, 1, 1), (READY, 1, 0)), False)])
def test_it_serves_only_while_every_rank_of_this_turn_is_ready(seen, whole):
    assert gangs.is_whole(row(), fleet(*seen)) is whole
    assert gangs.is_whole(row(), {"a": fleet(*seen)["a"]}) is False


@pytest.mark.parametrize("state, reason, turn, waits", [
    (ShardState.FETCHING, "FetchingWeights", 0, True), (ShardState.WAITING, "WaitingForEngine", 0, True), (READY, "Ready", 1, True),
    (BACKOFF, "Ended", 1, True), (ShardState.FETCHING, "WaitingForGang", 0, False), (BACKOFF, "WaitingForGang", 1, False),
    (ShardState.STARTING, "Starting", 2, False), (READY, "Ready", 2, False)])
def test_rank_0_starts_when_all_the_others_could_start_too(state, reason, turn, waits):
    """Else it waits for one whose weights are still coming until it is ended for having stalled."""
    nodes, gang = fleet(None, (state, turn, 0)), row(turn=2)
    b = nodes["b"].observed
    nodes["b"] = dataclasses.replace(nodes["b"], observed=dataclasses.replace(b, shards=(dataclasses.replace(b.shards[0], reason=reason),)))
    told = gangs.told(gang, gang.shards[0], nodes)
    assert told.waits_for == ("rank 1 on b" if waits else "")
    assert why_wait(told, 0, 1) == ("waits until rank 1 on b can start" if waits else "")
    assert gangs.told(gang, gang.shards[1], nodes).waits_for == ""
    assert gangs.told(gang, gang.shards[0], {"a": nodes["a"]}).waits_for == "rank 1 on b"


@pytest.mark.parametrize("gang, rank, last, words", [
    (None, 0, 0, ""), (Gang(2, 1, "a", "b"), 0, 0, ""), (Gang(2, 1, "a", "b"), 1, 0, "rank 0 to say"), (Gang(2, 1, "a", "b", 9), 1, 0, ""),
    (Gang(2, 1, "a", "b", 9), 1, 1, "all ranks"), (Gang(2, 2, "a", "b", 9), 1, 1, ""), (Gang(2, 1, "", "b", 9), 0, 0, "fabric_address")])
def test_a_rank_waits_for_its_turn_and_for_rank_0(gang, rank, last, words):
    why = why_wait(gang, rank, last)
    assert words in why and bool(words) is bool(why)


@pytest.mark.parametrize("state", list(ShardState))
def test_a_turn_that_is_over_ends_what_runs_and_an_unstarted_rank_waits(state):
    runs = state in (ShardState.STARTING, ShardState.READY, ShardState.UNREADY)
    step = next_step(Seen(state, runs=runs, turn_over=True, must_wait=True), 0.0)
    assert step is (Step.END_TURN if runs else Step.NOTHING if state is ShardState.STOPPED else
                    Step.STOP if state is ShardState.STOPPING else Step.WAIT_FOR_GANG)


def board(*nodes):
    return Board(nodes, ())


def usable(name, fabric, cards=("H100",), **more):
    gpus = [gpu(number, node=name, name=card) for number, card in enumerate(cards)]
    return node(name, gpus=gpus, fabric=fabric, engines=(EngineObserved("vllm", "0.30.0", EnginePhase.INSTALLED, usable=True),), **more)


def test_it_is_placed_together_on_different_nodes_of_the_network():
    found = board(usable("c", "10.0.0.3"), usable("a", "10.0.0.1"), usable("z", "10.9.0.1")).place(Need(SPEC, "0.30.0", weights()))
    assert isinstance(found, Placed)
    assert [(shard.rank, shard.node, len(shard.gpus)) for shard in found.shards] == [(0, "a", 1), (1, "c", 1)]


def test_it_is_not_placed_at_all_when_one_node_is_missing_and_each_says_why():
    found = board(usable("a", "10.0.0.1"), usable("b", ""), usable("z", "10.9.0.1")).place(Need(SPEC, "0.30.0", weights()))
    assert isinstance(found, Unplaced)
    assert found.reasons[0] == "it needs 2 nodes at once, 1 could take a part of it"
    assert any("b: it has no fabric_address" in reason for reason in found.reasons)
    assert any("z: its fabric_address 10.9.0.1 is not in 10.0.0.0/24" in reason for reason in found.reasons)


def placed(spec, *cards):
    """Return the outcome for nodes a, b, c… with these cards."""
    return board(*(usable(name, f"10.0.0.{number + 1}", each) for number, (name, each) in enumerate(zip("abcd", cards)))).place(
        Need(spec, "0.30.0", weights()))


def test_all_its_nodes_have_gpus_of_one_kind():
    found = placed(SPEC, ("L4",), ("H100",), ("L4", "A100"), ("A100",))
    assert [(shard.node, shard.gpus[0].index) for shard in found.shards] in ([("a", 0), ("c", 0)], [("c", 1), ("d", 0)])
    pair = dataclasses.replace(SPEC, gpus=2)
    found = placed(pair, ("L4", "H100", "H100"), ("L4", "L4"), ("H100", "H100"))
    assert [(shard.node, [slot.index for slot in shard.gpus]) for shard in found.shards] == [("a", [1, 2]), ("c", [0, 1])]


def test_nodes_with_gpus_of_different_kinds_are_no_place_and_each_says_which_it_has():
    found = placed(SPEC, ("L4",), ("H100",), ("A100", "H100", "T4"), ())
    assert isinstance(found, Placed) and [shard.node for shard in found.shards] == ["b", "c"]
    found = placed(dataclasses.replace(SPEC, nodes=3), ("L4",), ("H100",), ("H100", "T4"), ())
    assert found == Unplaced(("it needs 3 nodes at once with GPUs of one kind, 2 could take a part of it", "a: could take it with its L4",
                              "b: could take it with its H100", "c: could take it with its H100 or T4", "d: it has no GPU"))
    found = placed(dataclasses.replace(SPEC, gpus=2), ("L4", "H100"), ("H100", "H100"))
    assert "a: 1 of the 2 GPUs of one kind it needs can take it" in found.reasons


def test_what_its_other_nodes_have_ended_is_free_for_a_new_one_while_one_node_is_silent():
    """Else the GPUs of the nodes that live are kept until the silent one is lost, ten minutes long."""
    gone = dataclasses.replace(row(wish=ReplicaWish.STOP), shards=(Shard(0, "a", (GpuSlot("GPU-a-0", 0),)), Shard(1, "b", (GpuSlot("GPU-b-0", 0),))))
    a, b, c = usable("a", "10.0.0.1"), usable("b", "10.0.0.2"), usable("c", "10.0.0.3")
    wanted, silent = [Wanted(SPEC, "0.30.0", weights())], dataclasses.replace(b, liveness=SILENT, acknowledged=False)
    (step,) = replicas.reconcile(wanted, [gone], (a, silent, c), Traffic()).steps
    assert isinstance(step, Place) and [shard.node for shard in step.shards] == ["a", "c"]
    for said in (dataclasses.replace(a, acknowledged=False), dataclasses.replace(a, observed=dataclasses.replace(
            a.observed, shards=(ShardObserved("m-1.0", ShardState.STOPPING),)))):
        assert replicas.reconcile(wanted, [gone], (said, silent, c), Traffic()).steps == ()
    lost = replicas.reconcile(wanted, [gone], (a, dataclasses.replace(silent, liveness=LOST), c), Traffic()).steps
    assert Remove("m-1") in lost


@pytest.mark.parametrize("seen, served", [(((READY, 1, 1), (READY, 1, 0)), 1), (((READY, 1, 1), (BACKOFF, 1, 0)), 0)])
def test_routers_are_told_of_it_only_while_it_is_whole(seen, served):
    nodes = fleet(*seen)
    (model,) = routes_table.routed_models([Wanted(SPEC, "0.30.0", weights())], [row()], nodes, frozenset(), {}, None)
    assert len(model.replicas) == served and [one.node for one in model.replicas] == ["a"] * served
