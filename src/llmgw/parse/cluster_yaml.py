"""server.yaml: bytes -> ClusterConfig, or a ConfigError with file, line and key.

docs/configuration.md explains the keys; a test keeps it, the sample and this file together.
"""
from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, replace
from typing import Callable, Dict, FrozenSet, List, Mapping, Optional, Tuple

from llmgw.domain.cluster import ClusterConfig
from llmgw.domain.engine import (
    DEFAULT_VERSIONS,
    ENGINES,
    LLAMA_CPP,
    OLDEST_UV,
    PYTHON,
    PYTHON_ENGINES,
    SGLANG,
    TOOL_VERSIONS,
    TRTLLM,
    UV,
    VLLM,
    EngineWanted,
    Tool,
)
from llmgw.domain.errors import LlmgwError
from llmgw.domain.model import ModelSpec, Task
from llmgw.parse import address, utc, weights_source
from llmgw.parse.engine_version import MIN_LLAMA_BUILD
from llmgw.parse.yaml_fields import Value, need
from llmgw.parse.yaml_subset import MapNode, load

KEYS = ("cluster", "listen", "names", "tls", "store", "engines", "models", "fabric", "mirror")
MIRROR_KEYS = ("megabytes_per_second",)
TLS_KEYS = ("certificate", "key", "ca")
ENGINE_KEYS = ("version", "cpu", "cuda", "launch_mode", "as_of", "allow_insecure", *TOOL_VERSIONS)
MODEL_KEYS = ("name", "aliases", "engine", "weights", "replicas", "task", "context_length", "parallel",
              "gpus", "nodes", "placement", "chat_template", "args", "trust_remote_code", "launch_mode",
              "fabric", "gpu_layers")
PLACEMENT_KEYS = ("labels", "nodes")
LATER = {"control_planes": "several control planes are not supported yet"}
OVER_NODES = (VLLM, SGLANG)       # the engines that one replica can run over several nodes

MAX_TEMPLATE_BYTES = 1 << 20
# Older ones let requests in without a key (GHSA-94f4-hr76-p5j6), or run what they are sent (CVE-2026-3059, -3060).
# TensorRT-LLM before 0.18.2 runs what its own socket is sent (CVE-2025-23254, NVIDIA security bulletin 5648 of April
# 2025; "addresses known security issues", NVIDIA/TensorRT-LLM#3611, which put an HMAC before the pickle, #3384).
MIN_VERSIONS = {VLLM: "0.22.0", SGLANG: "0.5.10", TRTLLM: "0.18.2"}
# How many requests a replica runs at once where nobody says it: these engines share their memory among all.
PARALLEL = {VLLM: 256, SGLANG: 256, TRTLLM: 256}
# Refused whatever an engine says of itself: they open the node, or are llmgw's own to set.
ALWAYS_RESERVED = frozenset(("--host", "--port", "--api-key", "--api-key-file", "--ssl-*", "--middleware",
                             "--trust-remote-code", "--allowed-local-media-path", "--slot-save-path", "--rpc"))
_ON_PURPOSE = ", or say allow_insecure: true beside it"
_PYTHON_VERSION = re.compile(r"[0-9]{1,5}(\.[0-9]{1,5}){1,3}((a|b|rc)[0-9]{1,3})?(\.post[0-9]{1,3})?")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")


def decode(data: bytes, name: str, read_file: Callable[[str], bytes],
           reserved_flags: Mapping[str, FrozenSet[str]]) -> ClusterConfig:
    """Return what server.yaml says.

    ``read_file`` gives the bytes of a file that the configuration names, or raises an LlmgwError;
    ``reserved_flags`` has each engine's flags that ``args:`` may not hold (``--x-*``: all that start so).
    """
    whole = Value(load(data, name), name, "")
    fields = whole.fields(KEYS, LATER)
    _check_store(fields)
    host, port = _listen(fields)
    engines = _engines(fields["engines"]) if "engines" in fields else _default_engines()
    warnings = [f"engine {engine.name}: allow_insecure is set: versions with known holes are run"
                for engine in engines if engine.allow_insecure]
    wanted = frozenset(engine.name for engine in engines)
    shared = _Shared(_network(fields["fabric"]) if "fabric" in fields else "", _launch_modes(fields))
    models = tuple(_model(value, read_file, reserved_flags, wanted, shared, warnings)
                   for value in (fields["models"].items() if "models" in fields else ()))
    engines = tuple(replace(engine, with_ray=_has_ray(engine.name, shared, models)) for engine in engines)
    if "models" in fields:
        _check_distinct(fields["models"], models)
    cluster = fields["cluster"].name_text() if "cluster" in fields else ClusterConfig.cluster
    certificate, key, ca = _tls(fields)
    return ClusterConfig(cluster, host, port, engines, models, tuple(warnings),
                         fields["names"].distinct(lambda item: item.checked(address.host)) if "names" in fields else (),
                         certificate, key, ca, mirror_bytes_per_second=_mirror_speed(fields))


def _mirror_speed(fields: Mapping[str, Value]) -> int:
    """Return how many bytes a second all nodes together may get of the mirror; 0: as many as they can."""
    inner = fields["mirror"].fields(MIRROR_KEYS, {}) if "mirror" in fields else {}
    return _whole(inner, "megabytes_per_second", 1, 1_000_000, 0) * 1_000_000


def _tls(fields: Mapping[str, Value]) -> Tuple[str, str, str]:
    """Return the operator's own files (certificate, key, ca), all empty where there are none."""
    if "tls" not in fields:
        return "", "", ""
    inner = fields["tls"].fields(TLS_KEYS, {})
    certificate, key = (need(inner, name, fields["tls"]).checked(address.absolute_path)
                        for name in ("certificate", "key"))
    return certificate, key, inner["ca"].checked(address.absolute_path) if "ca" in inner else ""


@dataclass(frozen=True)
class _Shared:
    """What models have from the rest of the file where they do not say it themselves."""

    fabric: str
    launch_modes: Mapping[str, str]


def _launch_modes(fields: Mapping[str, Value]) -> Mapping[str, str]:
    engines = fields["engines"].members() if "engines" in fields else {}
    return {name: _launch_mode(whole.members(), name, "mp") for name, whole in engines.items()}


def _has_ray(engine: str, shared: _Shared, models: Tuple[ModelSpec, ...]) -> bool:
    """Say whether Ray belongs to the packages of an engine."""
    return shared.launch_modes.get(engine) == "ray" or any(
        model.engine == engine and model.nodes > 1 and model.launch_mode == "ray" for model in models)


def _check_store(fields: Mapping[str, Value]) -> None:
    if "store" not in fields:
        return
    value = fields["store"]
    if isinstance(value.node, MapNode):
        value.fields(("etcd",), {"etcd": "etcd is not supported yet: write store: sqlite"})
    if value.choice(("sqlite", "etcd")) == "etcd":
        value.fail("etcd is not supported yet", "write store: sqlite")


def _listen(fields: Mapping[str, Value]) -> Tuple[str, int]:
    if "listen" not in fields:
        return ClusterConfig.host, ClusterConfig.port
    return fields["listen"].checked(address.host_port)


def _default_engines() -> Tuple[EngineWanted, ...]:
    return tuple(EngineWanted(name, version) for name, version in DEFAULT_VERSIONS.items())


def _engines(whole: Value) -> Tuple[EngineWanted, ...]:
    members = whole.fields(ENGINES, {})
    return tuple(_engine(name, value) for name, value in members.items())


def _engine(name: str, whole: Value) -> EngineWanted:
    fields = whole.fields(ENGINE_KEYS, {})
    if "version" not in fields and name not in DEFAULT_VERSIONS:
        need(fields, "version", whole)
    insecure = fields["allow_insecure"].flag() if "allow_insecure" in fields else False
    version = _version(name, fields["version"], insecure) if "version" in fields else DEFAULT_VERSIONS[name]
    _launch_mode(fields, name, "mp")
    for key in ("as_of", *TOOL_VERSIONS):
        if key in fields and name not in PYTHON_ENGINES:
            fields[key].fail(f"{name} is not made of Python packages")
    if "cpu" in fields and name != LLAMA_CPP:
        fields["cpu"].fail("only llama.cpp has a CPU build of its own")
    return EngineWanted(name, version, cpu=fields["cpu"].flag() if "cpu" in fields else False,
                        cuda=_cuda(name, fields["cuda"]) if "cuda" in fields else "",
                        allow_insecure=insecure, as_of=fields["as_of"].checked(utc.normal) if "as_of" in fields else "",
                        tools=tuple(Tool(tool, _tool_version(tool, fields[tool]))
                                    for tool in TOOL_VERSIONS if tool in fields))


def _tool_version(tool: str, value: Value) -> str:
    text = value.text()
    if tool == PYTHON and not re.fullmatch(r"3\.12\.[0-9]{1,3}\+[0-9]{8}", text):
        value.fail(f"not a build of Python 3.12: {text!r:.60}", f"write patch and date, like {TOOL_VERSIONS[PYTHON]}")
    if tool == UV and not re.fullmatch(r"[0-9]{1,4}\.[0-9]{1,4}\.[0-9]{1,4}", text):
        value.fail(f"not a version of uv: {text!r:.60}", f"write it like {TOOL_VERSIONS[UV]}")
    if tool == UV and _numbers(text) < _numbers(OLDEST_UV):
        value.fail(f"uv {text} is too old", f"use {OLDEST_UV} or newer")
    return text


def _cuda(engine: str, value: Value) -> str:
    if engine != LLAMA_CPP:
        value.fail("only llama.cpp has several builds for CUDA")
    text = value.text()
    if not re.fullmatch(r"[0-9]{1,3}\.[0-9]{1,3}", text):
        value.fail(f"not a version of CUDA: {text!r:.60}", "write it like 12.8")
    return text


def _version(engine: str, value: Value, insecure: bool) -> str:
    version = value.text()
    if not _VERSION.fullmatch(version):
        value.fail(f"not a version: {version!r:.60}")
    if engine in MIN_VERSIONS:
        if not _PYTHON_VERSION.fullmatch(version):
            value.fail(f"not a release of {engine}: {version!r:.60}", f"write it like {MIN_VERSIONS[engine]}")
        if _numbers(version) < _numbers(MIN_VERSIONS[engine]) and not insecure:
            value.fail(f"{engine} {version} has known holes", f"use {MIN_VERSIONS[engine]} or newer{_ON_PURPOSE}")
    if engine != LLAMA_CPP:
        return version
    if not re.fullmatch(r"b[0-9]{1,9}", version):
        value.fail(f"not a build of llama.cpp: {version!r:.60}", "write its build tag, like b10991")
    if int(version[1:]) < MIN_LLAMA_BUILD and not insecure:
        value.fail(f"{version} has known holes in its GGUF reader", f"use b{MIN_LLAMA_BUILD} or newer{_ON_PURPOSE}")
    return version


def _numbers(version: str) -> Tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"[0-9]+", version)[:3])


def _launch_mode(fields: Mapping[str, Value], engine: str, default: str) -> str:
    """Return how the programs on several nodes find each other."""
    if "launch_mode" not in fields:
        return default
    mode = fields["launch_mode"].choice(("mp", "ray"))
    if mode == "ray" and engine != VLLM:
        fields["launch_mode"].fail(f"{engine} is not started by Ray", "write launch_mode: mp, or leave it out")
    return mode


def _network(value: Value) -> str:
    """Return the network that nodes of one replica may use among each other."""
    text = value.text()
    try:
        return str(ipaddress.ip_network(text))
    except ValueError:
        value.fail(f"not a network: {text!r:.60}", "write it like 10.1.0.0/16")


def _model(whole: Value, read_file: Callable[[str], bytes], reserved: Mapping[str, FrozenSet[str]],
           wanted: FrozenSet[str], shared: "_Shared", warnings: List[str]) -> ModelSpec:
    fields = whole.fields(MODEL_KEYS, {})
    name = need(fields, "name", whole).name_text()
    engine = need(fields, "engine", whole).choice(ENGINES)
    if engine not in wanted:
        fields["engine"].fail(f"{engine} is not under engines:",
                              f"add '{engine}: {{version: ...}}' to engines:")
    if engine == TRTLLM and "/" in name:
        fields["name"].fail("trtllm names its model by a folder: no / in it",
                            "give it another name, and this one under aliases:")
    fabric = _network(fields["fabric"]) if "fabric" in fields else shared.fabric
    placement = fields["placement"].fields(PLACEMENT_KEYS, {}) if "placement" in fields else {}
    trust = fields["trust_remote_code"].flag() if "trust_remote_code" in fields else False
    if trust and engine == LLAMA_CPP:
        warnings.append(f"model {name}: trust_remote_code means nothing to llama.cpp")
    return ModelSpec(
        name=name, engine=engine,
        weights=need(fields, "weights", whole).checked(weights_source.check),
        aliases=fields["aliases"].distinct(Value.name_text) if "aliases" in fields else (),
        replicas=_whole(fields, "replicas", 0, 1000, 1), task=_task(fields),
        context_length=fields["context_length"].whole(16, 1 << 27) if "context_length" in fields else None,
        parallel=_whole(fields, "parallel", 1, 1024, PARALLEL.get(engine, 1)),
        gpus=fields["gpus"].whole(0, 64) if "gpus" in fields else None,
        nodes=_nodes(fields, name, engine, fabric, warnings), fabric=fabric,
        launch_mode=_launch_mode(fields, engine, shared.launch_modes.get(engine, "mp")),
        gpu_layers=_gpu_layers(fields, engine), chat_template=_template(fields, read_file),
        labels=placement["labels"].names() if "labels" in placement else {},
        only_nodes=placement["nodes"].distinct(Value.name_text) if "nodes" in placement else (),
        args=_args(fields, engine, reserved.get(engine, frozenset())), trust_remote_code=trust)


def _gpu_layers(fields: Mapping[str, Value], engine: str) -> Optional[int]:
    """Return how many layers lie on the GPU, where not all of them shall."""
    if "gpu_layers" not in fields:
        return None
    if engine != LLAMA_CPP:
        fields["gpu_layers"].fail("only llama.cpp puts a part of a model on the GPU", "leave it out")
    return fields["gpu_layers"].whole(1, 10_000)


def _whole(fields: Mapping[str, Value], key: str, low: int, high: int, default: int) -> int:
    return fields[key].whole(low, high) if key in fields else default


def _task(fields: Mapping[str, Value]) -> Task:
    task = Task(fields["task"].choice([item.value for item in Task])) if "task" in fields else Task.CHAT
    if task is Task.RERANK:
        fields["task"].fail("task rerank is not supported yet")
    return task


def _nodes(fields: Mapping[str, Value], name: str, engine: str, fabric: str, warnings: List[str]) -> int:
    nodes = _whole(fields, "nodes", 1, 1024, 1)
    if nodes > 1 and engine not in OVER_NODES:
        fields["nodes"].fail(f"{engine} runs on one node", "leave nodes: out")
    if nodes > 1 and not fabric:
        fields["nodes"].fail("a replica over several nodes needs the network they may use among each other",
                             "write fabric: 10.1.0.0/16; what they say to each other is not encrypted")
    if nodes > 1:
        warnings.append(f"model {name}: what its nodes say to each other over {fabric} is not encrypted, and asks for "
                        "no key; rank 0 is met on every address of its node: let nobody else in there")
    return nodes


def _template(fields: Mapping[str, Value], read_file: Callable[[str], bytes]) -> str:
    if "chat_template" not in fields:
        return ""
    value = fields["chat_template"]
    path = value.text()
    try:
        data = read_file(path)
    except (LlmgwError, OSError) as error:
        value.fail(f"cannot read the chat template: {error}", "name a file beside server.yaml")
    if not data.strip() or len(data) > MAX_TEMPLATE_BYTES:
        value.fail(f"{path!r:.100} has {len(data)} bytes; a chat template has 1 to {MAX_TEMPLATE_BYTES}")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        value.fail(f"{path!r:.100} is not UTF-8")


def _args(fields: Mapping[str, Value], engine: str, reserved: FrozenSet[str]) -> Tuple[str, ...]:
    if "args" not in fields:
        return ()
    return fields["args"].each(lambda item: _arg(item, engine, reserved | ALWAYS_RESERVED))


def _arg(item: Value, engine: str, reserved: FrozenSet[str]) -> str:
    text = item.text()
    if not text.startswith("-"):
        return text
    flag = text.split("=", 1)[0]
    if " " in flag:
        item.fail("a flag and its value are two items", "write [--flag, value]")
    if is_reserved(flag, engine, reserved):
        hint = ("write trust_remote_code: true" if "trust" in flag else
                "remove it; what a person may choose has a key of its own, see docs/configuration.md")
        item.fail(f"{flag:.60} is set by llmgw, or would open the node", hint)
    return text


def is_reserved(flag: str, engine: str, reserved: FrozenSet[str]) -> bool:
    """Whether ``flag`` is one of ``reserved`` in any spelling that the engine would take for it."""
    plain = flag.replace("_", "-")
    if f"!{plain}" in reserved:       # a flag of its own, although a reserved one starts like it
        return False
    for known in reserved:
        if plain == known or (known.endswith("*") and plain.startswith(known[:-1])):
            return True
        # argparse takes any unambiguous beginning of a long flag; llama.cpp does not
        if engine != LLAMA_CPP and len(plain) > 2 and plain.startswith("--") and known.startswith(plain):
            return True
    return False


def _check_distinct(whole: Value, models: Tuple[ModelSpec, ...]) -> None:
    seen: Dict[str, str] = {}
    for item, model in zip(whole.items(), models):
        members = item.members()
        for name, value in [(model.name, members["name"]),
                            *((alias, members["aliases"]) for alias in model.aliases)]:
            if name in seen:
                value.fail(f"{name} is the name of {seen[name]} already", "names and aliases are unique")
            seen[name] = item.key
