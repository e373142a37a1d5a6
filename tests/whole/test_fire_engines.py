"""Gates and engines are killed under load; a model that always ends harms nobody."""
from __future__ import annotations

import contextlib
import json
import os
import signal

import pytest

from tests.whole.asking import QUESTION, Load
from tests.whole.cluster import MODEL
from tests.whole.fire import entry

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("hang", "calm")]


def test_kill_9_of_a_gate_is_repaired_with_the_engine_untouched(fire):
    engines, gates = fire.engines(MODEL), fire.gates()
    replica = fire.on("node-2")["id"]
    stream = fire.hold(replica, stream=True)
    os.kill(gates["node-2"], signal.SIGKILL)
    assert stream.wait().outcome == "error event" and "upstream_disconnected" in stream.said, stream
    fire.until("the gate is back", lambda: fire.gates().get("node-2") not in (None, gates["node-2"]))
    fire.calm()

    gate, session = fire.gates()["node-2"], fire.home(replica)
    os.kill(gate, signal.SIGSTOP)         # so that the request has certainly no byte when the gate dies
    waiting = fire.ask(MODEL, session)
    fire.until("the request waits there", lambda: fire.in_flight()[replica] == 1)
    with Load(fire) as load:
        load.begun()
        with contextlib.suppress(ProcessLookupError):     # the agent has ended it for not answering
            os.kill(gate, signal.SIGKILL)
        assert waiting.wait().is_right, waiting
        load.more(6)
    assert load.failed == [], "only streams that had begun may break"
    assert fire.engines(MODEL) == engines and fire.gates()["node-1"] == gates["node-1"]


def test_kill_9_of_an_engine_costs_only_the_streams_that_had_begun(fire):
    engines, gates = fire.engines(MODEL), fire.gates()
    row = fire.on("node-1")
    stream = fire.hold(row["id"], stream=True)
    os.kill(engines[row["id"]], signal.SIGKILL)
    assert stream.wait().outcome == "error event" and "upstream_disconnected" in stream.said, stream
    fire.until("another engine runs", lambda: fire.engines().get(row["id"]) not in (None, engines[row["id"]]))
    fire.calm()

    second = fire.engines()[row["id"]]
    session = fire.home(row["id"])
    os.kill(second, signal.SIGSTOP)
    waiting = fire.ask(MODEL, session)
    fire.until("the request waits there", lambda: fire.in_flight()[row["id"]] == 1)
    with Load(fire) as load:
        load.begun()
        os.kill(second, signal.SIGKILL)
        assert waiting.wait().is_right, waiting
        load.more(6)
    assert load.failed == []
    fire.calm()
    now = fire.engines(MODEL)
    assert now.pop(row["id"]) not in (engines[row["id"]], second)
    assert now == {name: pid for name, pid in engines.items() if name != row["id"]} and fire.gates() == gates
    said = fire.ctl("replicas", "--explain", row["id"])
    assert "2 restarts" in said and "first failure" in said, said
    assert "was ended by signal 9" in said or "ended unasked" in said, "an adopted one leaves no exit code"
    assert "--api-key-file" in said and "its log ended:" in said and "launch_slot_" in said
    key = (fire.dir("node-1") / "shards" / f"{row['id']}.0" / "key").read_text().strip()
    assert key not in said and key not in fire.ctl("replicas", "--json")


def test_a_stream_whose_engine_dies_gets_no_done_and_no_end_of_its_framing(fire):
    lines = []
    with fire.client() as client, client.chat.completions.with_streaming_response.create(
            model=MODEL, messages=QUESTION, stream=True, max_tokens=600, extra_body={"ignore_eos": True}) as answer:
        with pytest.raises(Exception, match="(?i)incomplete|peer closed|without"):
            for line in answer.iter_lines():
                lines.append(line)
                if len(lines) == 8:
                    replica, = [name for name, count in fire.in_flight().items() if count]
                    os.kill(fire.engines()[replica], signal.SIGKILL)
    events = [line for line in lines if line.startswith("data: ")]
    assert json.loads(events[-1][6:])["error"]["code"] == "upstream_disconnected"
    assert "data: [DONE]" not in events and len(events) > 3
    assert sum('"error"' in event for event in events) == 1


def test_a_model_that_always_ends_is_shown_as_a_crash_loop_and_harms_nobody(fire):
    fire.edit({"broken": entry("broken", replicas=1, args=("--no-such-flag",))})
    try:
        with Load(fire) as load:
            fire.until("a crash loop", lambda: [row["state"] for row in fire.rows("broken")] == ["crashloop"], 180)
            load.more(4)
        assert load.failed == [] and load.broken == []
        said = fire.ctl("replicas", "--explain", "broken")
        assert "crashloop" in said and "--no-such-flag" in said and "first failure" in said, said
        assert "ended unasked with code 1" in said
        assert "broken" in fire.ctl("models")
        asked = fire.ask("broken").wait()
        assert asked.outcome == "status 503" and "--no-such-flag" in asked.said, asked
    finally:
        fire.edit({"broken": None})
        fire.ctl("apply", "--confirm")
    fire.until("nothing of it is left", lambda: fire.engines("broken") == {} and fire.rows("broken") == [], 120)
