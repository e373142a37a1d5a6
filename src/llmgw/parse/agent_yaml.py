"""agent.yaml: bytes -> AgentConfig, or a ConfigError with file, line and key."""
from __future__ import annotations

import re
from typing import Dict, List, Mapping, Optional, Tuple

from llmgw.domain.cluster import AgentConfig, OperatorEngine
from llmgw.domain.engine import LLAMA_CPP, SGLANG, TRTLLM, VLLM
from llmgw.domain.errors import ParseError
from llmgw.parse import address
from llmgw.parse.yaml_fields import Value, need
from llmgw.parse.yaml_subset import Scalar, load

KEYS = ("server", "token_file", "node", "data_dir", "address", "fabric_address", "gate_port", "engine_ports",
        "labels", "gpus", "install_packages", "engine_user", "http_proxy", "package_index", "engines")
GPU_KEYS = ("exclude",)
PROGRAM_KEYS = {LLAMA_CPP: "binary", VLLM: "python", SGLANG: "python", TRTLLM: "python"}


def decode(data: bytes, name: str) -> AgentConfig:
    """Return what agent.yaml says; a key that is absent has the default of AgentConfig."""
    whole = Value(load(data, name), name, "")
    fields = whole.fields(KEYS, {})
    default = AgentConfig()
    return AgentConfig(
        servers=_servers(fields),
        node=fields["node"].name_text() if "node" in fields else default.node,
        data_dir=_path(fields, "data_dir", default.data_dir),
        address=_host(fields, "address", default.address),
        fabric_address=_host(fields, "fabric_address", default.fabric_address),
        gate_port=_port(fields, "gate_port", default.gate_port, 65535),
        engine_ports=_port(fields, "engine_ports", default.engine_ports, 65000),
        labels=fields["labels"].names() if "labels" in fields else {},
        exclude_gpus=_excluded(fields),
        install_packages=(fields["install_packages"].flag() if "install_packages" in fields
                          else default.install_packages),
        engine_user=fields["engine_user"].checked(_user) if "engine_user" in fields else default.engine_user,
        operator_engines=_programs(fields), cpu_engines=_cpu(fields),
        token_file=_path(fields, "token_file", default.token_file), http_proxy=_proxy(fields),
        package_index=fields["package_index"].checked(_index) if "package_index" in fields else None)


def _servers(fields: Mapping[str, Value]) -> Tuple[str, ...]:
    if "server" not in fields:
        return ()
    value = fields["server"]
    if isinstance(value.node, Scalar):
        return (value.checked(address.server_url),)
    found = value.distinct(lambda item: item.checked(address.server_url))
    if not found:
        value.fail("names no control plane", "write server: [https://HOST:PORT]")
    return found


def _path(fields: Mapping[str, Value], key: str, default: str) -> str:
    return fields[key].checked(_absolute) if key in fields else default


def _absolute(text: str) -> str:
    if not text.startswith("/"):
        raise ParseError(f"expected an absolute path, got {text!r:.100}")
    return text


def _host(fields: Mapping[str, Value], key: str, default: str) -> str:
    return fields[key].checked(address.host) if key in fields else default


def _port(fields: Mapping[str, Value], key: str, default: int, high: int) -> int:
    return fields[key].whole(1, high) if key in fields else default


def _proxy(fields: Mapping[str, Value]) -> Optional[str]:
    return fields["http_proxy"].checked(address.server_url) if "http_proxy" in fields else None


def _index(text: str) -> str:
    if not re.fullmatch(r"https?://[!-~]{1,500}", text):
        raise ParseError("expected the address of a package index", hint="write https://HOST/simple")
    return text


def _user(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}", text):
        raise ParseError("expected the name of a user of this machine", hint="write llmgw-engine, or root")
    return text


def _excluded(fields: Mapping[str, Value]) -> Tuple[int, ...]:
    if "gpus" not in fields:
        return ()
    inner = fields["gpus"].fields(GPU_KEYS, {})
    if "exclude" not in inner:
        return ()
    return inner["exclude"].distinct(lambda item: item.whole(0, 1023))


def _programs(fields: Mapping[str, Value]) -> Tuple[OperatorEngine, ...]:
    return tuple(OperatorEngine(engine, need(inner, PROGRAM_KEYS[engine], whole).checked(_absolute))
                 for engine, whole, inner in _engines(fields) if "cpu" not in inner)


def _cpu(fields: Mapping[str, Value]) -> Tuple[str, ...]:
    return tuple(engine for engine, _, inner in _engines(fields) if "cpu" in inner and inner["cpu"].flag())


def _engines(fields: Mapping[str, Value]) -> List[Tuple[str, Value, Dict[str, Value]]]:
    """Return (engine, all of it, its keys): a program of the operator's own, or the CPU build on purpose."""
    if "engines" not in fields:
        return []
    found = []
    for engine, whole in fields["engines"].fields(tuple(PROGRAM_KEYS), {}).items():
        keys = (PROGRAM_KEYS[engine], "cpu") if engine == LLAMA_CPP else (PROGRAM_KEYS[engine],)
        inner = whole.fields(keys, {})
        if len(inner) > 1:
            inner["cpu"].fail("names a build of the release, and binary: one of your own", "keep one of them")
        found.append((engine, whole, inner))
    return found
