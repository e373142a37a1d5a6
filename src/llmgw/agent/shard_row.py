"""What is written down of a shard before and after its program is started."""
from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from typing import List, Optional, Set, Tuple

from llmgw.api import wire
from llmgw.domain.codec import Record, flag, optional, text, tuple_of, whole
from llmgw.domain.errors import LlmgwError
from llmgw.domain.replica import FirstFailure
from llmgw.system import files, proc, spawn

ROW = "state.json"
MARKER = "LLMGW_MARK"             # =the shard's folder.INCARNATION: another agent may have a shard of this name
SHARD = "LLMGW_SHARD"             # =ID.INCARNATION
OWNER = "LLMGW_DATA_DIR_MARK"     # =the agent's data folder
PORT = "LLMGW_SHARD_PORT"


@dataclass(frozen=True)
class ShardRow:
    """``identity`` None with an incarnation: it was about to be started."""

    id: str
    incarnation: int = 0
    port: Optional[int] = None
    identity: Optional[spawn.Identity] = None
    ready: bool = False           # this incarnation was proven
    restarts: int = 0
    first_failure: Optional[FirstFailure] = None
    turn: int = 0                 # of its gang, in which it was started last
    meet_port: int = 0            # where the other ranks meet it
    sidecars: Tuple[spawn.Identity, ...] = ()
    program: str = ""             # of the engine that was started last
    inner_ports: Tuple[int, ...] = ()     # for what its programs say to each other

    @property
    def ports(self) -> Tuple[int, ...]:
        """All that it holds."""
        return ((self.port,) if self.port else ()) + self.inner

    @property
    def inner(self) -> Tuple[int, ...]:
        """Those on which its programs, and those of other nodes, speak to each other."""
        return ((self.meet_port,) if self.meet_port else ()) + self.inner_ports

    def marker(self, folder: str) -> spawn.Marker:
        return (MARKER, f"{folder}.{self.incarnation}")


_IDENTITY = Record(spawn.Identity, boot_id=text, pid=whole, start=whole, marker_name=text, marker_value=text)
_ROW = Record(ShardRow, id=text, incarnation=whole, port=optional(whole), identity=optional(_IDENTITY),
              ready=flag, restarts=whole, first_failure=optional(wire.FIRST_FAILURE),
              turn=whole, meet_port=whole, sidecars=tuple_of(_IDENTITY), program=text, inner_ports=tuple_of(whole))


def write(folder: str, row: ShardRow) -> None:
    """Store the row; what is started afterwards can be found by it."""
    files.write_json(os.path.join(folder, ROW), _ROW.encode(row))


def read(folder: str, shard_id: str) -> ShardRow:
    """Return the row; an absent or unreadable one is made anew from what runs (F21)."""
    try:
        data = files.read_bytes(os.path.join(folder, ROW))
        if data:
            return _ROW.decode(json.loads(data))
    except (ValueError, LlmgwError):
        pass
    return from_proc(folder, shard_id)


def last_command(folder: str) -> str:
    """Return the command that was written down last, without secrets."""
    return (files.read_bytes(os.path.join(folder, "command")) or b"").decode("utf-8", "replace").strip()


def from_proc(folder: str, shard_id: str) -> ShardRow:
    """Return the row of a shard as the environments of running programs tell it."""
    best = ShardRow(shard_id)
    for pid in proc.pids():
        environment = proc.environ(pid)
        name, _, incarnation = environment.get(MARKER, "").rpartition(".")
        if name != folder or not incarnation.isdigit() or int(incarnation) < best.incarnation:
            continue
        port = environment.get(PORT, "")
        best = dataclasses.replace(best, incarnation=int(incarnation), port=int(port) if port.isdigit() else None)
    return best


def strangers(data_dir: str, folders: Set[str]) -> List[spawn.Marker]:
    """Return the markers of this agent's running programs whose shard has none of ``folders``."""
    found = set()
    for process in proc.marked(OWNER, data_dir):
        value = proc.environ(process.pid).get(MARKER, "")
        if value and value.rpartition(".")[0] not in folders:
            found.add((MARKER, value))
    return sorted(found)
