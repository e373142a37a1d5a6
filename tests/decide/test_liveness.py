"""Who is alive, and when the server doubts itself instead."""
from __future__ import annotations

import pytest

from llmgw.decide.liveness import NodeLife, Seen, judge

LONG_AGO = -10_000.0


def lives(seen, now, **named):
    verdict = judge(seen, now, started_at=named.pop("started_at", LONG_AGO), **named)
    return {name: node.life.value for name, node in verdict.nodes.items()}


@pytest.mark.parametrize("silent, life, replace", [
    (0, "ready", False), (14.9, "ready", False), (15, "suspect", False), (29.9, "suspect", False),
    (30, "unreachable", False), (59.9, "unreachable", False), (60, "unreachable", True),
    (599, "unreachable", True), (600, "lost", True), (1e6, "lost", True)])
def test_silence_has_its_steps(silent, life, replace):
    verdict = judge({"a": Seen(1000.0), "b": Seen(1000.0 + silent)}, 1000.0 + silent, started_at=LONG_AGO)
    assert (verdict.nodes["a"].life.value, verdict.nodes["a"].replace) == (life, replace)
    assert verdict.nodes["b"].life is NodeLife.READY


def test_a_node_that_said_goodbye_is_stopped_at_once_and_replaced_only_later():
    seen = {"a": Seen(1000.0, stopping=True), "b": Seen(1060.0)}
    assert judge(seen, 1001.0, started_at=LONG_AGO).nodes["a"].life is NodeLife.STOPPED
    assert not judge(seen, 1001.0, started_at=LONG_AGO).nodes["a"].replace
    assert judge(seen, 1060.0, started_at=LONG_AGO).nodes["a"].replace


def test_a_server_that_has_just_started_demotes_nobody():
    seen = {"heard": Seen(100.0), "never": Seen(None)}
    verdict = judge(seen, 159.0, started_at=100.0)
    assert {node.life for node in verdict.nodes.values()} == {NodeLife.SUSPECT}
    assert not any(node.replace for node in verdict.nodes.values()) and verdict.suspicion
    after = judge({**seen, "b": Seen(165.0), "c": Seen(165.0)}, 165.0, started_at=100.0)
    assert after.nodes["never"].life is NodeLife.UNREACHABLE and after.nodes["never"].replace


def test_a_server_that_was_deaf_demotes_nobody_for_a_minute():
    seen = {"a": Seen(1000.0), "b": Seen(1100.0)}
    assert judge(seen, 1100.0, started_at=LONG_AGO, deaf_at=1050.0).nodes["a"].life is NodeLife.SUSPECT
    assert judge({**seen, "b": Seen(1111.0)}, 1111.0, started_at=LONG_AGO,
                 deaf_at=1050.0).nodes["a"].life is NodeLife.UNREACHABLE


def test_most_nodes_silent_within_one_window_are_the_network_s_fault():
    seen = {**{f"gone{number}": Seen(1000.0 + number) for number in range(4)},
            **{f"here{number}": Seen(1200.0) for number in range(3)}}
    verdict = judge(seen, 1200.0, started_at=LONG_AGO)
    assert "4 of 7 nodes fell silent at once" in verdict.suspicion
    assert all(verdict.nodes[f"gone{number}"].life is NodeLife.SUSPECT for number in range(4))
    assert not any(node.replace for node in verdict.nodes.values())
    back = judge({**seen, "gone0": Seen(1200.0)}, 1200.0, started_at=LONG_AGO)
    assert back.suspicion == "" and back.nodes["gone1"].replace


def test_few_nodes_or_slow_losses_are_no_partition():
    two = {"a": Seen(1000.0), "b": Seen(1001.0), "c": Seen(1200.0)}
    assert judge(two, 1200.0, started_at=LONG_AGO).nodes["a"].replace
    slowly = {f"n{number}": Seen(1000.0 + 100 * number) for number in range(5)}
    assert judge(slowly, 1500.0, started_at=LONG_AGO).suspicion == ""


def test_a_node_lost_long_ago_does_not_count_against_the_living():
    seen = {**{f"old{number}": Seen(0.0) for number in range(10)}, **{f"n{number}": Seen(5000.0) for number in range(3)},
            "down": Seen(4900.0)}
    assert judge(seen, 5000.0, started_at=LONG_AGO).nodes["down"].replace
