"""vLLM: how ``vllm serve`` (checked against 0.30.0) is started and read."""
from __future__ import annotations

from typing import Dict, List, Tuple

from llmgw.domain.command import Command
from llmgw.domain.engine import VLLM
from llmgw.domain.model import Task
from llmgw.domain.replica import ShardWanted
from llmgw.engines import python_env
from llmgw.engines.base import Place, Program

RAY_MODULE = "ray.scripts.scripts"       # what the script ``ray`` calls
MODULE = "vllm.entrypoints.cli.main"     # what the script ``vllm`` calls; an operator's Python may lie without scripts

# What llmgw sets itself, and what would open the node, run code of a request's or a file's choosing, write requests
# into the log, or start a part of a larger whole. ``--x*``: all that start so (--flag.key, -n2); ``!--x``: a flag of
# its own, although a reserved one starts like it.
_RESERVED = """
    -h --help --config --model --served-model-name --host --port --uds --root-path --api-key --grpc --headless
    --ssl-* --enable-ssl-refresh --allow-credentials --allowed-headers --allowed-methods --allowed-origins
    --middleware* --disable-fastapi-docs --no-disable-fastapi-docs --enable-offline-docs --no-enable-offline-docs
    --disable-uvicorn-access-log --no-disable-uvicorn-access-log --uvicorn-log-level --log-config-file
    --enable-log-requests --no-enable-log-requests --enable-log-outputs --no-enable-log-outputs
    --enable-log-deltas --no-enable-log-deltas --disable-log-stats
    --chat-template --trust-request-chat-template --no-trust-request-chat-template
    --tool-server --tool-parser-plugin --reasoning-parser-plugin --io-processor-plugin
    --logits-processors* --model-class-overrides* --worker-cls --worker-extension-cls --scheduler-cls
    --enable-tokenizer-info-endpoint --no-enable-tokenizer-info-endpoint
    --enable-prompt-embeds --no-enable-prompt-embeds --enable-mm-embeds --no-enable-mm-embeds
    --allowed-local-media-path --allowed-media-domains --hf-token --trust-remote-code --no-trust-remote-code
    --code-revision --revision --tokenizer-revision --hf-config-path --download-dir --runner
    --max-model-len --max-num-seqs --tensor-parallel-size -t -tp* --device-ids
    --pipeline-parallel-size -pp* --prefill-context-parallel-size -pcp* --nnodes -n* --node-rank -r*
    --master-addr --master-port
    --distributed-executor-backend --data-parallel-* -dp* --dp-supervisor-* --api-server-count -as*
    --enable-elastic-ep --no-enable-elastic-ep --elastic-ep-max-dp-size --enable-scale-out --no-enable-scale-out
    --kv-transfer-config* --kv-events-config* --ec-transfer-config* --ec-manager-config* --weight-transfer-config*
    --profiler-config* --otlp-traces-endpoint --collect-detailed-traces
    --enable-sleep-mode --no-enable-sleep-mode --tokens-only --no-tokens-only
    !--reasoning-parser !--tokenizer
"""

_GIB = 1 << 30

# The ports of Ray, each with the flag or the variable of the environment that says it. Ray refuses to start where two
# of them are one (as its workers' own, 10002 to 19999), so that none is left to itself (seen with 2.60.0).
_RAY_PORTS = ("--node-manager-port", "--object-manager-port", "--runtime-env-agent-port", "--dashboard-agent-grpc-port",
              "--dashboard-agent-listen-port", "--metrics-export-port")
_RAY_HEAD_PORTS = ("--dashboard-port", "--ray-client-server-port")
_RAY_HEAD_METRICS = ("AUTOSCALER_METRIC_PORT", "DASHBOARD_METRIC_PORT")
# Each process that works for it takes one: one for each GPU, those that connect, an idle one, those that spill. Where
# none is left, what waits for one waits for ever.
_RAY_SPARE_WORKERS = 10


class Vllm(python_env.PythonEngine):
    """One program, ``vllm serve``. Its key guards only /v1 and a few paths: the gate is what guards the rest."""

    name = VLLM
    over_nodes = True
    allowed_paths = python_env.allowed_paths("/health", "/metrics", "/v1/models")
    reserved_flags = frozenset(_RESERVED.split())
    dashes_are_underscores = True
    unlisted_flags = frozenset(("-O",))
    running = ("vllm:num_requests_running",)
    waiting = ("vllm:num_requests_waiting",)
    kv_used = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")      # the second is the older name
    generated = ("vllm:generation_tokens_total",)
    # The last one counts every step, those too in which a long prompt is still being read.
    worked = (*generated, "vllm:prompt_tokens_total", "vllm:iteration_tokens_total_count")

    def inner_ports(self, shard: ShardWanted) -> int:
        if shard.gang is None:
            return 1
        return len(_ray_ports(shard)) + len(shard.gpus) + _RAY_SPARE_WORKERS if _with_ray(shard) else 0

    def unknown_ports(self, shard: ShardWanted) -> int:
        return 1 if _with_ray(shard) else 0       # its executor for Ray lets torch choose where it is met

    def programs(self, shard: ShardWanted, place: Place) -> Tuple[Program, ...]:
        ray = _with_ray(shard)
        beside = (_ray_start(shard, place),) if ray else ()
        if ray and shard.rank > 0:            # rank 0 starts what runs there
            return beside
        argv = (place.program, "-m", MODULE, "serve", place.model_path, *_flags(shard, place), *shard.model.args)
        return beside + (Program("engine", Command(argv, env=_env(shard, place), cwd=place.work_dir,
                                                   secret_env={"VLLM_API_KEY": shard.key.reveal(), **_ray_key(shard)}),
                                 title="vllm serve", help=(place.program, "-m", MODULE, "serve", "--help=all")),)


def _flags(shard: ShardWanted, place: Place) -> List[str]:
    model = shard.model
    flags = ["--served-model-name", model.name, *_listen(shard, place), *_parallel(shard),
             # auto: the model's own, or as much as fits beside it
             "--max-model-len", str(model.context_length or "auto"), "--max-num-seqs", str(model.parallel),
             "--disable-uvicorn-access-log", "--disable-fastapi-docs"]
    if model.task is not Task.CHAT:
        flags += ["--runner", "pooling"]
    if place.template_file:
        flags += ["--chat-template", place.template_file]
    if model.trust_remote_code:
        flags += ["--trust-remote-code"]
    return flags


def _listen(shard: ShardWanted, place: Place) -> List[str]:
    return ["--headless"] if shard.rank > 0 else ["--host", "127.0.0.1", "--port", str(place.port)]


def _parallel(shard: ShardWanted) -> List[str]:
    """Return how the model is cut: tensors within a node, layers between nodes; on CPUs, tensors between nodes."""
    gang, here = shard.gang, max(1, len(shard.gpus))
    if gang is None:
        return ["--tensor-parallel-size", str(here)]
    cut = (["--tensor-parallel-size", str(here), "--pipeline-parallel-size", str(gang.size)] if shard.gpus
           else ["--tensor-parallel-size", str(gang.size)])
    if shard.model.launch_mode == "ray":
        return cut + ["--distributed-executor-backend", "ray"]
    return cut + ["--distributed-executor-backend", "mp", "--nnodes", str(gang.size), "--node-rank", str(shard.rank),
                  "--master-addr", gang.lead_address, "--master-port", str(gang.meet_port)]


def _ray_start(shard: ShardWanted, place: Place) -> Program:
    """Return Ray's part on this node: the head on rank 0, which the others join. Nobody starts it but us."""
    gang = shard.gang
    assert gang is not None
    script = (place.program, "-m", RAY_MODULE, "start")
    where = ["--head", "--port", str(gang.meet_port), "--include-dashboard", "false"] if shard.rank == 0 else [
        "--address", f"{gang.lead_address}:{gang.meet_port}"]
    # One CPU: for each it keeps an idle worker, and vLLM's own ask for none.
    argv = (*script, *where, "--node-ip-address", gang.address, "--num-gpus", str(len(shard.gpus)), "--num-cpus", "1",
            *_ray_port_flags(shard, place), "--disable-usage-stats", "--block")
    return Program("ray", Command(argv, env=_env(shard, place), cwd=place.work_dir, secret_env=_ray_key(shard)),
                   title="ray start", help=(*script, "--help"),
                   ready_at=(gang.address, gang.meet_port) if shard.rank == 0 else ("", 0))


def _with_ray(shard: ShardWanted) -> bool:
    return shard.gang is not None and shard.model.launch_mode == "ray"


def _ray_ports(shard: ShardWanted) -> Tuple[str, ...]:
    """Return what each of the first inner ports is for; the rest are its workers'."""
    return _RAY_PORTS + (_RAY_HEAD_PORTS + _RAY_HEAD_METRICS if shard.rank == 0 else ())


def _ray_port_flags(shard: ShardWanted, place: Place) -> List[str]:
    names = _ray_ports(shard)
    said = [word for name, port in zip(names, place.inner_ports) if name.startswith("--") for word in (name, str(port))]
    workers = place.inner_ports[len(names):]
    return said + (["--worker-port-list", ",".join(map(str, workers))] if workers else [])


def _ray_key(shard: ShardWanted) -> Dict[str, str]:
    """Return the token that Ray (2.52 or newer) demands of every rank: whoever has none runs nothing."""
    return {"RAY_AUTH_TOKEN": shard.key.reveal()} if _with_ray(shard) else {}


def _env(shard: ShardWanted, place: Place) -> Dict[str, str]:
    made = {**python_env.env(shard, place), "VLLM_HOST_IP": shard.gang.address if shard.gang else "127.0.0.1",
            "VLLM_NO_USAGE_STATS": "1"}
    if shard.gang is None and place.inner_ports:
        # The first that it tries when it needs one. 0.30.0 needs none on one node; older ones meet there.
        made["VLLM_PORT"] = str(place.inner_ports[0])
    if shard.gang and _with_ray(shard):
        made.update({"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0",
                     "RAY_ADDRESS": f"{shard.gang.lead_address}:{shard.gang.meet_port}"})
        made.update({name: str(port) for name, port in zip(_ray_ports(shard), place.inner_ports)
                     if not name.startswith("--")})
    if not shard.gpus:
        # On a CPU the KV cache is not what is left of a card: it has to be told its size.
        made["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, -(-shard.weights.size_bytes // (4 * _GIB))))
        if place.threads is not None:
            made["OMP_NUM_THREADS"] = str(place.threads)
    return made
