"""Which replica changes next: by example, and as a machine whose events are lost, doubled and reordered."""
from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from llmgw.decide.liveness import NodeLife
from llmgw.decide.replicas import (
    DRAIN_GRACE_SECONDS,
    Drain,
    Health,
    Place,
    Remove,
    Stop,
    Traffic,
    health,
    reconcile,
    stops_too_many,
)
from llmgw.domain.heartbeat import NodeObserved
from llmgw.domain.replica import Replica, ReplicaWish, ShardState
from llmgw.domain.secret import Secret
from tests.decide.fleet import (
    ALIVE,
    INSTALLED,
    LOST,
    SILENT,
    SUSPECT,
    UNREACHABLE,
    node,
    row,
    seen,
    spec,
    want,
    weights,
)

CPU = {"gpus": 0}


def steps(wanted, replicas, nodes, traffic=Traffic()):
    return list(reconcile(wanted, replicas, nodes, traffic).steps)


def kinds(found):
    return [(type(step).__name__, getattr(step, "replica", None) or step.shards[0].node) for step in found]


def current(identity, where="a", **fields):
    return row(identity, where, spec(**CPU), **fields)


def test_missing_replicas_are_placed_apart():
    found = steps([want(replicas=2, **CPU)], [], [node("a"), node("b")])
    assert kinds(found) == [("Place", "a"), ("Place", "b")]


def test_enough_replicas_are_left_alone_whatever_their_state():
    for state in ShardState:
        nodes = [node("a", shards=[seen("m-1", state)])]
        assert steps([want(**CPU)], [current("m-1")], nodes) == []


def test_a_model_without_weights_says_so_and_its_replicas_stay():
    lacking = replace(want(replicas=2, **CPU), weights=None, problem="they are being pulled")
    plan = reconcile([lacking], [current("m-1")], [node("a", shards=[seen("m-1")])], Traffic())
    assert plan.steps == () and plan.unplaced == {"m": ("they are being pulled",)}


def test_what_cannot_be_placed_has_every_node_s_words():
    plan = reconcile([want(size=100, **CPU)], [], [node("a", 4), node("b", engines=())], Traffic())
    assert plan.steps == ()
    assert plan.unplaced["m"] == ("a: 105.3 GiB of memory are needed, 4.0 GiB are free",
                                  "b: llama.cpp b10991 is not installed")


def test_fewer_wanted_drains_the_sick_then_the_youngest():
    rows = [current("m-1", created_at=1), current("m-2", "b", created_at=2), current("m-3", "c", created_at=3)]
    nodes = [node("a", shards=[seen("m-1", ShardState.CRASHLOOP)]), node("b", shards=[seen("m-2")]),
             node("c", shards=[seen("m-3")])]
    assert kinds(steps([want(replicas=1, **CPU)], rows, nodes)) == [("Drain", "m-1"), ("Drain", "m-3")]


def test_no_replicas_wanted_or_no_model_at_all_drains_everything():
    nodes = [node("a", shards=[seen("m-1")])]
    assert kinds(steps([want(replicas=0, **CPU)], [current("m-1")], nodes)) == [("Drain", "m-1")]
    assert kinds(steps([], [current("m-1")], nodes)) == [("Drain", "m-1")]


def test_an_edit_starts_the_new_one_before_the_old_one_drains():
    edited, old, nodes = want(parallel=2, **CPU), current("m-1"), [node("a", shards=[seen("m-1")]), node("b")]
    assert kinds(steps([edited], [old], nodes)) == [("Place", "b")]
    new = row("m-2", "b", edited.spec, created_at=5)
    starting = [node("a", shards=[seen("m-1")]), node("b", shards=[seen("m-2", ShardState.STARTING)])]
    assert steps([edited], [old, new], starting) == []
    ready = [node("a", shards=[seen("m-1")]), node("b", shards=[seen("m-2")])]
    assert kinds(steps([edited], [old, new], ready)) == [("Drain", "m-1")]


def test_an_edit_is_rolled_one_by_one():
    edited, rows = want(replicas=2, parallel=2, **CPU), [current("m-1"), current("m-2", "b")]
    nodes = [node("a", shards=[seen("m-1"), seen("m-3")]), node("b", shards=[seen("m-2")])]
    assert [kind for kind, _ in kinds(steps([edited], rows, nodes))] == ["Place"]
    new = row("m-3", "a", edited.spec, created_at=5)
    assert [kind for kind, _ in kinds(steps([edited], [*rows, new], nodes))] == ["Place", "Drain"]


def test_where_there_is_no_room_one_old_one_makes_it_and_only_one():
    edited, rows = want(replicas=2, parallel=2, size=3, **CPU), [
        current("m-1", of=weights(size=3)), current("m-2", "b", of=weights(size=3))]
    nodes = [node("a", 3.2, shards=[seen("m-1")]), node("b", 3.2, shards=[seen("m-2")])]
    assert kinds(steps([edited], rows, nodes)) == [("Drain", "m-1")]
    leaving = [replace(rows[0], wish=ReplicaWish.DRAIN), rows[1]]
    assert steps([edited], leaving, nodes) == []


def test_an_edit_that_fits_nowhere_leaves_what_serves():
    edited = want(parallel=2, size=500, **CPU)
    assert steps([edited], [current("m-1")], [node("a", 3, shards=[seen("m-1")])]) == []


def test_a_new_one_that_does_not_come_up_stops_the_roll():
    edited = want(replicas=2, parallel=2, **CPU)
    rows = [current("m-1"), current("m-2", "b"), row("m-3", "c", edited.spec, created_at=5)]
    for state in (ShardState.CRASHLOOP, ShardState.BACKOFF, ShardState.UNREADY, ShardState.FETCHING):
        nodes = [node("a", shards=[seen("m-1")]), node("b", shards=[seen("m-2")]),
                 node("c", shards=[seen("m-3", state)])]
        assert steps([edited], rows, nodes) == []


def test_an_old_one_that_does_not_serve_goes_as_soon_as_a_new_one_is_there():
    edited = want(parallel=2, **CPU)
    sick = [node("a", shards=[seen("m-1", ShardState.CRASHLOOP)]), node("b")]
    assert kinds(steps([edited], [current("m-1")], sick)) == [("Place", "b")]
    new = row("m-2", "b", edited.spec, created_at=5)
    assert kinds(steps([edited], [current("m-1"), new], sick)) == [("Drain", "m-1")]


def test_replicas_count_aliases_and_labels_that_still_hold_restart_nothing():
    nodes = [node("a", labels={"rack": "a"}, shards=[seen("m-1")])]
    for changed in (want(aliases=("x",), **CPU), want(labels={"rack": "a"}, **CPU), want(only_nodes=("a",), **CPU),
                    want(source="hf:a/b", **CPU)):
        assert steps([changed], [current("m-1")], nodes) == []


def test_a_label_that_no_longer_holds_moves_the_replica():
    moved = want(labels={"rack": "b"}, **CPU)
    nodes = [node("a", labels={"rack": "a"}, shards=[seen("m-1")]), node("b", labels={"rack": "b"})]
    assert kinds(steps([moved], [current("m-1")], nodes)) == [("Place", "b")]


def test_a_newer_engine_or_other_weights_roll_too():
    nodes = [node("a", shards=[seen("m-1")], engines=[INSTALLED, replace(INSTALLED, version="b2")])]
    assert [kind for kind, _ in kinds(steps([want(version="b2", **CPU)], [current("m-1")], nodes))] == ["Place"]
    assert [kind for kind, _ in kinds(steps([want(mark="other", **CPU)], [current("m-1")], nodes))] == ["Place"]


def test_what_runs_of_former_packages_rolls_once_its_node_has_the_new_ones():
    outdated = replace(seen("m-1"), outdated="vllm 1 was installed again, of other packages")
    first, second = current("m-1"), current("m-2", "b")
    nodes = [node("a", 3.2, shards=[outdated]), node("b", 3.2, shards=[seen("m-2")])]
    (step,) = steps([want(replicas=2, **CPU)], [first, second], nodes)
    assert (type(step).__name__, step.shards[0].node) == ("Place", "a") and step.reason.endswith("again, of other packages")
    new = current("m-3", created_at=5)
    nodes = [node("a", 3.2, shards=[outdated, seen("m-3")]), node("b", 3.2, shards=[seen("m-2")])]
    assert kinds(steps([want(replicas=2, **CPU)], [first, second, new], nodes)) == [("Drain", "m-1")]
    full = [node("a", 3.2, shards=[replace(outdated)]), node("b", 0.1, shards=[seen("m-2")])]
    large = [row("m-1", "a", spec(**CPU), of=weights(size=3)), row("m-2", "b", spec(**CPU), of=weights(size=3))]
    assert kinds(steps([want(replicas=2, size=3, **CPU)], large, full)) == [("Drain", "m-1")]
    assert steps([want(replicas=2, **CPU)], [second], [node("b", shards=[seen("m-2")])])[0].shards[0].node == "b"


def test_a_drained_node_s_replica_is_replaced_elsewhere_first():
    nodes = [node("a", shards=[seen("m-1")], draining=True), node("b")]
    assert kinds(steps([want(**CPU)], [current("m-1")], nodes)) == [("Place", "b")]
    new = current("m-2", "b", created_at=5)
    nodes = [nodes[0], node("b", shards=[seen("m-2")])]
    assert kinds(steps([want(**CPU)], [current("m-1"), new], nodes)) == [("Drain", "m-1")]
    assert steps([want(**CPU)], [current("m-1")], [nodes[0]]) == []


@pytest.mark.parametrize("alive", [SUSPECT, UNREACHABLE])
def test_a_short_silence_changes_nothing(alive):
    nodes = [node("a", shards=[seen("m-1")], liveness=alive), node("b")]
    assert steps([want(**CPU)], [current("m-1")], nodes) == []


def test_a_long_silence_brings_a_replacement_and_stops_nothing():
    nodes = [node("a", shards=[seen("m-1")], liveness=SILENT), node("b")]
    found = steps([want(**CPU)], [current("m-1")], nodes)
    assert kinds(found) == [("Place", "b")] and "node a is silent" in found[0].reason
    starting = [nodes[0], node("b", shards=[seen("m-2", ShardState.STARTING)])]
    both = [current("m-1"), current("m-2", "b", created_at=5)]
    assert steps([want(**CPU)], both, starting) == []


def test_a_replica_that_a_router_hears_is_not_gone():
    nodes = [node("a", shards=[seen("m-1")], liveness=SILENT), node("b")]
    assert steps([want(**CPU)], [current("m-1")], nodes, Traffic(answering=frozenset({"m-1"}))) == []


def test_a_crashlooping_replacement_of_a_silent_one_is_not_replaced_again_and_again():
    nodes = [node("a", liveness=SILENT), node("b", shards=[seen("m-2", ShardState.CRASHLOOP)]), node("c")]
    assert steps([want(**CPU)], [current("m-1"), current("m-2", "b", created_at=5)], nodes) == []


def test_a_node_that_comes_back_keeps_its_replica_and_the_younger_one_goes():
    both = [current("m-1", created_at=1), current("m-2", "b", created_at=5)]
    nodes = [node("a", shards=[seen("m-1")]), node("b", shards=[seen("m-2")])]
    assert kinds(steps([want(**CPU)], both, nodes)) == [("Drain", "m-2")]
    starting = [nodes[0], node("b", shards=[seen("m-2", ShardState.STARTING)])]
    assert kinds(steps([want(**CPU)], both, starting)) == [("Drain", "m-2")]


def test_a_silent_one_is_surplus_only_when_enough_others_are_seen_to_serve():
    both = [current("m-1", created_at=1), current("m-2", "b", created_at=5)]
    nodes = [node("a", liveness=SILENT), node("b", shards=[seen("m-2")])]
    assert kinds(steps([want(**CPU)], both, nodes)) == [("Drain", "m-1")]
    unknown = [node("a", heard=False, liveness=SUSPECT), node("b", shards=[seen("m-2", ShardState.STARTING)])]
    assert steps([want(**CPU)], both, unknown) == []


def test_a_drain_ends_when_it_is_idle_or_its_grace_is_over():
    drained = current("m-1", wish=ReplicaWish.DRAIN)
    nodes = [node("a", shards=[seen("m-1")])]
    for traffic, stops in [
            (Traffic(), False), (Traffic(draining_seconds={"m-1": 100.0}), False),
            (Traffic(idle=frozenset({"m-1"}), draining_seconds={"m-1": 1.0}), False),
            (Traffic(idle=frozenset({"m-1"}), draining_seconds={"m-1": 6.0}), True),
            (Traffic(draining_seconds={"m-1": DRAIN_GRACE_SECONDS}), True)]:
        assert kinds(steps([], [drained], nodes, traffic)) == ([("Stop", "m-1")] if stops else [])
    assert kinds(steps([], [drained], [node("a", shards=[seen("m-1", ShardState.BACKOFF)])])) == [("Stop", "m-1")]


@pytest.mark.parametrize("where, removed", [
    (node("a"), True), (node("a", shards=[seen("m-1", ShardState.STOPPED)]), True),
    (node("a", acknowledged=False), False), (node("a", heard=False), False),
    (node("a", shards=[seen("m-1", ShardState.STOPPING)]), False), (node("a", liveness=LOST), True),
    (node("b"), True)])
def test_a_stopped_row_goes_when_its_node_says_that_it_is_gone(where, removed):
    found = steps([], [current("m-1", wish=ReplicaWish.STOP)], [where])
    assert kinds(found) == ([("Remove", "m-1")] if removed else [])


def test_a_stopping_replica_still_holds_its_room():
    stopping = row("x-1", "a", spec("x", **CPU), wish=ReplicaWish.STOP, of=weights("x", 3))
    assert steps([want(size=3, **CPU)], [stopping], [node("a", 5, shards=[seen("x-1", ShardState.STOPPING)])]) == []


@pytest.mark.parametrize("have, wanted, said", [
    (2, 1, 0), (3, 1, 1), (4, 2, 0), (1, 0, 1), (3, None, 1), (3, 5, 0)])
def test_more_than_half_at_once_needs_a_confirm(have, wanted, said):
    rows = [current(f"m-{number}") for number in range(have)]
    models = [] if wanted is None else [want(replicas=wanted, **CPU)]
    assert len(stops_too_many(models, rows)) == said


class Fleet(RuleBasedStateMachine):
    """Three nodes and a server between which heartbeats and orders are lost, doubled and reordered.

    A node does what the last order that reached it says; the server sees what the
    last heartbeat that reached it said. Orders carry the generation.
    """

    @initialize(room=st.integers(3, 9))
    def begin(self, room):
        self.room = room
        self.wanted = [want(replicas=2, **CPU)]
        self.rows = []
        self.number = 0
        self.names = ["a", "b", "c"]
        self.running = {name: {} for name in self.names}    # on the node: replica -> state
        self.order = {name: (0, ()) for name in self.names}
        self.said = {name: None for name in self.names}     # what the server last heard
        self.late = {name: [] for name in self.names}       # heartbeats still under way
        self.silent = dict.fromkeys(self.names, False)
        self.generation = dict.fromkeys(self.names, 0)
        self.told = dict.fromkeys(self.names, ())
        self.exchange_all()

    # The wire.

    def heartbeat(self, name):
        shards = tuple(seen(replica, state) for replica, state in sorted(self.running[name].items()))
        made = node(name, self.room, shards=shards).observed
        return replace(made, generation=self.order[name][0])

    def obey(self, name, order):
        if order[0] < self.order[name][0]:
            return                                           # an older order is refused
        self.order[name] = order
        self.running[name] = {replica: self.running[name].get(replica, ShardState.STARTING) for replica in order[1]}

    def desired(self, name):
        rows = tuple(sorted(row.id for row in self.rows if row.wish is not ReplicaWish.STOP
                            and row.shards[0].node == name))
        if rows != self.told[name]:
            self.told[name], self.generation[name] = rows, self.generation[name] + 1
        return self.generation[name], rows

    def exchange(self, name):
        if not self.silent[name]:
            self.said[name] = self.heartbeat(name)
            self.obey(name, self.desired(name))

    def exchange_all(self):
        for name in self.names:
            self.exchange(name)

    # The server.

    def nodes(self):
        found = []
        for name in self.names:
            self.desired(name)
            observed: NodeObserved = self.said[name]
            found.append(replace(
                node(name), observed=observed, liveness=SILENT if self.silent[name] else ALIVE,
                acknowledged=observed is not None and observed.generation == self.generation[name]))
        return found

    def act(self, plan, nodes):
        by_name = {one.name: one for one in nodes}
        for step in plan.steps:
            row = next((row for row in self.rows if row.id == getattr(step, "replica", None)), None)
            if isinstance(step, Place):
                self.number += 1
                self.rows.append(Replica(f"m-{self.number}", step.need.spec, step.need.engine_version,
                                         step.need.weights, step.shards, Secret("k"), created_at=self.number))
            elif isinstance(step, Remove):
                assert row.id not in self.running[row.shards[0].node] or self.silent[row.shards[0].node]
                self.rows.remove(row)
            else:
                if isinstance(step, Drain):
                    self.check_not_needed(row, by_name)
                wish = ReplicaWish.DRAIN if isinstance(step, Drain) else ReplicaWish.STOP
                assert not (isinstance(step, Stop) and row.wish is ReplicaWish.RUN)
                self.rows[self.rows.index(row)] = replace(row, wish=wish)

    def check_not_needed(self, row, by_name):
        """A healthy replica goes only when enough others are seen well, or it makes room for a changed one."""
        count = self.wanted[0].spec.replicas if self.wanted else 0
        if health(row, by_name, frozenset()) is not Health.WELL or row.model != replace(
                self.wanted[0].spec if self.wanted else row.model, replicas=row.model.replicas):
            return
        others = [other for other in self.rows if other.id != row.id and other.wish is ReplicaWish.RUN
                  and health(other, by_name, frozenset()) is Health.WELL]
        assert len(others) >= count, (row.id, count)

    @rule(doubled=st.booleans())
    def turn(self, doubled):
        nodes = self.nodes()
        drains = {row.id: 10.0 for row in self.rows if row.wish is ReplicaWish.DRAIN}
        traffic = Traffic(idle=frozenset(drains), draining_seconds=drains)
        plan = reconcile(self.wanted, self.rows, nodes, traffic)
        assert plan == reconcile(self.wanted, list(reversed(self.rows)), nodes, traffic)
        self.act(plan, nodes)
        if doubled:                                          # the same news once more
            nodes = self.nodes()
            self.act(reconcile(self.wanted, self.rows, nodes, traffic), nodes)

    # What happens.

    @rule(name=st.sampled_from("abc"))
    def talk(self, name):
        self.exchange(name)

    @rule(name=st.sampled_from("abc"))
    def answer_is_lost(self, name):
        if not self.silent[name]:
            self.said[name] = self.heartbeat(name)

    @rule(name=st.sampled_from("abc"))
    def heartbeat_is_delayed(self, name):
        self.late[name].append(self.heartbeat(name))

    @rule(name=st.sampled_from("abc"))
    def delayed_heartbeat_arrives(self, name):
        if self.late[name] and not self.silent[name]:
            self.said[name] = self.late[name].pop(0)

    @rule(name=st.sampled_from("abc"), state=st.sampled_from(
        [ShardState.READY, ShardState.READY, ShardState.BACKOFF, ShardState.CRASHLOOP, ShardState.STARTING]))
    def shard_moves(self, name, state):
        for replica in self.running[name]:
            self.running[name][replica] = state

    @rule(name=st.sampled_from("abc"), silent=st.booleans())
    def silence(self, name, silent):
        self.silent[name] = silent
        self.late[name].clear()

    @rule(count=st.integers(0, 3), parallel=st.integers(1, 2), gone=st.booleans())
    def edit(self, count, parallel, gone):
        self.wanted = [] if gone else [want(replicas=count, parallel=parallel, **CPU)]

    @invariant()
    def the_fleet_does_not_overflow(self):
        assert len([row for row in self.rows if row.wish is ReplicaWish.RUN]) <= 3 + 4

    def teardown(self):
        """Left in peace, everything settles: nodes well, exactly the wanted replicas, all ready."""
        if not hasattr(self, "names"):
            return
        for name in self.names:
            self.silence(name, False)
        quiet = 0
        for _ in range(40):
            for name in self.names:
                self.shard_moves(name, ShardState.READY)
            self.exchange_all()
            self.exchange_all()          # a heartbeat goes out before its answer is read
            before = list(self.rows)
            self.turn(False)
            quiet = quiet + 1 if before == self.rows else 0
            if quiet == 3:
                break
        count = self.wanted[0].spec.replicas if self.wanted else 0
        plan = reconcile(self.wanted, self.rows, self.nodes(), Traffic())
        assert plan.steps == ()
        if not plan.unplaced:
            assert [row.wish for row in self.rows] == [ReplicaWish.RUN] * count
            assert all(row.model.parallel == self.wanted[0].spec.parallel for row in self.rows)


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_three_turns_settle_a_fresh_fleet():
    fleet = Fleet()
    fleet.begin(9)
    for _ in range(3):
        fleet.turn(False)
        fleet.exchange_all()
        for name in fleet.names:
            fleet.shard_moves(name, ShardState.READY)
        fleet.exchange_all()
    assert sum(len(running) for running in fleet.running.values()) == 2
    assert all(one.liveness.life is NodeLife.READY for one in fleet.nodes())
    assert reconcile(fleet.wanted, fleet.rows, fleet.nodes(), Traffic()).steps == ()
