"""Which replica gets a request."""
from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from typing import Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.decide.routing import choose, requests


@dataclass(eq=False)
class Place:
    name: str
    slots: int = 4
    in_flight: int = 0
    queue: Optional[float] = None
    in_flight_then: int = 0
    kv_used: Optional[float] = None

    @property
    def seed(self):
        return int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:4], "big") >> 2


def names(places, keys, sticky=True):
    return Counter(choose(places, key, sticky).name for key in keys)


KEYS = [int.from_bytes(hashlib.md5(str(index).encode()).digest()[:4], "big") >> 2 for index in range(4000)]


def test_one_candidate_is_the_choice():
    only = Place("a", in_flight=99)
    assert choose([only], 1, True) is only


def test_idle_replicas_share_the_keys_evenly():
    counts = names([Place(name) for name in "abcd"], KEYS)
    assert min(counts.values()) > 800 and len(counts) == 4


def test_a_key_stays_at_home_while_home_has_room():
    places = [Place(name) for name in "abcd"]
    home = choose(places, 77, True)
    assert choose(list(reversed(places)), 77, True) is home


def test_a_replica_that_leaves_moves_only_its_own_keys():
    places = [Place(name) for name in "abcd"]
    before = {key: choose(places, key, True).name for key in KEYS}
    after = {key: choose(places[:3], key, True).name for key in KEYS}
    assert all(after[key] == name for key, name in before.items() if name != "d")


def test_the_second_of_two_requests_goes_to_the_idle_replica():
    places = [Place("a"), Place("b")]
    home = choose(places, 5, True)
    home.in_flight = 1
    assert choose(places, 5, True) is not home


def test_home_keeps_a_quarter_more_than_its_share():
    places = [Place("a", in_flight=8), Place("b", in_flight=8)]
    home = choose(places, 5, True)
    home.in_flight = 9
    assert choose(places, 5, True) is home
    home.in_flight = 13
    assert choose(places, 5, True) is not home


def test_a_request_does_not_wait_at_home_while_a_slot_is_free_elsewhere():
    places = [Place("a", in_flight=3), Place("b", in_flight=3)]
    home = choose(places, 5, True)
    home.in_flight = 4
    assert choose(places, 5, True) is not home


def test_a_full_kv_memory_sends_the_key_elsewhere():
    places = [Place("a", kv_used=0.1), Place("b", kv_used=0.1)]
    home = choose(places, 5, True)
    home.kv_used = 0.95
    assert choose(places, 5, True) is not home


def test_without_a_key_the_least_busy_is_taken_for_its_slots():
    places = [Place("a", slots=1, in_flight=1), Place("b", slots=8, in_flight=4), Place("c", slots=2, in_flight=2)]
    assert choose(places, 5, False).name == "b"


def test_equals_are_taken_in_turn():
    counts = names([Place(name, in_flight=2) for name in "abcd"], KEYS, sticky=False)
    assert min(counts.values()) > 800


def test_gauges_count_what_others_sent():
    places = [Place("a", queue=6.0, in_flight=0), Place("b", queue=1.0, in_flight=1, in_flight_then=1)]
    assert choose(places, 5, False).name == "b"


def test_what_we_sent_since_the_reading_is_added_to_it():
    assert requests([Place("a", queue=2.0, in_flight_then=1, in_flight=4), Place("b", queue=0.0)]) == [5.0, 0.0]


def test_a_reading_never_hides_our_own_requests():
    assert requests([Place("a", queue=0.0, in_flight_then=3, in_flight=3), Place("b", queue=0.0)]) == [3.0, 0.0]


def test_one_unknown_gauge_makes_all_be_compared_by_our_own_requests():
    places = [Place("a", queue=50.0, in_flight=0), Place("b", queue=None, in_flight=2)]
    assert requests(places) == [0.0, 2.0]
    assert choose(places, 5, False).name == "a"


def test_an_unknown_kv_share_is_not_an_empty_one():
    places = [Place("a", kv_used=None, in_flight=1), Place("b", kv_used=0.99, in_flight=0)]
    assert choose(places, 5, False).name == "b"


def test_the_fullest_memory_loses_among_equals():
    places = [Place("a", kv_used=0.98), Place("b", kv_used=0.2)]
    assert choose(places, 5, False).name == "b"


@pytest.mark.parametrize("sticky", [True, False])
@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 50), st.none() | st.floats(0, 1e6),
                          st.none() | st.floats(0, 1)), min_size=1, max_size=6), st.integers(0, 1 << 30))
def test_there_is_always_a_choice(sticky, rows, key):
    places = [Place(str(index), slots, in_flight, queue, 0, kv) for index, (slots, in_flight, queue, kv) in enumerate(rows)]
    assert choose(places, key, sticky) in places
