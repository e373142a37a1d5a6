"""What /proc says of running programs. Linux only; whoever is gone is simply not there."""
from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Dict, Iterator, List, Optional, Set

from llmgw.parse import proc_net
from llmgw.parse.proc_net import Listener

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Stat:
    """A line of /proc/PID/stat; ``start`` (clock ticks since boot) tells two users of a pid apart."""

    pid: int
    state: str
    parent: int
    session: int
    start: int
    cpu_seconds: float

    @property
    def lives(self) -> bool:
        """A zombie has ended: it only waits for its parent to ask."""
        return self.state not in ("Z", "X", "x")


def boot_id() -> str:
    """Return the id of this boot; pids mean nothing across two of them."""
    return _text("/proc/sys/kernel/random/boot_id").strip()


def stat(pid: int) -> Optional[Stat]:
    """Return the process, None when there is none."""
    text = _text(f"/proc/{pid}/stat")
    if not text:
        return None
    # the name in parentheses may hold blanks and parentheses
    fields = text[text.rindex(")") + 2:].split()
    return Stat(pid=pid, state=fields[0], parent=int(fields[1]), session=int(fields[3]),
                start=int(fields[19]), cpu_seconds=(int(fields[11]) + int(fields[12])) / _TICKS)


def environ(pid: int) -> Dict[str, str]:
    """Return the environment a process was started with; empty when it is gone or not ours to read."""
    pairs = (entry.partition("=") for entry in _text(f"/proc/{pid}/environ").split("\0"))
    return {name: value for name, separator, value in pairs if separator}


def pids() -> Iterator[int]:
    """Return the ids of all processes."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            yield int(name)


def marked(name: str, value: str) -> List[Stat]:
    """Return the living processes whose environment holds ``name=value``, however deep below whom."""
    wanted = f"{name}={value}".encode("utf-8", "surrogateescape")
    found = []
    for pid in pids():
        data = _bytes(f"/proc/{pid}/environ")
        if wanted in data and wanted in data.split(b"\0"):
            process = stat(pid)
            if process is not None and process.lives:
                found.append(process)
    return found


def sessions(ids: Set[int]) -> List[Stat]:
    """Return the living processes of these sessions."""
    found = (stat(pid) for pid in pids()) if ids else ()
    return [process for process in found if process is not None and process.lives and process.session in ids]


def memory_bytes(pid: int) -> int:
    """Return the resident memory of a process, 0 when it is gone."""
    fields = _text(f"/proc/{pid}/statm").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") if len(fields) > 1 else 0


def read_bytes(pid: int) -> int:
    """Return how much a process has read so far, from disk or cache; 0 when it cannot be told."""
    for line in _text(f"/proc/{pid}/io").splitlines():
        if line.startswith("rchar:"):
            return int(line.split()[1])
    return 0


def page_faults(pid: int) -> int:
    """Return the faults of a process so far: a mapped model is read by faults, not by read()."""
    text = _text(f"/proc/{pid}/stat")
    if not text:
        return 0
    fields = text[text.rindex(")") + 2:].split()
    return int(fields[7]) + int(fields[9])


def out_of_memory_kills() -> int:
    """Return how many processes the kernel ended for memory since the machine started."""
    for line in _text("/proc/vmstat").splitlines():
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    return 0


def listening_inodes(port: int) -> Set[str]:
    """Return the sockets that listen on ``port``, on any address of this machine."""
    return {item.inode for item in listeners() if item.port == port}


def listeners() -> List[Listener]:
    """Return every listening TCP socket of this machine, as far as this network namespace shows them."""
    found: List[Listener] = []
    for name in ("tcp", "tcp6"):
        found += proc_net.listeners(_text(f"/proc/net/{name}"), sys.byteorder)
    return found


def socket_inodes(pid: int) -> Set[str]:
    """Return the sockets that a process holds open; empty when it is gone or not ours to read."""
    inodes: Set[str] = set()
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return inodes
    for name in names:
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    return inodes


def _bytes(path: str) -> bytes:
    try:
        with open(path, "rb") as source:
            return source.read()
    except OSError:                   # gone, or another user's
        return b""


def _text(path: str) -> str:
    return _bytes(path).decode("utf-8", "surrogateescape")
