"""Records of clusters to look at: a node that is well, and every way in which one is not."""
from __future__ import annotations

import dataclasses
import time

from llmgw.domain.engine import Asset, EngineObserved, EnginePhase
from llmgw.domain.model import WeightsObserved, WeightsPhase
from llmgw.domain.node import Gpu, NodeFacts, NodeIdentity, OsRelease
from llmgw.domain.replica import FirstFailure, GpuSlot, ShardObserved, ShardState
from llmgw.domain.route import Gauges
from llmgw.domain.view import EngineView, EventView, ModelView, NodeView, ReplicaView, ShardView

GB = 10 ** 9
BUILD = "b10991"
ARCHIVE = "llama-b10991-bin-ubuntu-x64.tar.gz"
MISSING = "libgomp.so.1 is missing"
MISSING_HINT = "apt-get install libgomp1"
INSTALLING = f"downloading {ARCHIVE} (16 MB, 43 %)"
NO_AVX2 = "no AVX2 on this processor (a VM processor type? it makes everything about five times slower)"
HOSTILE_NAME = "<script>window.pwned=1</script>"
HOSTILE_OUTPUT = "ggml: \x1b[31mfailed\x1b[0m <img src=x onerror=\"window.pwned=2\">\n\tat \u202etxt.exe <b>line</b> 2"

DEBIAN = OsRelease("debian", (), "12", "Debian GNU/Linux 12 (bookworm)")
FACTS = NodeFacts(
    os=DEBIAN, kernel="6.1.0-38-amd64", arch="x86_64", libc="glibc 2.36", python="3.11.2",
    cpu_model="AMD EPYC 7763 64-Core Processor", cpu_count=16, vector_extensions=("avx", "avx2", "fma", "f16c"),
    memory_total_bytes=64 * GB, memory_available_bytes=41 * GB, disk_total_bytes=480 * GB, disk_free_bytes=212 * GB)
H200 = tuple(Gpu(f"GPU-{index:08d}", index, "NVIDIA H200", 151 * GB, 3 * GB, "9.0") for index in range(8))
GPU_FACTS = dataclasses.replace(
    FACTS, os=OsRelease("ubuntu", ("debian",), "24.04", "Ubuntu 24.04.3 LTS"), libc="glibc 2.39", python="3.12.3",
    kernel="6.8.0-79-generic", cpu_model="INTEL(R) XEON(R) PLATINUM 8570", cpu_count=224,
    vector_extensions=("avx2", "avx512f", "amx_int8"), memory_total_bytes=2160 * GB, memory_available_bytes=2011 * GB,
    disk_total_bytes=15360 * GB, disk_free_bytes=9810 * GB, nvidia_driver="580.95.05", gpus=H200)
ARM_FACTS = dataclasses.replace(
    FACTS, os=OsRelease("fedora", (), "43", "Fedora Linux 43 (Server Edition)"), arch="aarch64", libc="glibc 2.42",
    cpu_model="Neoverse-N1", cpu_count=4, vector_extensions=("neon", "asimd"), memory_total_bytes=8 * GB,
    memory_available_bytes=5 * GB, disk_total_bytes=64 * GB, disk_free_bytes=3 * GB)


def engine(phase=EnginePhase.INSTALLED, message="", *, name="llama.cpp", version=BUILD, **more):
    return EngineObserved(name, version, phase, message, **{"usable": phase is EnginePhase.INSTALLED, **more})


def node(name, facts=FACTS, engines=(engine(),), **more):
    identity = NodeIdentity(name, "0.1.0", "boot", more.pop("address", "10.0.0.7"), 7802, more.pop("labels", {}))
    values = {"state": "ready", "message": "", "probed": True, "seen_seconds_ago": 2.4, **more}
    return NodeView(name=name, identity=identity, facts=facts, engines=tuple(engines), **values)


GOOD = node("anna", labels={"rack": "a", "zone": "cellar"}, replicas=("gemma-3-270m-1f4c",),
            weights=(WeightsObserved("gemma-3-270m", "f" * 64, WeightsPhase.WHOLE, 253 << 20, 253 << 20),))
LACKING = node("bert", address="10.0.0.8", engines=(engine(EnginePhase.MISSING, f"llama.cpp {BUILD}: {MISSING}", hint=MISSING_HINT),))
FETCHING = node("carl", address="10.0.0.9", engines=(
    engine(EnginePhase.DOWNLOADING, INSTALLING, done_bytes=6_880_000, total_bytes=16_000_000),))
THREE = (GOOD, LACKING, FETCHING)

WITH_GPUS = node(
    "dora", GPU_FACTS, address="10.0.0.20", labels={"rack": "b"},
    engines=(engine(devices=("CUDA0: NVIDIA H200", "CUDA1: NVIDIA H200")),
             engine(EnginePhase.INSTALLING_PACKAGES, "installing 187 wheels: torch-2.9.1-cp312-manylinux_2_28.whl",
                    name="vllm", version="0.30.0", done_bytes=4 * GB, total_bytes=9 * GB)),
    weights=(WeightsObserved("llama-3.3-70b", "e" * 64, WeightsPhase.FETCHING, 61 * GB, 141 * GB),),
    replicas=("llama-3.3-70b-77aa",))
NO_DEVICE = node(
    "emil", dataclasses.replace(GPU_FACTS, gpus=H200[:1], nvidia_driver="550.54.15"), address="10.0.0.21",
    engines=(engine(EnginePhase.INSTALLED, "the CUDA build sees no device: libcudart.so.13 is missing", usable=False,
                    hint="update the NVIDIA driver to 580 or newer, or set cpu: true for this node"),
             engine(EnginePhase.SKIPPED, "needs an NVIDIA driver >= 580, this node has 550.54.15", name="vllm",
                    version="0.30.0")))
SILENT = node("frieda", state="unreachable", message="no heartbeat for 48 s", seen_seconds_ago=48.0,
              address="10.0.0.31", engines=(engine(),), replicas=("gemma-3-270m-9e02",))
SLOW = node("gustav", dataclasses.replace(FACTS, cpu_model="QEMU Virtual CPU version 2.5+", cpu_count=2,
                                          vector_extensions=("sse4_2",), memory_total_bytes=4 * GB,
                                          memory_available_bytes=400_000_000),
            address="10.0.0.32", warnings=(NO_AVX2,), clock_skew_seconds=-73.2, draining=True)
OLD = node("hilde", dataclasses.replace(FACTS, os=OsRelease("debian", (), "11", "Debian GNU/Linux 11 (bullseye)"),
                                        libc="glibc 2.31"), address="10.0.0.33",
           engines=(engine(EnginePhase.FAILED, "libstdc++.so.6 is too old (needs GLIBCXX_3.4.30); libc.so.6 is too old "
                           "(needs GLIBC_2.34); tried again in 4 minutes",
                           hint="use Debian 12 or newer, or bring an own binary in agent.yaml"),))
ARM = node("ida", ARM_FACTS, address="10.0.0.40",
           engines=(engine(source="operator", message="/opt/llama/llama-server"),))
NEW = node("jakob", NodeFacts(), engines=(), probed=False, seen_seconds_ago=0.3, address="10.0.0.41")
HOSTILE = node(HOSTILE_NAME, dataclasses.replace(FACTS, cpu_model="<img src=x onerror=window.pwned=3>"),
               engines=(engine(EnginePhase.FAILED, HOSTILE_OUTPUT, hint="<b onclick=alert(1)>run this</b>"),),
               labels={"<i>": "javascript:alert(1)"}, warnings=("\u202egnp.exe is <u>odd</u>",), address="::1")
TROUBLED = (WITH_GPUS, NO_DEVICE, SILENT, SLOW, OLD, ARM, NEW)


def shard(replica, where, state, message="", *, gpus=(), **more):
    return ShardView(0, where, tuple(GpuSlot(f"GPU-{index:08d}", index) for index in gpus),
                     ShardObserved(f"{replica}.0", state, message=message, **more))


def replica(id, model, where, state, message="", *, engine_name="llama.cpp", version=BUILD, gauges=None, wish="run",
            age=7500.0, **more):
    return ReplicaView(id, model, engine_name, version, wish, state.value, "", message, time.time() - age,
                       (shard(id, where, state, message, **more),), gauges)


def replicas():
    return (
        replica("gemma-3-270m-1f4c", "gemma-3-270m", "anna", ShardState.READY,
                gauges=Gauges(running=3, waiting=0, generated_tokens=91234, in_flight=3)),
        replica("gemma-3-270m-9e02", "gemma-3-270m", "frieda", ShardState.READY, gauges=Gauges()),
        replica("llama-3.3-70b-77aa", "llama-3.3-70b", "dora", ShardState.FETCHING,
                "fetching model-00014-of-00030.safetensors: 61.0 of 141.1 GB, 43 %", gpus=(0, 1, 2, 3), age=310,
                engine_name="vllm", version="0.30.0"),
        replica("embed-0b1d", "nomic-embed", "anna", ShardState.CRASHLOOP,
                "llama-server ended with code 1 four times: error loading model: missing tensor 'token_embd.weight'; "
                "tried again in 3 minutes", restarts=4, age=900, first_failure=FirstFailure(
                    time.time() - 800, "llama-server ended with code 1",
                    "llama-server --model nomic-embed.gguf --host 127.0.0.1 --port 7903 --ctx-size 8192 --embeddings",
                    HOSTILE_OUTPUT + "\nllama_model_load: error loading model: missing tensor 'token_embd.weight'\n"
                    "srv    load_model: failed to load model, 'nomic-embed.gguf'")),
        replica("gemma-3-270m-0042", "gemma-3-270m", "gustav", ShardState.READY, wish="drain",
                gauges=Gauges(running=1, waiting=2, kv_used=0.37, in_flight=3), age=200000))


def models():
    return (
        ModelView("gemma-3-270m", "llama.cpp", BUILD, "chat", "mirror:gemma-3-270m", 2, 2, ("small", "gpt-4o-mini"),
                  ("gemma-3-270m-1f4c", "gemma-3-270m-9e02"), (), 8192, 253 << 20),
        ModelView("llama-3.3-70b", "vllm", "0.30.0", "chat", "hf:meta-llama/Llama-3.3-70B-Instruct", 2, 0, ("large",),
                  ("llama-3.3-70b-77aa",),
                  ("anna: it has no GPU", f"bert: llama.cpp {BUILD}: {MISSING} (try: {MISSING_HINT})",
                   "emil: vllm 0.30.0: needs an NVIDIA driver >= 580, this node has 550.54.15",
                   "frieda: no heartbeat for 48 s"), 131072, 141 * GB),
        ModelView("nomic-embed", "llama.cpp", BUILD, "embed", "mirror:nomic-embed-text-v1.5", 1, 0, (), ("embed-0b1d",),
                  ("weights mirror:nomic-embed-text-v1.5 are not in the mirror (llmgw.pyz ctl mirror import FILE --name "
                   "nomic-embed-text-v1.5)",), 2048, 146_000_000),
        ModelView("parked", "llama.cpp", BUILD, "chat", "file:/srv/models/parked.gguf", 0, 0, (), (), (), None, None))


def engines(nodes):
    asset = Asset(ARCHIVE, 16_000_000, "a" * 64)
    seen = {name: tuple((one.name, item) for one in nodes for item in one.engines if item.name == name)
            for name in ("llama.cpp", "vllm")}
    return (EngineView("llama.cpp", BUILD, (asset,) * 12, "", seen["llama.cpp"]),
            EngineView("vllm", "0.30.0", (), "no list of files: github.com answered 403, asked again at 14:05",
                       seen["vllm"]))


def events():
    said = (
        ("server", "Started", "the control plane started with 3 models and 2 engines"),
        ("node/anna", "Joined", "anna joined from 10.0.0.7"), ("node/bert", "Joined", "bert joined from 10.0.0.8"),
        ("engine/llama.cpp", "Installed", f"llama.cpp {BUILD} runs on anna"),
        ("node/bert", "EngineMissing", f"llama.cpp {BUILD}: {MISSING}"),
        ("replica/gemma-3-270m-1f4c", "Placed", "gemma-3-270m goes to anna: it holds the weights"),
        ("replica/gemma-3-270m-1f4c", "Ready", "gemma-3-270m answers on anna"),
        (f"node/{HOSTILE_NAME}", "Joined", f"{HOSTILE_NAME} joined from ::1"),
        ("node/frieda", "Unreachable", "no heartbeat for 30 s; its replicas leave routing unless a router hears them"),
        ("config", "Refused", "server.yaml line 14: models[1].engin: unknown key, known: aliases, args, engine; "
                              "the old configuration stays"))
    start = time.time() - 60 * len(said)
    return tuple(EventView(number, start + 60 * number, *event) for number, event in enumerate(said, 1))


def whole(nodes):
    """Return the views of a cluster with these nodes."""
    return {"nodes": tuple(nodes), "models": models(), "replicas": replicas(), "engines": engines(nodes),
            "events": events()}


def many(count):
    """Return that many nodes that are mostly well."""
    return tuple(node(f"rack{number // 10}-node{number:02d}", GPU_FACTS if number % 3 == 0 else FACTS,
                      LACKING.engines if number == 7 else (engine(),), address=f"10.0.1.{number}")
                 for number in range(1, count + 1))
