"""server.yaml is edited, and the server dies meanwhile: nobody who asks notices."""
from __future__ import annotations

import pytest

from tests.whole.asking import Load
from tests.whole.cluster import MODEL
from tests.whole.fire import entry

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("hang", "calm")]
EDITED = entry(args=("--threads", "1", "--prio", "0"))


def test_an_edit_is_rolled_without_a_failed_request_even_when_the_server_dies_meanwhile(fire):
    old, counted = fire.names(), fire.counted()
    streams = [fire.hold(name, stream=True, seconds=15) for name in old]
    fire.edit({MODEL: EDITED})
    fire.until("the first of the new ones", lambda: len(fire.names()) == 3)
    with Load(fire) as load:
        fire.kill9("server")
        load.more(2)
        fire.begin_server()
        fire.until("every replica is a new one", lambda: counted.rolled(old), 240)
        load.more(2)
    assert load.failed == [] and load.broken == []
    assert [asked.wait().outcome for asked in streams] == ["whole", "whole"], "streams finish on what is drained"
    assert counted.fewest >= 2, "the new one is ready before the old one drains"
    assert not fire.engines().keys() & old
    assert "its model was edited" in fire.ctl("events")


def test_an_edit_that_stops_more_than_half_waits_and_a_model_comes_and_goes_beside_the_load(fire):
    engines, models = fire.engines(MODEL), dict(fire.models)
    with Load(fire) as load:
        fire.edit(dict.fromkeys(models))                          # models: [] by mistake
        waits = fire.until("the edit is held", lambda: held(fire))
        assert waits.returncode == 3 and f"model {MODEL}: 2 of 2 replicas would stop" in waits.stderr
        load.more(3)
        assert fire.engines(MODEL) == engines

        fire.edit({**models, "second": entry("second", replicas=1)})
        fire.until("the new model is ready", lambda: [row["state"] for row in fire.rows("second")] == ["ready"], 120)
        fire.until("it is routed", lambda: fire.in_flight("second"))
        assert fire.ask("second").wait().is_right

        fire.edit({"second": None})
        waits = fire.until("the edit is held", lambda: held(fire))
        assert "model second: 1 of 1 replicas would stop, it is no longer there" in waits.stderr
        assert fire.ask("second").wait().is_right, "it serves until somebody says yes"
        fire.ctl("apply", "--confirm")
        fire.until("it is gone", lambda: fire.rows("second") == [] and fire.engines("second") == {}, 120)
        assert fire.ask("second").wait().outcome == "status 404"
        load.more(3)
    assert load.failed == [] and load.broken == []
    assert fire.engines(MODEL) == engines


def held(fire):
    """Return what ctl apply says when the server has seen an edit that waits, else None."""
    done = fire.ctl("apply", ok=False)
    return done if done.returncode == 3 else None


def test_fewer_and_more_replicas_leave_the_others_alone(fire):
    engines = fire.engines(MODEL)
    with Load(fire, plain=2, streams=1) as load:
        two = fire.models[MODEL]
        fire.edit({MODEL: two.replace("replicas: 2", "replicas: 1")})
        fire.until("one is left", lambda: len(fire.rows()) == len(fire.engines(MODEL)) == 1, 120)
        left, = fire.engines(MODEL).items()
        assert left in engines.items()
        fire.edit({MODEL: two})
        fire.until("two again", lambda: [row["state"] for row in fire.rows()] == ["ready", "ready"], 120)
        load.more(2)
    assert load.failed == [] and load.broken == []
    assert left in fire.engines(MODEL).items()
