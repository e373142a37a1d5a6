"""Which chunk comes from where, on a clock of the test's."""
from __future__ import annotations

import pytest

from llmgw.decide.peers import MOST_PEERS
from llmgw.system.shares import PATIENCE_SECONDS, Patience, Shares

CHUNK = 100


def shares_of(count, *peers, share=(0, 1), patience=None):
    made = Shares(count, patience)
    made.missing.update(range(count))
    for name in peers:
        made.add(name)
    made.begin(*share)
    return made


def measured(shares, seconds=1.0):
    """Let the source bring its first chunk; return which."""
    (first,) = shares.for_source(0.0, 4, 8)
    shares.came()
    shares.source_is_done(CHUNK, seconds)
    return first


def test_without_peers_the_source_gives_runs_in_order():
    shares = shares_of(10)
    assert [shares.for_source(0.0, 2, 8) for _ in range(3)] == [[0, 1, 2, 3, 4], [5, 6, 7], []]   # two streams are busy
    shares.give_back([1, 2])
    shares.source_is_done(CHUNK, 1.0)
    assert shares.for_source(0.0, 2, 8) == [1, 2] and not shares.is_done


def test_nodes_that_begin_at_once_begin_in_different_places_and_ask_for_little_at_a_time():
    firsts = []
    for place, others in enumerate(("bc", "ac", "ab")):
        shares = shares_of(12, *others, share=(place, 3))
        for name in others:
            shares.know(name, "0" * 12)
        firsts.append(shares.for_source(0.0, 4, 8))
    assert firsts == [[0], [4], [8]]


def test_what_a_peer_has_is_not_asked_of_the_source():
    shares = shares_of(6, "b", share=(0, 2))
    shares.know("b", "110100")
    assert [measured(shares) for _ in range(3)] == [2, 5, 4]          # its own part first, then from the other end
    assert shares.for_source(1.0, 4, 8) == []
    assert [shares.for_peer("b") for _ in range(4)] == [[0], [1], [3], []]


def test_what_is_on_its_way_to_a_peer_is_not_asked_of_the_source_either():
    shares = shares_of(4, "b")
    shares.know("b", "0122")
    assert measured(shares) == 0
    assert shares.for_source(1.0, 4, 8) == [] and shares.for_peer("b") == [1] and shares.for_peer("b") == []
    shares.know("b", "0110")                                          # it did not come
    assert shares.for_source(1.0, 4, 8) == [3]


def test_one_chunk_of_the_source_tells_how_fast_it_is_then_peers_that_have_all_bring_the_rest():
    shares = shares_of(40, "b")
    shares.know("b", "1" * 40)
    assert measured(shares) == 0 and shares.for_source(1.0, 4, 8) == []
    assert shares.for_peer("b") == [1, 2, 3, 4]


def test_a_peer_that_has_not_answered_yet_is_waited_for_once_the_first_chunk_is_on_its_way():
    shares = shares_of(6, "b")
    assert len(shares.for_source(0.0, 4, 8)) == 1 and shares.for_source(0.0, 4, 8) == []
    shares.know("b", "")                                              # nothing: the source does it alone
    assert shares.for_source(0.0, 4, 8)


def test_a_chunk_that_the_source_sent_wrong_is_left_to_the_peers_that_have_it():
    shares = shares_of(3, "b", patience=Patience(0.0))
    shares.know("b", "010")
    shares.spoiled.update([1, 2])
    assert shares.is_held(1) and not shares.is_held(2)
    assert [measured(shares) for _ in range(2)] == [0, 2] and shares.for_source(1.0, 4, 8) == []
    shares.drop("b")
    assert measured(shares) == 1                                      # there is nobody else


def test_without_the_source_there_is_hope_in_what_peers_have_get_or_have_not_told_yet():
    shares = shares_of(2, "b")
    assert shares.has_peers and shares.is_hoped_for                   # not told yet
    for said, hope in (("00", False), ("02", True), ("01", True), ("", False)):
        shares.know("b", said)
        assert shares.is_hoped_for is hope
    assert not shares.has_peers                                       # it does not fetch the file
    shares.know("b", "01")
    assert shares.for_peer("b") == [1]
    shares.know("b", "00")
    assert shares.is_hoped_for                                        # on its way
    shares.came()
    assert not shares.is_hoped_for


def test_the_rarest_chunks_are_asked_of_a_peer_first():
    shares = shares_of(4, "b", "c")
    shares.know("b", "1110")
    shares.know("c", "1100")
    assert shares.for_peer("b") == [2]


@pytest.mark.parametrize("rate, over", [(0, True), (50, True), (100, False), (300, False)])
def test_peers_are_waited_for_as_long_as_they_are_worth_it(rate, over):
    """The source brings a chunk of 100 a second: peers with half of that leave us behind, by seconds."""
    patience = Patience()
    shares = shares_of(6, "b", patience=patience)
    shares.know("b", "1" * 6)
    measured(shares)
    ends = PATIENCE_SECONDS * 2 + 2
    now = 0.0
    while now < ends:
        found = shares.for_source(now, 4, 8)
        if found:
            break
        now += 0.5
        shares.peer_brought(rate // 2)
    assert bool(found) is over is patience.is_over
    if over:
        assert abs(now - PATIENCE_SECONDS / (1 - rate / 100)) <= 1.0
        assert len(found) > 1 or len(shares.missing) < 4             # and with all its streams


def test_a_peer_that_is_dropped_has_nothing_any_more():
    shares = shares_of(4, "b")
    shares.know("b", "1111")
    measured(shares)
    shares.drop("b")
    shares.know("b", "1111")                                        # its last answer came late
    assert shares.for_peer("b") == [] and shares.for_source(1.0, 1, 8) == [1, 2, 3]


def swarm(count, names, seconds_of_source=1.0, seconds_of_peer=0.5, look=0.5):
    """Let nodes fetch at once, each asking those after it; return how many chunks the source sent and when all were done."""
    asked = {name: [names[(at + after) % len(names)] for after in range(1, min(MOST_PEERS, len(names) - 1) + 1)]
             for at, name in enumerate(names)}
    nodes = {name: shares_of(count, *asked[name], share=(at, len(names))) for at, name in enumerate(names)}
    have = {name: set() for name in names}
    running, now, sent = [], 0.0, 0
    while any(not shares.is_done for shares in nodes.values()):
        for name, shares in nodes.items():
            if round(now * 10) % round(look * 10) == 0:
                for other in asked[name]:
                    coming = {index for job in running if job[1:3] == (other, None) for index in job[3]}
                    shares.know(other, "".join("1" if index in have[other] else "2" if index in coming else "0"
                                               for index in range(count)))
            for peer in [None, *asked[name]]:
                busy = sum(1 for job in running if job[1:3] == (name, peer))
                while busy < (4 if peer is None else 2):
                    run = shares.for_source(now, 4, 8) if peer is None else shares.for_peer(peer)
                    if not run:
                        break
                    sent += len(run) if peer is None else 0
                    busy += 1
                    running.append((now + len(run) * (seconds_of_source if peer is None else seconds_of_peer),
                                    name, peer, run))
        now += 0.1
        for job in [job for job in running if job[0] <= now]:
            running.remove(job)
            _, name, peer, run = job
            for index in run:
                nodes[name].came()
                have[name].add(index)
            if peer is None:
                nodes[name].source_is_done(CHUNK * len(run), seconds_of_source * len(run))
            else:
                nodes[name].peer_brought(CHUNK * len(run))
    assert all(found == set(range(count)) for found in have.values())
    return sent, now


@pytest.mark.parametrize("names", ["ab", "abc", "abcdefg"])
@pytest.mark.parametrize("count", [16, 100])
def test_nodes_that_begin_at_once_need_the_source_about_once(names, count):
    sent, _ = swarm(count, names)
    assert sent <= count * 1.25 + 2


@pytest.mark.parametrize("count", [100, 300])
def test_in_a_large_fleet_where_each_asks_a_few_every_node_costs_the_source_a_few_chunks(count):
    names = "abcdefghijklmnopqrstuvwx"
    assert len(names) > 3 * MOST_PEERS
    sent, _ = swarm(count, names)
    assert sent <= count + 4 * len(names)
