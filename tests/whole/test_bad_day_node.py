"""An agent that comes to the wrong place: a gate port that is taken, a name that is taken, a token that is not one."""
from __future__ import annotations

import os

import pytest

from tests.whole.bad_day import NOWHERE, logged, taken_port
from tests.whole.cluster import Cluster, free_block, until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(pyz, qa_template, tmp_path_factory):
    made = Cluster(pyz, tmp_path_factory.mktemp("nodes"), qa_template)
    made.env["LLMGW_GITHUB_API"] = NOWHERE
    made.config.write_text("listen: 127.0.0.1:0\nengines: {}\n")
    try:
        made.start_server()
        yield made
    finally:
        made.close()


def start(place, folder, node, gate_port=0, token=None):
    ports = free_block(64)
    place.start(folder, "agent", "--server", place.server["url"], "--token-file", token or place.token("node"), "--node",
                node, "--data-dir", place.dir(folder), "--gate-port", gate_port or ports, "--engine-ports", ports + 32,
                "--owned")


def nodes(place):
    return {node["name"]: node for node in place.items("nodes")}


def test_a_gate_whose_port_is_taken_listens_on_the_next_and_says_so(place):
    with taken_port() as port:
        start(place, "gate", "gate", gate_port=port)
        at = until("the gate listens", lambda: nodes(place).get("gate", {}).get("identity", {}).get("gate_port"))
        assert port < at <= port + 19
        assert f"port {port} of the gate is taken by another program; it listens on {at}" in place.ctl("nodes")
    assert place.stop("gate") == 0


def test_an_agent_with_a_name_that_is_taken_is_refused_and_the_first_one_goes_on(place):
    start(place, "first", "same")
    first = until("it is there", lambda: nodes(place).get("same", {}).get("identity", {}).get("instance"))
    start(place, "second", "same")
    until("the second is refused", lambda: logged(place, "second", "no heartbeat reason=Conflict"))
    line, = logged(place, "second", "no heartbeat reason=Conflict")
    assert "another agent calls itself same and was heard " in line and "--node NAME" in line
    assert nodes(place)["same"]["identity"]["instance"] == first and nodes(place)["same"]["state"] == "ready"
    assert logged(place, "first", "Conflict") == [] and logged(place, "second", "desired state taken") == []
    assert place.stop("first") == 0
    until("the name is free", lambda: nodes(place)["same"]["identity"]["instance"] != first)
    assert place.stop("second") == 0


def test_an_agent_that_was_killed_is_let_in_at_once(place):
    start(place, "again", "again")
    until("it is there", lambda: "again" in nodes(place))
    place.children["again"].kill()
    place.children.pop("again").wait(30)
    start(place, "again", "again")
    pid = place.children["again"].pid
    until("it is heard", lambda: nodes(place)["again"]["seen_seconds_ago"] < 1 and os.path.exists(f"/proc/{pid}"))
    assert logged(place, "again", "Conflict") == []


def test_an_agent_with_a_token_that_is_not_known_says_so_once(place):
    wrong = place.folder / "wrong"
    wrong.write_text(place.token("node").read_text()[:-5] + "oops\n")
    start(place, "stranger", "stranger", token=wrong)
    until("it is refused", lambda: logged(place, "stranger", "no heartbeat reason=Unauthorized"))
    assert "the token is not known here (try: copy the server's tokens/node" in logged(place, "stranger", "no heartbeat")[0]
    assert "stranger" not in nodes(place) and place.children["stranger"].poll() is None
