"""Records: what goes out comes back, what is unknown is ignored, what is wrong is named."""
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.api import wire
from llmgw.domain import codec
from llmgw.domain.engine import Asset, EngineObserved, EnginePhase, EngineWanted
from llmgw.domain.errors import ParseError
from llmgw.domain.gate import GateEntry, GateTable
from llmgw.domain.heartbeat import HeartbeatAnswer, NodeDesired, NodeObserved, NodeRequest
from llmgw.domain.model import ModelSpec, Weights, WeightsFile
from llmgw.domain.node import Gpu, NodeFacts, NodeIdentity
from llmgw.domain.replica import (FirstFailure, GpuSlot, Replica, ReplicaWish, Shard, ShardObserved,
                                  ShardState, ShardWanted)
from llmgw.domain.secret import Secret

JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
                    lambda inner: st.lists(inner, max_size=3)
                    | st.dictionaries(st.text(max_size=6), inner, max_size=3), max_leaves=12)
MODEL = ModelSpec("m", "llama.cpp", "mirror:m", aliases=("a",), labels={"rack": "a"}, gpus=0)
WEIGHTS = Weights("m", "f" * 64, (WeightsFile("m.gguf", 10, "a" * 64, ("b" * 64,)),))
VALUES = [
    (wire.NODE_OBSERVED, NodeObserved(
        NodeIdentity("a", "1", "boot", labels={"x": "y"}),
        NodeFacts(gpus=(Gpu("GPU-1", 0, "H100", None, 5, "9.0", True),), warnings=("w",)), True,
        engines=(EngineObserved("llama.cpp", "b1", EnginePhase.INSTALLED, usable=True),),
        shards=(ShardObserved("m-1.0", ShardState.BACKOFF, pid=3,
                              first_failure=FirstFailure(1.5, "m", "c", "l")),))),
    (wire.HEARTBEAT_ANSWER, HeartbeatAnswer(
        "home", 3, 4, 5.0,
        NodeDesired((EngineWanted("llama.cpp", "b1", (Asset("x.tar.gz", 1, "c" * 64),)),),
                    (ShardWanted("m-1.0", "m-1", 0, MODEL, "b1", WEIGHTS, Secret("k"),
                                 (GpuSlot("GPU-1", 0),)),)),
        (NodeRequest("r", "log-tail", {"bytes": "5"}),))),
    (wire.REPLICA, Replica("m-1", MODEL, "b1", WEIGHTS, (Shard(0, "a"),), Secret("k"),
                           ReplicaWish.DRAIN)),
    (wire.GATE_TABLE, GateTable("127.0.0.1", 7802, (GateEntry("m-1", "a" * 64, "llama.cpp", 1),))),
]


@pytest.mark.parametrize("record, value", VALUES, ids=lambda item: type(item).__name__)
def test_a_value_survives_the_wire(record, value):
    data = wire.dumps(record, value)

    assert wire.loads(record, data, "it") == value
    assert wire.dumps(record, wire.loads(record, data, "it")) == data


def test_a_field_of_a_newer_version_is_ignored():
    data = wire.GATE_ENTRY.encode(GateEntry("m-1", "a" * 64, "llama.cpp", 1))

    assert wire.GATE_ENTRY.decode({**data, "colour": "blue"}) == GateEntry("m-1", "a" * 64, "llama.cpp", 1)


def test_a_field_with_a_default_may_be_absent_from_an_older_version():
    assert wire.GATE_ENTRY.decode({"replica": "m", "key_sha256": "a", "engine": "e", "port": 1}).incarnation == 0


@pytest.mark.parametrize("data, fault", [
    ([], "GateEntry: expected an object, got list"),
    ({"replica": "m"}, "GateEntry.key_sha256: missing"),
    ({"replica": 1}, "GateEntry.replica: expected a text, got int"),
    ({"replica": "m", "key_sha256": "a", "engine": "e", "port": True}, "port: expected a whole number, got bool"),
    ({"replica": "m", "key_sha256": "a", "engine": "e", "port": 1.0}, "port: expected a whole number, got float"),
])
def test_a_wrong_field_is_refused_with_its_path(data, fault):
    with pytest.raises(ParseError) as refused:
        wire.GATE_ENTRY.decode(data)

    assert fault in refused.value.message


def test_a_fault_deep_inside_is_named_by_its_whole_path():
    with pytest.raises(ParseError, match=r"answer\.desired\.shards\[0\]\.id: missing"):
        wire.HEARTBEAT_ANSWER.decode({"cluster": "c", "epoch": 1, "generation": 1,
                                      "call_again_seconds": 1, "desired": {"shards": [{}]}}, "answer")


def test_an_unknown_enum_value_is_refused_with_the_known_ones():
    with pytest.raises(ParseError) as refused:
        codec.one_of(ShardState).decode("dancing", "state")

    assert "ready" in (refused.value.hint or "")


def test_a_record_without_a_codec_for_a_field_does_not_come_to_life():
    with pytest.raises(TypeError, match="GateEntry.port has no codec"):
        codec.Record(GateEntry, replica=codec.text, key_sha256=codec.text, engine=codec.text)


@settings(max_examples=200, deadline=None)
@given(JSON)
def test_any_json_is_a_value_or_our_error(data):
    for record in (wire.NODE_OBSERVED, wire.HEARTBEAT_ANSWER, wire.ROUTE_TABLE, wire.MIRROR_VIEW):
        try:
            record.decode(data)
        except ParseError as error:
            assert len(error.message) <= 500


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=64))
def test_any_bytes_are_a_value_or_our_error(data):
    with pytest.raises(ParseError):
        wire.loads(wire.GATE_TABLE, data, "table")


def test_nesting_without_end_is_our_error():
    with pytest.raises(ParseError):
        wire.loads(wire.GATE_TABLE, b"[" * 100_000, "table")
