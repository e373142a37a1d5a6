"""The end of what began in other modules: an engine that does not answer is left, ended and started again."""
from __future__ import annotations

import pytest

from tests.whole.asking import Load
from tests.whole.fire import SLEEPER

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("calm")]


def test_a_hung_engine_leaves_routing_after_a_minute_and_what_waited_is_answered_by_another(fire, hang):
    unready = fire.until("it is called hung", lambda: hang.told(fire, "Unready"), 180)
    assert unready["at"] - hang.stopped_wall > 60
    assert "the engine answers nothing; it is restarted unless that changes within a minute" in unready["message"]
    with Load(fire, plain=1, streams=1, model=SLEEPER) as load:
        load.more(2)
    assert load.failed == [] and load.broken == []
    assert [asked.wait().outcome for asked in hang.plain] == ["whole", "whole"]
    assert max(asked.ended_at for asked in hang.plain) - hang.stopped_at > 60


def test_a_hung_engine_is_ended_after_its_second_minute_and_started_again(fire, hang):
    ended = fire.until("it is ended", lambda: hang.told(fire, "Backoff"), 240)
    assert ended["at"] - hang.stopped_wall > 120
    assert sorted(stream.wait().outcome for stream in hang.streams) == ["error event", "whole"]
    fire.calm(SLEEPER)
    assert fire.engines(SLEEPER)[hang.replica] != hang.pid
    said = fire.ctl("replicas", "--explain", hang.replica)
    assert "1 restarts" in said and "requests were running and nothing was computed for two minutes" in said
