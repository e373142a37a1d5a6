"""What a node says every few seconds."""
from __future__ import annotations

from llmgw.api import wire

SLOW_LINE_BYTES = 4096            # half a second of 64 kbit/s


def test_a_heartbeat_of_a_serving_node_is_small_enough_for_a_slow_line(served, node, plane):
    observed = plane.observed
    said = wire.dumps(wire.NODE_OBSERVED, observed)
    assert observed.engines and observed.weights and observed.shards
    assert len(said) <= SLOW_LINE_BYTES, said
