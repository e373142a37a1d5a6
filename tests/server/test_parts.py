"""The server's parts on their own: tokens, nodes, routers, routes feed, events, sources, archives."""
from __future__ import annotations

import os
import threading
from dataclasses import replace

import pytest

from llmgw.decide import routes_table
from llmgw.domain.engine import Asset, EngineObserved, EnginePhase, EngineWanted
from llmgw.domain.errors import Conflict, DownloadFailed, NotFound, ParseError, StorageError, TryAgain
from llmgw.domain.heartbeat import NodeDesired
from llmgw.domain.model import ModelSpec
from llmgw.domain.replica import ReplicaWish, Shard, ShardObserved, ShardState
from llmgw.domain.route import Gauges, RoutedKey, RouterReport
from llmgw.server import engine_assets, metrics, records, views
from llmgw.server.engine_assets import EngineAssets
from llmgw.server.events import KEPT, Events
from llmgw.server.loop import Snapshot
from llmgw.server.mirror import Mirror
from llmgw.server.nodes import Nodes, call_again_seconds
from llmgw.server.routers import Routers
from llmgw.server.routes_feed import RoutesFeed
from llmgw.server.sources import Sources
from llmgw.server.store import put
from llmgw.server.store_sqlite import SqliteStore
from llmgw.server.tokens import Tokens, sha256
from llmgw.server.transitions import Transitions
from tests.decide.fleet import node, row, seen, want, weights
from tests.server.running import until


class Clock:
    """A clock that a test turns."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    def wall(self):
        return self.now + 1e9


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def store(tmp_path):
    store = SqliteStore(str(tmp_path))
    yield store
    store.close()


def observed(name="a", **fields):
    return replace(node(name).observed, **fields)


# Tokens

def test_tokens_are_the_same_after_a_restart_and_kept_as_hashes(store, tmp_path, clock):
    tokens = Tokens(store, str(tmp_path), clock)
    text = (tmp_path / "tokens" / "admin").read_text().strip()
    assert tokens.caller(text).role == "admin"
    again = Tokens(store, str(tmp_path), clock)
    assert (tmp_path / "tokens" / "admin").read_text().strip() == text
    assert again.caller(text) == tokens.caller(text)
    assert len(store.range(records.TOKENS)) == 4
    assert text.split("_", 3)[3] not in str([entry.value for entry in store.range("")])
    assert (tmp_path / "tokens" / "admin").stat().st_mode & 0o077 == 0


def test_a_removed_token_file_makes_a_new_token_and_ends_the_old_one(store, tmp_path, clock):
    tokens = Tokens(store, str(tmp_path), clock)
    path = tmp_path / "tokens" / "node"
    old = path.read_text().strip()
    path.unlink()
    tokens = Tokens(store, str(tmp_path), clock)
    assert path.read_text().strip() != old
    assert tokens.caller(old) is None and tokens.caller(path.read_text().strip()).role == "node"


def test_a_token_file_without_its_row_is_taken_up_again(store, tmp_path, clock):
    Tokens(store, str(tmp_path), clock)
    text = (tmp_path / "tokens" / "router").read_text().strip()
    for entry in store.range(records.TOKENS):
        put(store, entry.key, {**entry.value, "sha256": "0" * 64})
    assert Tokens(store, str(tmp_path), clock).caller(text).role == "router"
    (tmp_path / "tokens" / "router").write_text((tmp_path / "tokens" / "admin").read_text())
    with pytest.raises(StorageError, match="not a token of role router"):
        Tokens(store, str(tmp_path), clock)


def test_a_revoked_key_opens_nothing_and_stays_in_the_list(store, tmp_path, clock):
    tokens = Tokens(store, str(tmp_path), clock)
    made = tokens.make_key("mine", ("m",))
    assert tokens.caller(made.secret).role == "infer"
    assert tokens.routed() == [RoutedKey(made.id, sha256(made.secret), ("m",))]
    other = tokens.make_key("mine", ())
    with pytest.raises(ParseError, match="2 keys are called mine"):
        tokens.revoke_key("mine")
    tokens.revoke_key(made.id)
    assert tokens.caller(made.secret) is None and tokens.caller(other.secret)
    assert [key.revoked_at is None for key in tokens.keys()].count(False) == 1
    with pytest.raises(NotFound):
        tokens.revoke_key(made.id)
    tokens.revoke_key("mine")
    for name in ("", "-x", "a\nb", "x" * 300):
        with pytest.raises(ParseError):
            tokens.make_key(name, ())


# Nodes

def test_news_is_what_changes_not_what_flickers(store, clock):
    nodes = Nodes(store, clock, threading.Event())
    nodes.hear(observed())
    first = nodes.changes
    busy = observed(clock=5.0)
    nodes.hear(replace(busy, facts=replace(busy.facts, memory_available_bytes=1, disk_free_bytes=2)))
    assert nodes.changes == first
    nodes.poke.clear()
    nodes.hear(observed(engines=()))
    assert nodes.changes == first + 1 and nodes.poke.is_set()


def test_a_node_is_told_until_it_says_that_it_knows(store, clock):
    nodes = Nodes(store, clock, threading.Event())
    nodes.hear(observed())
    assert nodes.answer(observed(), "c", 7).desired is None
    wanted = NodeDesired((EngineWanted("llama.cpp", "b1"),))
    nodes.publish({"a": wanted})
    nodes.publish({"a": wanted})
    for said in (observed(), observed(epoch=6, generation=1), observed(epoch=7, generation=0)):
        answer = nodes.answer(said, "c", 7)
        assert (answer.generation, answer.desired) == (1, wanted)
    knows = observed(epoch=7, generation=1)
    assert nodes.answer(knows, "c", 7).desired is None
    nodes.hear(knows)
    assert nodes.acknowledged("a", 7) and not nodes.acknowledged("a", 8)
    nodes.publish({"a": NodeDesired()})
    assert not nodes.acknowledged("a", 7)


def test_a_node_that_reboots_is_let_in_again_and_its_twin_is_not(store, clock):
    nodes = Nodes(store, clock, threading.Event())
    nodes.hear(observed())
    other = observed(identity=replace(observed().identity, boot_id="other"))
    moved = observed(identity=replace(observed().identity, gate_port=7999))
    for twin in (other, moved):
        with pytest.raises(Conflict, match="another agent calls itself a"):
            nodes.hear(twin)
    clock.now += 16
    nodes.hear(other)
    nodes.hear(replace(other, stopping=True))
    nodes.hear(observed())


def test_two_agents_of_one_machine_are_told_apart_even_before_they_have_a_gate(store, clock):
    nodes = Nodes(store, clock, threading.Event())
    first = observed(identity=replace(observed().identity, instance="one"))
    nodes.hear(first)
    with pytest.raises(Conflict, match="another agent calls itself a"):
        nodes.hear(observed(identity=replace(first.identity, instance="two", gate_port=0)))
    nodes.hear(observed(identity=replace(first.identity, gate_port=7999)))      # its gate moved to another port


def test_a_known_node_is_remembered_and_can_be_forgotten_when_it_is_gone(store, clock):
    nodes = Nodes(store, clock, threading.Event())
    nodes.hear(observed())
    again = Nodes(store, clock, threading.Event())
    assert again.seen()["a"].at is None
    nodes.drain("a", True)
    assert again.draining() == {"a": True}
    with pytest.raises(Conflict, match="is alive"):
        nodes.forget("a")
    clock.now += 20
    nodes.forget("a")
    assert nodes.seen() == {}
    with pytest.raises(NotFound):
        nodes.forget("a")


def test_heartbeats_come_sooner_while_something_moves_and_never_faster_than_the_server_can():
    resting = observed()
    moving = observed(engines=(EngineObserved("llama.cpp", "b1", EnginePhase.DOWNLOADING),))
    assert call_again_seconds(moving, 3, False) < call_again_seconds(resting, 3, False) < 5
    assert call_again_seconds(moving, 100, False) == 5.0
    assert call_again_seconds(moving, 4000, False) == 20.0


def test_a_log_that_does_not_come_is_a_try_again(store, clock):
    nodes = Nodes(store, clock, threading.Event())
    with pytest.raises(TryAgain, match="did not send the log"):
        nodes.ask_log_tail("a", "m-1.0", 100, 0.05)
    assert nodes.answer(observed(), "c", 1).requests == ()


# Routers

def test_a_draining_replica_is_idle_when_every_router_knows_and_has_no_request(clock):
    routers = Routers(clock)
    drained = {"m-1": row("m-1", wish=ReplicaWish.DRAIN), "m-2": row("m-2")}
    routers.note_drains(drained, 5)
    assert routers.idle() == frozenset({"m-1"})                 # no router at all: nobody sends anything
    routers.hear(RouterReport("r", 4))
    assert routers.idle() == frozenset()                        # it does not know yet
    routers.hear(RouterReport("r", 5, {"m-1": Gauges(in_flight=1)}))
    assert routers.idle() == frozenset()
    routers.hear(RouterReport("r", 5, {"m-1": Gauges(running=2.0)}))
    assert routers.idle() == frozenset()
    routers.hear(RouterReport("r", 6, {"m-1": Gauges(0.0, 0.0, None, None, 0)}))
    assert routers.idle() == frozenset({"m-1"})
    clock.now += 3
    routers.note_drains(drained, 9)
    assert routers.draining_seconds() == {"m-1": 3.0}
    routers.hear(RouterReport("old", 1))
    clock.now += 20
    assert routers.fresh() == {} and routers.answering() == frozenset()


def test_gauges_of_several_routers_are_one_engine_s(clock):
    routers = Routers(clock)
    routers.hear(RouterReport("a", 1, {"m-1": Gauges(3.0, 1.0, 0.5, 10.0, 2)}, ("m-1",)))
    routers.hear(RouterReport("b", 1, {"m-1": Gauges(3.0, 1.0, 0.5, 11.0, 1)}))
    assert routers.gauges("m-1") == Gauges(3.0, 1.0, 0.5, 11.0, 3)
    assert routers.gauges("other") is None
    assert routers.answering() == frozenset({"m-1"})


# The routing table

def table(want_, rows, nodes, **named):
    return routes_table.routed_models([want_], rows, {one.name: one for one in nodes}, named.get("answering", frozenset()),
                                      named.get("unplaced", {}), named.get("previous"))[0]


@pytest.mark.parametrize("where, routed", [
    (node("a", shards=[seen("m-1")]), True),
    (node("a", shards=[seen("m-1")], gate_port=0), False),
    (node("a", shards=[seen("m-1", ShardState.UNREADY)]), False),
    (node("a"), False)])
def test_only_ready_replicas_behind_an_open_gate_are_routed(where, routed):
    made = table(want(), [row("m-1")], [where])
    assert bool(made.replicas) is routed and bool(made.why_not) is not routed


def test_why_a_model_is_not_served_is_in_its_node_s_words():
    failing = node("a", shards=[seen("m-1", ShardState.BACKOFF, "exit status 1: out of memory")])
    made = table(want(replicas=2), [row("m-1")], [failing], unplaced={"m": ("b: it is being drained",)})
    assert made.why_not == "a: exit status 1: out of memory; b: it is being drained"
    assert table(want(replicas=0), [], []).why_not == "it wants no replicas (replicas: 0)"
    assert "not there yet" in table(replace(want(), weights=None), [], []).why_not
    long = table(want(), [], [], unplaced={"m": tuple(f"node-{number}: it has no GPU" for number in range(100))})
    assert len(long.why_not) <= 600


def test_a_draining_replica_stays_in_the_table_as_draining_and_a_stopping_one_goes():
    nodes = [node("a", shards=[seen("m-1")])]
    assert table(want(), [row("m-1", wish=ReplicaWish.DRAIN)], nodes).replicas[0].draining
    assert table(want(), [row("m-1", wish=ReplicaWish.STOP)], nodes).replicas == ()


def test_a_restart_of_the_server_is_no_news_about_nodes(store):
    feed = RoutesFeed(store, "c")
    assert feed.after(-1, 0) is None                    # nothing before the first turn
    models = (table(want(), [row("m-1")], [node("a", shards=[seen("m-1")])]),)
    feed.publish("c", 1, models, [RoutedKey("k", "0" * 64)])
    again = RoutesFeed(store, "c")
    unheard = table(want(), [row("m-1")], [node("a", heard=False)], previous=again.table)
    assert unheard.replicas == models[0].replicas
    again.publish("c", 2, models, [RoutedKey("k", "0" * 64)])
    assert again.table.revision > feed.table.revision


def test_the_table_s_revision_grows_only_with_a_change(store):
    feed = RoutesFeed(store, "c")
    models = (table(want(), [], []),)
    feed.publish("c", 1, models, [])
    revision = feed.table.revision
    feed.publish("c", 1, models, [])
    assert feed.table.revision == revision and feed.after(revision, 0.01) is None
    woken = []
    thread = threading.Thread(target=lambda: woken.append(feed.after(revision, 30)))
    thread.start()
    feed.publish("c", 1, models, [RoutedKey("k", "0" * 64)])
    thread.join(30)
    assert woken[0].revision == revision + 1
    kept = store.get(records.LAST_ROUTES).revision
    feed.publish("c", 1, (replace(models[0], why_not="40 %"),), [RoutedKey("k", "0" * 64)])
    assert store.get(records.LAST_ROUTES).revision == kept      # a sentence alone is not written
    feed.close()
    assert feed.after(feed.table.revision, 30) is None


# Events

def test_events_are_bounded_and_survive_a_restart(store, clock):
    events = Events(store, clock)
    for number in range(KEPT + 50):
        events.add("server", "Test", str(number))
    events.flush()
    assert len(store.range(records.EVENTS)) == KEPT
    again = Events(store, clock)
    assert [event.message for event in again.after(0, 0)][-1] == str(KEPT + 49)
    again.add("server", "Test", "next")
    assert again.after(KEPT + 50, 0)[0].id == KEPT + 51


def test_a_change_is_told_once(store, clock):
    events = Events(store, clock)
    told = Transitions(events)

    def snapshot(state, message=""):
        states = {"a": node("a", shards=[seen("m-1", state, message)])}
        return Snapshot(wanted=(want(),), replicas=(row("m-1"),), nodes=states)

    for _ in range(3):
        told.note(snapshot(ShardState.BACKOFF, "out of memory, next try in 7.3 s"))
        told.note(snapshot(ShardState.BACKOFF, "out of memory, next try in 4.1 s"))
    told.note(snapshot(ShardState.READY))
    told.note(snapshot(ShardState.READY))
    assert [(event.subject, event.reason) for event in events.after(0, 0)] == [
        ("node/a", "Ready"), ("node/a", "EngineInstalled"), ("replica/m-1", "Backoff"), ("replica/m-1", "Ready")]


def test_the_steps_of_an_engine_that_takes_minutes_are_told_and_those_of_its_next_tries_are_not(store, clock):
    events = Events(store, clock)
    told = Transitions(events)

    def say(phase, message, source="packages"):
        seen_there = EngineObserved("vllm", "0.30.0", EnginePhase(phase), message, source=source)
        told.note(Snapshot(nodes={"a": node("a", engines=(seen_there,))}))

    def tries():
        say("resolving", "finding packages")
        say("downloading", "3 of 10 MB")
        say("downloading", "7 of 10 MB")
        say("installing packages", "gcc")

    tries()
    say("failed", "no index; tried again in 5 seconds")
    tries()
    say("failed", "no index; tried again in 15 seconds")
    say("installed", "vllm 0.30.0")
    say("downloading", "1 of 10 MB", source="archive")
    assert [event.reason for event in events.after(0, 0) if event.reason != "Ready"] == [
        "EngineResolving", "EngineDownloading", "EngineInstallingPackages", "EngineFailed", "EngineInstalled"]


# Sources and archives

def test_a_file_of_the_control_plane_is_imported_once_and_again_when_it_changes(store, tmp_path, clock):
    mirror = Mirror(str(tmp_path / "mirror"), store, clock)
    sources, path = Sources(store, mirror, None, threading.Event()), tmp_path / "model.bin"
    spec = ModelSpec("m", "llama.cpp", f"file:{path}")
    assert "No such file" in sources.weights(spec)[1]
    path.write_bytes(b"one")
    first = until(lambda: sources.weights(spec)[0])
    assert first.name == "m" and mirror.has(first.files[0].sha256)
    assert Sources(store, mirror, None, threading.Event()).weights(spec)[0] == first
    path.write_bytes(b"another")
    assert until(lambda: sources.weights(spec)[0]).fingerprint != first.fingerprint
    assert sources.weights(ModelSpec("m", "llama.cpp", "hf:a/b"))[1].endswith("not available in this build")
    assert "not of a kind" in sources.weights(ModelSpec("m", "llama.cpp", "ftp:x"))[1]


def test_a_file_whose_import_ends_while_it_is_looked_for_is_not_read_again(store, tmp_path, clock):
    mirror, reads, go = Mirror(str(tmp_path / "mirror"), store, clock), [], threading.Event()
    path, spec, copy = tmp_path / "a.bin", ModelSpec("m", "llama.cpp", f"file:{tmp_path / 'a.bin'}"), mirror.import_file
    path.write_bytes(b"one")

    def import_file(*args):
        reads.append(threading.current_thread())
        assert go.wait(30)
        return copy(*args)

    class LooksJustBeforeItComes:
        def __getattr__(self, name):
            return getattr(store, name)

        def get(self, key):
            found = store.get(key)
            if reads:
                go.set()
                reads[0].join(30)
            return found

    mirror.import_file = import_file
    sources = Sources(LooksJustBeforeItComes(), mirror, None, threading.Event())
    assert sources.weights(spec)[0] is None
    until(lambda: reads)
    assert sources.weights(spec) == (None, f"reading {path} into the mirror")
    assert sources.weights(spec)[0].name == "m" and len(reads) == 1


class Releases:
    """A stand-in for the release list: what is asked of the real one, with answers of the test's."""

    def __init__(self, mirror, data):
        self.mirror, self.data, self.fail = mirror, data, None
        self.go, self.asked, self.thread = threading.Event(), 0, None

    def assets(self, engine, version):
        return (Asset("a.tar.gz", len(self.data), sha256(self.data)),), ""

    def activity(self):
        return ("fetching a.tar.gz: 40 %",)

    def progress(self, sha256):
        return "fetching a.tar.gz: 40 %"

    def cannot(self, engine, version):
        return False

    def fetch(self, engine, version, name):
        self.asked, self.thread = self.asked + 1, threading.current_thread()
        self.go.wait(30)
        if self.fail is not None:
            raise self.fail
        path = self.mirror.path(sha256(self.data))
        with open(path + ".scratch", "w") as out:
            out.write(self.data)
        os.rename(path + ".scratch", path)
        return path


def test_an_archive_is_fetched_once_for_many_that_ask_stand_in(store, tmp_path, clock, monkeypatch):
    mirror = Mirror(str(tmp_path / "mirror"), store, clock)
    releases = Releases(mirror, "archive")
    engines, read = EngineAssets(mirror, releases, None), []
    assert engines.wanted(EngineWanted("llama.cpp", "b1")).assets[0].name == "a.tar.gz"
    monkeypatch.setattr(engine_assets, "WAIT_SECONDS", 0.05)
    with pytest.raises(TryAgain, match="fetching a.tar.gz: 40 %"):
        engines.open("llama.cpp", "b1", "a.tar.gz")
    assert engines.activity() == ["fetching a.tar.gz: 40 %"]
    monkeypatch.setattr(engine_assets, "WAIT_SECONDS", 30)

    def ask():
        file, digest = engines.open("llama.cpp", "b1", "a.tar.gz")
        with file:
            read.append((file.read(), digest))

    threads = [threading.Thread(target=ask) for _ in range(5)]
    for thread in threads:
        thread.start()
    releases.go.set()
    for thread in threads:
        thread.join(30)
    assert read == [(b"archive", sha256("archive"))] * 5 and releases.asked == 1
    with pytest.raises(NotFound):
        engines.open("llama.cpp", "b1", "other.tar.gz")


def test_an_archive_that_comes_while_it_is_looked_for_is_not_fetched_again_stand_in(store, tmp_path, clock,
                                                                                    monkeypatch):
    mirror = Mirror(str(tmp_path / "mirror"), store, clock)
    releases = Releases(mirror, "archive")
    engines, has = EngineAssets(mirror, releases, None), mirror.has
    monkeypatch.setattr(engine_assets, "WAIT_SECONDS", 0.05)
    with pytest.raises(TryAgain):
        engines.open("llama.cpp", "b1", "a.tar.gz")
    until(lambda: releases.thread)
    fetching = releases.thread

    def looks_just_before_it_comes(digest):
        found = has(digest)
        releases.go.set()
        fetching.join(30)
        return found

    mirror.has = looks_just_before_it_comes
    engines.open("llama.cpp", "b1", "a.tar.gz")[0].close()
    assert releases.asked == 1 and not fetching.is_alive()


def test_an_archive_that_is_gone_from_the_mirror_is_fetched_again_stand_in(store, tmp_path, clock):
    mirror = Mirror(str(tmp_path / "mirror"), store, clock)
    releases = Releases(mirror, "archive")
    releases.go.set()
    engines = EngineAssets(mirror, releases, None)
    for asked in (1, 1, 2):
        if asked == 2:
            os.unlink(mirror.path(sha256("archive")))
        engines.open("llama.cpp", "b1", "a.tar.gz")[0].close()
        assert releases.asked == asked


def test_a_fetch_that_fails_is_told_and_after_a_while_tried_again_stand_in(store, tmp_path, clock, monkeypatch):
    mirror = Mirror(str(tmp_path / "mirror"), store, clock)
    releases = Releases(mirror, "archive")
    releases.go.set()
    releases.fail = DownloadFailed("it broke off")
    engines = EngineAssets(mirror, releases, None)
    with pytest.raises(DownloadFailed):
        engines.open("llama.cpp", "b1", "a.tar.gz")
    releases.fail = None
    with pytest.raises(DownloadFailed):              # whoever asks meanwhile learns of it, and can help himself
        engines.open("llama.cpp", "b1", "a.tar.gz")
    assert releases.asked == 1
    monkeypatch.setattr(engine_assets, "KEPT_SECONDS", -1.0)
    engines.open("llama.cpp", "b1", "a.tar.gz")[0].close()
    assert EngineAssets(mirror, None, None).wanted(EngineWanted("llama.cpp", "b1")).assets_problem


# Views and numbers

def test_chunks_of_weights_are_kept_once_for_all_replicas(store):
    rows = records.Replicas(store)
    whole = replace(weights(), files=(replace(weights().files[0], chunks=("1" * 64, "2" * 64)),))
    first, second = row("m-1", of=whole), row("m-2", of=whole)
    for one in (first, second):
        store.txn((), rows.writing(one))
    assert [one for _, one in rows.all()] == [first, second]
    assert "1" * 64 not in str(store.get(records.REPLICAS + "m-1").value)
    store.txn((), rows.removing(first, [first, second]))
    assert [one.weights for _, one in rows.all()] == [whole]
    store.txn((), rows.removing(second, [second]))
    assert store.range(records.WEIGHTS) == [] and rows.all() == []


@pytest.mark.parametrize("state, wish, shown", [
    (ShardState.READY, ReplicaWish.RUN, "ready"), (ShardState.READY, ReplicaWish.DRAIN, "draining"),
    (ShardState.CRASHLOOP, ReplicaWish.RUN, "crashloop"), (None, ReplicaWish.RUN, "placed"),
    (None, ReplicaWish.STOP, "stopped")])
def test_a_replica_s_state_is_its_worst_shard_s(state, wish, shown):
    shards = [seen("m-1", state)] if state is not None else []
    assert views.replica_view(row("m-1", wish=wish), {"a": node("a", shards=shards)}, None).state == shown
    assert views.replica_view(row("m-1", wish=wish), {}, None).state == "unknown"


def of_gang(wish, first, second):
    """Return (state, reason, message) of a replica on the nodes a and b, which say this of their ranks (None: nothing)."""
    gang = replace(row("m-1", wish=wish), shards=(Shard(0, "a"), Shard(1, "b")))
    nodes = {name: node(name, shards=() if said is None else (ShardObserved(f"m-1.{rank}", *said),))
             for rank, (name, said) in enumerate((("a", first), ("b", second)))}
    found = views.replica_view(gang, nodes, None)
    return found.state, found.reason, found.message


@pytest.mark.parametrize("wish, first, second", [
    (ReplicaWish.STOP, (ShardState.STOPPED,), (ShardState.STOPPING, "CannotStop", "these processes do not end: 7, 9")),
    (ReplicaWish.STOP, None, (ShardState.STOPPING, "CannotStop", "these processes do not end: 7, 9")),
    (ReplicaWish.RUN, (ShardState.FETCHING, "WaitingForGang", "waits"), (ShardState.READY, "CannotStop", "these processes do not end: 7, 9")),
    (ReplicaWish.DRAIN, (ShardState.BACKOFF, "Ended", "it ended"), (ShardState.READY, "CannotStop", "these processes do not end: 7, 9"))])
def test_a_gang_that_cannot_be_stopped_on_one_node_says_where(wish, first, second):
    assert of_gang(wish, first, second) == ("stopping", "CannotStop", "rank 1 on b: these processes do not end: 7, 9")


def test_a_gang_says_which_rank_its_words_are_of_and_one_on_one_node_says_them_alone():
    ended = (ShardState.BACKOFF, "Ended", "the engine ended")
    assert of_gang(ReplicaWish.RUN, (ShardState.READY,), ended) == ("backoff", "Ended", "rank 1 on b: the engine ended")
    assert of_gang(ReplicaWish.STOP, (ShardState.STOPPED,), (ShardState.STOPPING, "Stopping", "is being stopped")) == (
        "stopping", "Stopping", "rank 1 on b: is being stopped")
    alone = {"a": node("a", shards=[seen("m-1", ShardState.BACKOFF, "the engine ended")])}
    assert views.replica_view(row("m-1"), alone, None).message == "the engine ended"


def test_a_node_s_view_tells_of_its_clock_and_its_drain():
    view = views.node_view(node("a", draining=True), -61.0, ("m-1",))
    assert (view.state, view.message, view.replicas) == ("ready", "draining", ("m-1",))
    assert view.warnings == ("its clock is 61 s behind",)
    unheard = views.node_view(node("a", heard=False), 0.0, ())
    assert not unheard.probed and unheard.engines == ()


def test_the_metrics_page_is_read_by_our_own_strict_reader():
    from llmgw.parse import prometheus
    snapshot = Snapshot(wanted=(want('a"b\\c'),), nodes={"a": node("a")})
    page = metrics.page(snapshot, epoch=3, heartbeats=7, connections=1, revision=9, routers=1,
                        answers={("/v1/nodes", 200): 4})
    samples = prometheus.read(page, ("llmgw_epoch", "llmgw_nodes", "llmgw_http_answers_total"))
    assert prometheus.total(samples, "llmgw_epoch") == 3
    assert prometheus.total(samples, "llmgw_http_answers_total") == 4
