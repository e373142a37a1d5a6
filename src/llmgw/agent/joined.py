"""Who this node is to the control plane: a credential of its own from joining, or the token that it was given."""
from __future__ import annotations

import dataclasses
import hashlib
from typing import Callable, Optional, Tuple
from urllib.parse import urlsplit

from llmgw.agent.layout import Layout
from llmgw.agent.options import Options
from llmgw.api import joining
from llmgw.api.joining import Credential
from llmgw.domain.cluster import AgentConfig
from llmgw.domain.errors import LlmgwError, UsageError
from llmgw.domain.join import JoinRequest
from llmgw.system import addresses, files

_MACHINE_ID = "/etc/machine-id"


def resolve(chosen: Options, stop: Callable[[], bool]) -> Tuple[Options, Optional[Credential]]:
    """Return the options with the name, token and address that this node has in the cluster."""
    config = chosen.config
    held = joining.credential(Layout(config.data_dir).credential, "node", config.servers, chosen.join,
                              JoinRequest(config.node, _machine()), stop)
    servers = config.servers or (held.servers if held is not None else ())
    if not servers:
        raise UsageError("the agent needs a control plane", hint="give its address with --server URL")
    if held is None:
        if not chosen.token:
            raise UsageError("the agent needs its token",
                             hint="give the file that holds it with --token-file F, or a join string in LLMGW_JOIN")
        return dataclasses.replace(chosen, config=dataclasses.replace(config, servers=servers)), None
    config = dataclasses.replace(config, servers=servers, node=held.name, address=_address(config, servers[0]))
    return dataclasses.replace(chosen, config=config, token=held.token, ca_pem=held.server_ca), held


def _address(config: AgentConfig, server: str) -> str:
    """Return where routers reach this node: what was named, else where its way to the control plane begins."""
    if config.address != AgentConfig.address:
        return config.address
    parts = urlsplit(server)
    return addresses.towards(parts.hostname or "", parts.port or 443) or config.address


def _machine() -> str:
    """Return what tells this machine from others, without telling its id; empty where it has none."""
    try:
        found = files.read_bytes(_MACHINE_ID, 4096)
    except LlmgwError:
        found = None
    return hashlib.sha256(b"llmgw " + found.strip()).hexdigest() if found else ""
