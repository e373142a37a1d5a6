"""Each served copy of a model: where it runs, its state, and its load as the routers see it."""
from __future__ import annotations

import argparse
import time
from typing import List

from llmgw.api import paths, wire
from llmgw.ctl import output, watch
from llmgw.ctl.connection import connect
from llmgw.domain.replica import FirstFailure
from llmgw.domain.route import Gauges
from llmgw.domain.view import ReplicaView, ShardView

TITLES = ("REPLICA", "MODEL", "NODE", "STATE", "ENGINE", "RUNNING", "WAITING", "KV", "AGE")


def arguments(parser: argparse.ArgumentParser) -> None:
    watch.arguments(parser)
    parser.add_argument("--explain", action="store_true",
                        help="tell all of it: pids, restarts, and the first failure with its log")
    parser.add_argument("replica", metavar="REPLICA", nargs="*", help="only these, or those of these models")


def action(options: argparse.Namespace) -> int:
    client = connect(options)

    def once() -> None:
        data = client.json("GET", paths.REPLICAS)
        items = [item for item in data["items"] if not options.replica
                 or item.get("id") in options.replica or item.get("model") in options.replica]
        if options.json:
            return output.write_json({**data, "items": items})
        replicas = [wire.REPLICA_VIEW.decode(item, "replica") for item in items]
        if options.explain:
            return output.write("\n\n".join("\n".join(_explain(replica)) for replica in replicas))
        output.write_table(TITLES, [_row(replica) for replica in replicas],
                           empty="no replica: llmgw.pyz ctl models says why")

    return watch.show(options, once)


def _row(replica: ReplicaView) -> output.Row:
    gauges = replica.gauges or Gauges()
    kv = "-" if gauges.kv_used is None else f"{gauges.kv_used * 100:.0f} %"
    notes = [replica.message] if replica.message and replica.state != "ready" else []
    return output.Row((
        replica.id, replica.model, ", ".join(shard.node for shard in replica.shards), replica.state,
        f"{replica.engine} {replica.engine_version}", output.count(gauges.running),
        output.count(gauges.waiting), kv, output.age(time.time() - replica.created_at)), tuple(notes))


def _explain(replica: ReplicaView) -> List[str]:
    said = [f"{replica.id}: {replica.state}", f"model:    {replica.model}",
            f"engine:   {replica.engine} {replica.engine_version}",
            f"wanted:   {replica.wish}{_because(replica.reason if replica.wish != 'run' else '')}",
            f"made:     {output.moment(replica.created_at)}"]
    if replica.message:
        said.append(f"says:     {replica.message}")
    said = [output.clean(line) for line in said]
    for shard in replica.shards:
        said += _shard(shard)
    return said


def _because(reason: str) -> str:
    return f" ({reason})" if reason else ""


def _shard(shard: ShardView) -> List[str]:
    gpus = ", ".join(str(gpu.index) for gpu in shard.gpus)
    head = f"rank {shard.rank} on {shard.node}" + (f", GPU {gpus}" if gpus else ", on the CPU")
    seen = shard.observed
    if seen is None:
        return [output.clean(f"{head}: the node has not reported it yet")]
    numbers = [f"pid {seen.pid}" if seen.pid else "", f"port {seen.port}" if seen.port else "",
               f"{seen.restarts} restarts" if seen.restarts else ""]
    said = [output.clean(f"{head}: {seen.state.value}{_because(seen.reason)} since "
                         f"{output.moment(seen.since)}")]
    if any(numbers):
        said.append("  " + ", ".join(number for number in numbers if number))
    if seen.message:
        said.append(output.clean(f"  {seen.message}"))
    return said + (_first_failure(seen.first_failure) if seen.first_failure else [])


def _first_failure(failure: FirstFailure) -> List[str]:
    said = [f"  first failure, {output.moment(failure.at)}: {output.clean(failure.message)}"]
    if failure.command:
        said.append(f"  command: {output.clean(failure.command)}")
    if failure.log_tail:
        said += ["  its log ended:"] + ["    " + line for line in output.lines(failure.log_tail.rstrip())]
    return said
