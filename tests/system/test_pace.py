"""How fast bytes may leave."""
from __future__ import annotations

import time

from llmgw.system.pace import Pace


def test_without_a_limit_nothing_waits_and_everything_is_counted():
    pace = Pace()
    assert [pace.take(4 << 20) for _ in range(1000)] == [4 << 20] * 1000
    assert pace.sent_bytes == 1000 * (4 << 20)


def test_all_senders_together_are_held_to_the_limit():
    pace = Pace(1_000_000)
    started, sent = time.monotonic(), 0
    while sent < 600_000:
        sent += pace.take(4 << 20)
    assert time.monotonic() - started >= (sent - 250_000) / 1_000_000 - 0.05      # the last piece is still on its way


def test_a_piece_is_small_enough_that_nobody_waits_long_for_one():
    assert Pace(1_000_000).take(4 << 20) == 250_000
    assert Pace(1000).take(4 << 20) == 64 << 10
