"""Small builders of nodes, models and replicas."""
from __future__ import annotations

from dataclasses import replace

from llmgw.decide.liveness import NodeLife, NodeLiveness
from llmgw.decide.placement import NodeState
from llmgw.decide.replicas import Wanted
from llmgw.domain.engine import EngineObserved, EnginePhase
from llmgw.domain.heartbeat import NodeObserved
from llmgw.domain.model import ModelSpec, Weights, WeightsFile, WeightsObserved, WeightsPhase
from llmgw.domain.node import Gpu, NodeFacts, NodeIdentity
from llmgw.domain.replica import Replica, ReplicaWish, Shard, ShardObserved, ShardState
from llmgw.domain.secret import Secret

GIB = 1 << 30
VERSION = "b10991"
INSTALLED = EngineObserved("llama.cpp", VERSION, EnginePhase.INSTALLED, usable=True)
ON_CUDA = replace(INSTALLED, devices=("CUDA0",))
ALIVE = NodeLiveness(NodeLife.READY, 1.0)
SILENT = NodeLiveness(NodeLife.UNREACHABLE, 61.0, True, "no heartbeat for 61 s")
UNREACHABLE = NodeLiveness(NodeLife.UNREACHABLE, 31.0, False, "no heartbeat for 31 s")
LOST = NodeLiveness(NodeLife.LOST, 601.0, True, "no heartbeat for 601 s")
SUSPECT = NodeLiveness(NodeLife.SUSPECT, 16.0, False, "no heartbeat for 16 s")


def gpu(number, size=80, used=0, name="H100", node="x", mig=False):
    return Gpu(f"GPU-{node}-{number}", number, name, None if size is None else size * GIB, used * GIB, "9.0", mig)


def node(name, memory=64, disk=500, gpus=(), engines=(INSTALLED,), labels=None, shards=(), weights=(),
         liveness=ALIVE, draining=False, acknowledged=True, probed=True, heard=True, gate_port=7802,
         fabric=""):
    facts = NodeFacts(memory_total_bytes=memory * GIB, memory_available_bytes=int(memory * GIB),
                      disk_total_bytes=int(disk * GIB), disk_free_bytes=int(disk * GIB), gpus=tuple(gpus))
    observed = NodeObserved(
        NodeIdentity(name, "1", f"boot-{name}", "127.0.0.1", gate_port, dict(labels or {}), fabric), facts, probed,
        engines=tuple(engines), shards=tuple(shards),
        weights=tuple(WeightsObserved(mark, mark, WeightsPhase.WHOLE) for mark in weights))
    return NodeState(name, liveness, observed if heard else None, draining, acknowledged)


def weights(name="m", size=1, mark=None, kv=1000, trained=8192):
    return Weights(name, mark or name, (WeightsFile(f"{name}.gguf", int(size * GIB), "0" * 64),),
                   kv_bytes_per_token=kv, context_train=trained)


def spec(name="m", **fields):
    return ModelSpec(name, fields.pop("engine", "llama.cpp"), fields.pop("source", f"mirror:{name}"), **fields)


def want(name="m", size=1, mark=None, version=VERSION, **fields):
    return Wanted(spec(name, **fields), version, weights(name, size, mark))


def row(identity, where="a", model=None, wish=ReplicaWish.RUN, created_at=0.0, version=VERSION, of=None, gpus=()):
    model = model or spec()
    return Replica(identity, model, version, of or weights(model.name), (Shard(0, where, tuple(gpus)),),
                   Secret(f"key-{identity}"), wish, created_at)


def seen(identity, state=ShardState.READY, message=""):
    return ShardObserved(f"{identity}.0", state, message=message, port=7900, incarnation=1)
