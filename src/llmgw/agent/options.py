"""The agent's command line: flags, or agent.yaml."""
from __future__ import annotations

import argparse
import dataclasses
import os
import platform
from dataclasses import dataclass
from typing import List, Optional

from llmgw.api import joining
from llmgw.domain.cluster import AgentConfig
from llmgw.domain.errors import ConfigError
from llmgw.domain.join import JoinString
from llmgw.domain.names import check_name
from llmgw.domain.secret import Secret
from llmgw.parse import agent_yaml
from llmgw.system import data_dir, files


@dataclass(frozen=True)
class Options:
    """``owned``: engines and gate end with this agent, because ``up`` started it."""

    config: AgentConfig
    token: Secret             # empty: there is none, the node joins or has joined
    owned: bool = False
    join: Optional[JoinString] = None
    ca_pem: str = ""          # that the control plane's certificate comes from


def parse(argv: List[str]) -> Options:
    """Return the options; flags win over the file."""
    args = _parser().parse_args(argv)
    config = _from_file(args.config) if args.config else AgentConfig()
    flags = {"servers": tuple(args.server or ()), "token_file": args.token_file, "node": args.node,
             "data_dir": args.data_dir, "address": args.address, "gate_port": args.gate_port,
             "engine_ports": args.engine_ports,
             "engine_user": args.engine_user or config.engine_user or os.environ.get("LLMGW_ENGINE_USER", "")}
    config = dataclasses.replace(config, **{key: value for key, value in flags.items() if value})
    config = dataclasses.replace(
        config, node=check_name(config.node or platform.node() or "node", "node name"),
        data_dir=data_dir.role_dir("agent", config.data_dir))
    return Options(config, _token(config.token_file), args.owned, joining.given(args.join_file), _ca(args.ca_file))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="llmgw.pyz agent", description="the node daemon (Linux only)")
    parser.add_argument("--config", help="agent.yaml")
    parser.add_argument("--server", action="append", metavar="URL", help="a control plane; may be repeated")
    parser.add_argument("--token-file", metavar="F", help="holds the node's token")
    parser.add_argument("--join-file", default="", metavar="F", help="holds a join string (or LLMGW_JOIN)")
    parser.add_argument("--ca-file", default="", metavar="F", help="the control plane's CA, where it did not join")
    parser.add_argument("--node", metavar="NAME", help="this node's name (default: the host name)")
    parser.add_argument("--data-dir", metavar="D", help="where engines, weights and state lie")
    parser.add_argument("--address", metavar="HOST", help="where routers reach this node (default: 127.0.0.1)")
    parser.add_argument("--gate-port", type=int, metavar="N", help="port of the gate (default: 7802)")
    parser.add_argument("--engine-ports", type=int, metavar="N",
                        help="first of the 100 loopback ports for engines (default: 7900)")
    parser.add_argument("--engine-user", metavar="NAME",
                        help="whom engines run as when the agent is root (default: llmgw-engine); root: as root")
    parser.add_argument("--owned", action="store_true", help="end engines and gate when the agent is stopped")
    return parser


def _from_file(path: str) -> AgentConfig:
    data = files.read_bytes(path, limit=1 << 20)
    if data is None:
        raise ConfigError(f"{path}: no such file")
    return agent_yaml.decode(data, os.path.basename(path))


def _ca(path: str) -> str:
    if not path:
        return ""
    data = files.read_bytes(path, limit=1 << 20)
    if data is None:
        raise ConfigError(f"{path}: no such file", hint="it holds the control plane's CA, as PEM")
    return data.decode("ascii", "replace")


def _token(path: str) -> Secret:
    """Return the token in the file or in LLMGW_TOKEN; never from the command line, where others can read it."""
    named = os.environ.pop("LLMGW_TOKEN", "")
    if named and not path:
        return Secret(named.strip())
    if not path:
        return Secret("")
    data = files.read_bytes(path, limit=4096)
    if data is None:
        raise ConfigError(f"{path}: no such file", hint="copy the node token of the server here")
    text = data.decode("ascii", "replace").strip()
    if not text or len(text.split()) != 1:
        raise ConfigError(f"{path}: does not hold one token")
    return Secret(text)
