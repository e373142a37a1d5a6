"""Everything moves to another engine version, then to another node; then all of it ends."""
from __future__ import annotations

import shutil

import pytest

from tests.whole.asking import Load
from tests.whole.cluster import MODEL
from tests.whole.fire import SLEEPER

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("alone", "calm")]
OTHER = "b010991"


@pytest.fixture(scope="module")
def alone(fire):
    """The other model is not needed any more."""
    fire.edit({SLEEPER: None})
    fire.ctl("apply", "--confirm")
    fire.until("it is gone", lambda: fire.rows(SLEEPER) == [] and fire.engines(SLEEPER) == {})


def test_another_engine_version_is_rolled_too(fire):
    """The same build under another spelling of its tag: to the control plane that is another version."""
    old, counted, kept = fire.names(), fire.counted(), fire.engines(MODEL)
    archive = fire.folder / fire.archive.name.replace("b10991", OTHER)
    shutil.copyfile(fire.archive.path, archive)
    fire.ctl("mirror", "import-engine", archive, "--sha256", fire.archive.sha256)
    with Load(fire) as load:
        load.more(2)
        fire.edit({}, version=OTHER)
        fire.until("every replica is a new one", lambda: counted.rolled(old), 240)
        load.more(2)
    assert load.failed == [] and load.broken == [] and counted.fewest >= 2
    assert {row["engine_version"] for row in fire.rows()} == {OTHER}
    assert not set(fire.engines(MODEL).values()) & set(kept.values())


def test_a_drained_node_s_replica_moves_and_its_streams_finish(fire):
    row = fire.on("node-1")
    stream = fire.hold(row["id"], stream=True, seconds=20)
    fire.ctl("drain", "node-1")
    with Load(fire) as load:
        fire.until("the replica has moved", lambda: [item["shards"][0]["node"] for item in fire.rows()] == ["node-2"] * 2
                   and {item["state"] for item in fire.rows()} == {"ready"}, 240)
        load.more(2)
    assert load.failed == [] and load.broken == []
    assert stream.wait().outcome == "whole"
    assert fire.on_nodes() == {"node-2"}
    fire.ctl("undrain", "node-1")
    assert {node["name"]: node["draining"] for node in fire.api("nodes")["items"]} == {"node-1": False, "node-2": False}


def test_an_orderly_end_leaves_nothing(fire):
    """Last: agents that are told to take engines and gates along do so, though others had started them."""
    assert fire.end() == {}
