"""What this machine is: one look at it, every question with a deadline."""
from __future__ import annotations

import os
import platform
import re
from typing import Dict, List, Sequence, Tuple

from llmgw.decide import requirements
from llmgw.domain.node import NodeFacts, OsRelease
from llmgw.parse.cpuinfo import Cpu, cpuinfo
from llmgw.parse.os_release import os_release
from llmgw.probe import gpus as gpu_probe
from llmgw.probe.deadline import within
from llmgw.system.process import Processes

QUICK_SECONDS = 5.0
GPU_SECONDS = 25.0                # two questions of nvidia-smi, and the wait for a driver that loads
OS_RELEASE = ("/etc/os-release", "/usr/lib/os-release")
NO_AVX2 = "; ".join(requirements.NO_AVX2)


def probe(data_dir: str, *, processes: Processes, exclude_gpus: Sequence[int] = ()) -> NodeFacts:
    """Return the facts of this machine. What did not answer in time is unknown, and said in ``warnings``."""
    warnings: List[str] = []

    def ask(what, question, unknown, seconds=QUICK_SECONDS):
        answer, problem = within(seconds, what, question, unknown)
        if problem:
            warnings.append(problem)
        return answer

    system = ask("os-release", _os_release, OsRelease())
    cpu = ask("processor", _cpu, Cpu("", 0, ()))
    memory = ask("memory", _memory, {})
    disk = ask(f"the filesystem of {data_dir}", lambda: _disk(data_dir), (0, 0))
    found = ask("nvidia-smi", lambda: gpu_probe.probe(processes), gpu_probe.Gpus(), GPU_SECONDS)
    arch = platform.machine()
    if arch == "x86_64" and cpu.vector_extensions and "avx2" not in cpu.vector_extensions:
        warnings.append(NO_AVX2)
    return NodeFacts(
        os=system, kernel=platform.release(), arch=arch, libc=ask("libc", _libc, ""),
        python=platform.python_version(), cpu_model=cpu.model, cpu_count=_usable_cpus(cpu.count),
        vector_extensions=cpu.vector_extensions,
        memory_total_bytes=memory.get("MemTotal", 0), memory_available_bytes=memory.get("MemAvailable", 0),
        disk_total_bytes=disk[0], disk_free_bytes=disk[1], nvidia_driver=found.driver,
        gpus=tuple(gpu for gpu in found.gpus if gpu.index not in exclude_gpus),
        reboot_needed=found.reboot_needed, warnings=tuple(warnings) + found.warnings)


def _os_release() -> OsRelease:
    for path in OS_RELEASE:
        if os.path.exists(path):
            with open(path, "rb") as source:
                return os_release(source.read(64 << 10))
    return OsRelease()


def _cpu() -> Cpu:
    with open("/proc/cpuinfo", "rb") as source:
        return cpuinfo(source.read(8 << 20))


def _usable_cpus(counted: int) -> int:
    """Return how many processors this process may use: a container or cpuset may hold fewer."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return counted or os.cpu_count() or 0


def _memory() -> Dict[str, int]:
    values = {}
    with open("/proc/meminfo", encoding="ascii", errors="replace") as source:
        for line in source:
            match = re.match(r"(\w+):\s+(\d+) kB", line)
            if match:
                values[match.group(1)] = int(match.group(2)) * 1024
    return values


def _disk(path: str) -> Tuple[int, int]:
    stat = os.statvfs(path)
    return stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize


def _libc() -> str:
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
        if version:
            return f"{name} {version}"
    except (AttributeError, ValueError, OSError):      # not glibc
        pass
    for folder in ("/lib", "/usr/lib"):
        if os.path.isdir(folder) and any(entry.startswith("ld-musl-") for entry in os.listdir(folder)):
            return "musl"
    return ""
