"""A replica over two nodes, with a stand-in for vLLM: plumbing of placement, order, loss and end. The real one: tests/heavy."""
from __future__ import annotations

import json
import struct

import pytest

from tests.fakes.gang_engine import stand_in
from tests.whole import gang
from tests.whole.cluster import until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(pyz, qa_template, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gang")
    model = folder / "tiny"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    made = gang.start(pyz, folder, qa_template, stand_in(folder / "env"), model)
    yield made
    made.close()


def test_a_stand_in_over_two_nodes_is_placed_started_in_order_lost_restarted_and_ended(cluster):
    cluster.wait_ready(gang.MODEL, 120)
    answer = until("it answers", lambda: gang.ask(cluster))
    assert answer["choices"][0]["text"] == "from 2 ranks"
    (found,) = cluster.items("replicas")
    assert [(shard["rank"], shard["node"]) for shard in found["shards"]] == [(0, "node-1"), (1, "node-2")]
    lead, follower = (shard["observed"] for shard in found["shards"])
    assert lead["meet_port"] and follower["port"] is None and lead["turn"] == follower["turn"] == 1
    gang.losing_rank_1_restarts_all(cluster, 120)
    (found,) = cluster.items("replicas")
    assert {shard["observed"]["turn"] for shard in found["shards"]} == {2}
    gang.nothing_left_when_unwanted(cluster, 120)
