"""Every value that crosses between the roles, or is kept on disk, as JSON.

``X.encode(value)`` gives JSON-ready data, ``X.decode(data)`` the value; both ends
of a wire use the same record, so a field cannot be spelled two ways.
"""
from __future__ import annotations

import json
from typing import Any

from llmgw.domain import engine, gate, heartbeat, join, model, node, replica, route, view
from llmgw.domain.codec import (Codec, Record, flag, map_of, number, one_of, optional, pair,
                                secret, text, text_map, texts, tuple_of, whole)
from llmgw.domain.errors import ParseError

OS_RELEASE = Record(node.OsRelease, id=text, id_like=texts, version_id=text, pretty_name=text)
GPU = Record(node.Gpu, uuid=text, index=whole, name=text, memory_total_bytes=optional(whole),
             memory_used_bytes=optional(whole), compute_capability=optional(text), mig=flag)
NODE_FACTS = Record(
    node.NodeFacts, os=OS_RELEASE, kernel=text, arch=text, libc=text, python=text, cpu_model=text,
    cpu_count=whole, vector_extensions=texts, memory_total_bytes=whole, memory_available_bytes=whole,
    disk_total_bytes=whole, disk_free_bytes=whole, nvidia_driver=optional(text), gpus=tuple_of(GPU),
    reboot_needed=text, warnings=texts)
NODE_IDENTITY = Record(node.NodeIdentity, name=text, agent_version=text, boot_id=text, address=text,
                       gate_port=whole, labels=text_map, instance=text, fabric_address=text)

ASSET = Record(engine.Asset, name=text, size_bytes=whole, sha256=text)
TOOL = Record(engine.Tool, name=text, version=text, assets=tuple_of(ASSET), problem=text, server_cannot=flag)
ENGINE_WANTED = Record(engine.EngineWanted, name=text, version=text, assets=tuple_of(ASSET),
                       assets_problem=text, cpu=flag, cuda=text, as_of=text, tools=tuple_of(TOOL),
                       locks=tuple_of(pair(text, text)), vouched=texts, allow_insecure=flag, server_cannot=flag,
                       with_ray=flag)
PACKAGE_LIST = Record(engine.PackageList, node=text, as_of=text, text=text)
ENGINE_OBSERVED = Record(
    engine.EngineObserved, name=text, version=text, phase=one_of(engine.EnginePhase), message=text,
    hint=text, usable=flag, source=text, done_bytes=optional(whole), total_bytes=optional(whole),
    devices=texts, since=number)

MODEL_SPEC = Record(
    model.ModelSpec, name=text, engine=text, weights=text, aliases=texts, replicas=whole,
    task=one_of(model.Task), context_length=optional(whole), parallel=whole, gpus=optional(whole),
    nodes=whole, chat_template=text, labels=text_map, only_nodes=texts, args=texts,
    trust_remote_code=flag, launch_mode=text, fabric=text, gpu_layers=optional(whole))
WEIGHTS_FILE = Record(model.WeightsFile, name=text, size_bytes=whole, sha256=text, chunks=texts)
WEIGHTS = Record(
    model.Weights, name=text, fingerprint=text, files=tuple_of(WEIGHTS_FILE), source=text,
    revision=text, format=text, kv_bytes_per_token=optional(whole), context_train=optional(whole),
    imported_at=number, projector=text)
WEIGHTS_OBSERVED = Record(
    model.WeightsObserved, name=text, fingerprint=text, phase=one_of(model.WeightsPhase),
    done_bytes=whole, total_bytes=whole, message=text, bytes_per_second=whole)

GPU_SLOT = Record(replica.GpuSlot, uuid=text, index=whole)
SHARD = Record(replica.Shard, rank=whole, node=text, gpus=tuple_of(GPU_SLOT))
REPLICA = Record(
    replica.Replica, id=text, model=MODEL_SPEC, engine_version=text, weights=WEIGHTS,
    shards=tuple_of(SHARD), key=secret, wish=one_of(replica.ReplicaWish), created_at=number,
    wish_since=number, reason=text, turn=whole)
GANG = Record(replica.Gang, size=whole, turn=whole, address=text, lead_address=text, meet_port=whole, lead_ready=flag,
              waits_for=text)
SHARD_WANTED = Record(
    replica.ShardWanted, id=text, replica=text, rank=whole, model=MODEL_SPEC, engine_version=text,
    weights=WEIGHTS, key=secret, gpus=tuple_of(GPU_SLOT), gang=optional(GANG))
FIRST_FAILURE = Record(replica.FirstFailure, at=number, message=text, command=text, log_tail=text)
SHARD_OBSERVED = Record(
    replica.ShardObserved, id=text, state=one_of(replica.ShardState), reason=text, message=text,
    since=number, incarnation=whole, pid=optional(whole), port=optional(whole), restarts=whole,
    first_failure=optional(FIRST_FAILURE), turn=whole, meet_port=whole, outdated=text)

NODE_OBSERVED = Record(
    heartbeat.NodeObserved, identity=NODE_IDENTITY, facts=NODE_FACTS, probed=flag, epoch=whole,
    generation=whole, engines=tuple_of(ENGINE_OBSERVED), weights=tuple_of(WEIGHTS_OBSERVED),
    shards=tuple_of(SHARD_OBSERVED), clock=number, stopping=flag)
PEER = Record(heartbeat.Peer, node=text, host=text, port=whole, key=secret, fingerprints=texts, tls_name=text)
SHARE = Record(heartbeat.Share, fingerprint=text, place=whole, count=whole)
PEER_DOOR = Record(gate.PeerDoor, node=text, key_sha256=text)
NODE_DESIRED = Record(heartbeat.NodeDesired, engines=tuple_of(ENGINE_WANTED), shards=tuple_of(SHARD_WANTED),
                      peers=tuple_of(PEER), readers=tuple_of(PEER_DOOR), shares=tuple_of(SHARE))
NODE_REQUEST = Record(heartbeat.NodeRequest, id=text, kind=text, args=text_map)
HEARTBEAT_ANSWER = Record(
    heartbeat.HeartbeatAnswer, cluster=text, epoch=whole, generation=whole, call_again_seconds=number,
    desired=optional(NODE_DESIRED), requests=tuple_of(NODE_REQUEST))
LOG_TAIL = Record(heartbeat.LogTail, request=text, text=text, problem=text)

ROUTED_REPLICA = Record(
    route.RoutedReplica, id=text, node=text, host=text, port=whole, key=secret, engine=text,
    slots=whole, incarnation=whole, draining=flag, tls_name=text)
ROUTED_MODEL = Record(
    route.RoutedModel, name=text, engine=text, aliases=texts, task=one_of(model.Task), created=whole,
    context_length=optional(whole), replicas=tuple_of(ROUTED_REPLICA), why_not=text,
    retry_after_seconds=whole)
ROUTED_KEY = Record(route.RoutedKey, id=text, sha256=text, models=texts)
ROUTE_TABLE = Record(route.RouteTable, cluster=text, epoch=whole, revision=whole,
                     models=tuple_of(ROUTED_MODEL), keys=tuple_of(ROUTED_KEY), ca=text)
GAUGES = Record(route.Gauges, running=optional(number), waiting=optional(number),
                kv_used=optional(number), generated_tokens=optional(number), in_flight=whole)
ROUTER_REPORT = Record(route.RouterReport, router=text, table_revision=whole, replicas=map_of(GAUGES),
                       answering=texts)

JOIN_REQUEST = Record(join.JoinRequest, name=text, machine=text, names=texts)
JOIN_ANSWER = Record(join.JoinAnswer, role=text, name=text, token=secret, fleet_ca=text, certificate=text, key=secret,
                     renew_at=number, ends_at=number, tls_name=text)
RENEWED = Record(join.Renewed, certificate=text, key=secret, renew_at=number, ends_at=number, fleet_ca=text)

GATE_ENTRY = Record(gate.GateEntry, replica=text, key_sha256=text, engine=text, port=whole,
                    incarnation=whole)
GATE_TABLE = Record(gate.GateTable, host=text, port=whole, entries=tuple_of(GATE_ENTRY), certificate=text, root=text,
                    peers=tuple_of(PEER_DOOR))

NODE_VIEW = Record(
    view.NodeView, name=text, state=text, message=text, identity=NODE_IDENTITY, facts=NODE_FACTS,
    probed=flag, seen_seconds_ago=number, draining=flag, clock_skew_seconds=number,
    engines=tuple_of(ENGINE_OBSERVED), weights=tuple_of(WEIGHTS_OBSERVED), replicas=texts,
    warnings=texts)
WEIGHTS_ON_NODE = Record(view.WeightsOnNode, node=text, phase=text, percent=whole, seconds_left=optional(whole),
                         message=text)
MODEL_VIEW = Record(
    view.ModelView, name=text, engine=text, engine_version=text, task=text, weights=text,
    wanted=whole, ready=whole, aliases=texts, replicas=texts, why_not=texts,
    context_length=optional(whole), size_bytes=optional(whole), vision=flag, nodes=tuple_of(WEIGHTS_ON_NODE))
SHARD_VIEW = Record(view.ShardView, rank=whole, node=text, gpus=tuple_of(GPU_SLOT),
                    observed=optional(SHARD_OBSERVED))
REPLICA_VIEW = Record(
    view.ReplicaView, id=text, model=text, engine=text, engine_version=text, wish=text, state=text,
    reason=text, message=text, created_at=number, shards=tuple_of(SHARD_VIEW),
    gauges=optional(GAUGES))
ENGINE_VIEW = Record(view.EngineView, name=text, version=text, assets=tuple_of(ASSET),
                     assets_problem=text, nodes=tuple_of(pair(text, ENGINE_OBSERVED)))
KEY_VIEW = Record(view.KeyView, id=text, name=text, created_at=number, models=texts,
                  revoked_at=optional(number), secret=text)
TOKEN_VIEW = Record(view.TokenView, id=text, role=text, kind=text, made_at=number, expires_at=optional(number),
                    name=text, uses=whole, used=whole, revoked_at=optional(number), secret=text, line=text)
EVENT_VIEW = Record(view.EventView, id=whole, at=number, subject=text, reason=text, message=text)
ENGINE_ARCHIVE = Record(view.EngineArchive, engine=text, version=text, asset=ASSET,
                        imported_at=number, source=text)
LOCK_VIEW = Record(view.LockView, engine=text, version=text, platform=text, as_of=text, sha256=text,
                   packages=whole, source=text, made_at=number)
WEIGHTS_USE = Record(view.WeightsUse, name=text, models=texts, replicas=texts, nodes=texts, damaged=texts)
MIRROR_VIEW = Record(view.MirrorView, models=tuple_of(WEIGHTS), engines=tuple_of(ENGINE_ARCHIVE),
                     activity=texts, free_bytes=whole, uses=tuple_of(WEIGHTS_USE), total_bytes=whole)


def dumps(codec: Codec[Any], value: Any) -> bytes:
    """Return the compact JSON text of ``value``; sorted, so that equal values have equal bytes."""
    return json.dumps(codec.encode(value), sort_keys=True, separators=(",", ":")).encode("utf-8")


def loads(codec: Codec[Any], data: bytes, what: str) -> Any:
    """Return the value in ``data``; a ParseError names ``what`` and the path of the fault."""
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ParseError(f"{what}: not JSON: {str(error)[:200]}") from None
    return codec.decode(parsed, what)
