"""Look at a llama.cpp that lies here: what ldd says of it, whether it runs, and which devices it sees."""
from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Dict, List, Sequence, Tuple

from llmgw.domain.command import Command, Outcome
from llmgw.domain.errors import EngineFailed, LlmgwError, RequirementMissing
from llmgw.domain.node import NodeFacts
from llmgw.domain.requirement import Library
from llmgw.parse import engine_version, ldd
from llmgw.system.process import Processes

RUN_SECONDS = 60.0                # a first run from a cold disk, with CUDA libraries of a gigabyte
LDD_SECONDS = 20.0
ENV: Dict[str, str] = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C"}
_CUDA_DEVICE = re.compile(r"CUDA\d+:")
_CUDA_PLUGIN = re.compile(r"libggml-cuda[A-Za-z0-9_.-]*\.so(\.[0-9.]+)?")
_OURS = re.compile(r"lib(ggml|llama|mtmd)[A-Za-z0-9_.-]*\.so[0-9.]*")
_COMPLAINT = re.compile(r".*?(failed to (?:initialize CUDA|load)\b.*)")


@dataclass(frozen=True)
class Seen:
    """What a program says of itself, and the devices it names."""

    says: engine_version.EngineVersion
    devices: Tuple[str, ...] = ()


def lacking(processes: Processes, elves: Sequence[str]) -> Tuple[Library, ...]:
    """Return the libraries that ldd misses over all files, backend plugins too: those are loaded while running.

    What lies beside them is not missed, and neither is what comes with a driver.
    """
    own = {name for folder in {os.path.dirname(path) for path in elves} for name in _there(folder)}
    found: List[Library] = []
    for path in elves:
        found += ldd.lacks(_ldd(processes, path))
    return ldd.merged(item for item in found if item.name not in own and item.name not in ldd.DRIVER_LIBRARIES)


def elves(folder: str) -> List[str]:
    """Return every program and library below ``folder``; links are what they point at."""
    found = []
    for place, _, names in os.walk(folder):
        found += [os.path.join(place, name) for name in sorted(names) if _is_elf(os.path.join(place, name))]
    return sorted(found)


def elves_beside(program: str) -> List[str]:
    """Return an operator's program and the libraries of llama.cpp beside it: it may lie in /usr/local/bin."""
    folder = os.path.dirname(program)
    names = [name for name in sorted(os.listdir(folder)) if _OURS.fullmatch(name)] if os.path.isdir(folder) else []
    return [path for path in [program] + [os.path.join(folder, name) for name in names] if _is_elf(path)]


def usual_libraries(processes: Processes, names: Sequence[str]) -> Tuple[Library, ...]:
    """Return those of ``names`` that the loader's cache does not hold. CommandFailed where there is no cache."""
    outcome = processes.run(Command(("ldconfig", "-p"), env={"PATH": "/usr/sbin:/sbin:/usr/bin:/bin", "LC_ALL": "C"},
                                    cwd="/"), timeout=LDD_SECONDS)
    known = set(ldd.cached(outcome.out))
    return tuple(Library(name) for name in names if name not in known) if known else ()


def run(processes: Processes, path: str, label: str) -> Seen:
    """Run the program and return what it says; EngineFailed in words when it does not run."""
    outcome = processes.run(Command((path, "--version"), env=ENV, cwd="/"), timeout=RUN_SECONDS)
    if outcome.code != 0:
        said = "; ".join(ldd.missing(outcome.err)) or _last_line(outcome.err or outcome.out) or "nothing"
        raise EngineFailed(f"{label}: --version {_end(outcome.code)}: {said}")
    return Seen(engine_version.llama_cpp(outcome.out, outcome.err))


def devices(processes: Processes, path: str) -> Tuple[Tuple[str, ...], Outcome]:
    """Return the devices that the program names, and what it said."""
    outcome = processes.run(Command((path, "--list-devices"), env=ENV, cwd="/"), timeout=RUN_SECONDS)
    named = engine_version.devices(outcome.out + "\n" + outcome.err) if outcome.code == 0 else ()
    return named, outcome


def must_see_cuda(processes: Processes, path: str, label: str, facts: NodeFacts) -> Tuple[str, ...]:
    """Return the devices of a CUDA build; refuse one that names no CUDA device: it would run on the CPU, silently."""
    named, outcome = devices(processes, path)
    if any(_CUDA_DEVICE.match(device) for device in named):
        return named
    sentence = f"{label}: the CUDA build sees no device: {why_no_device(processes, path, outcome, facts)}"
    if facts.reboot_needed:
        raise RequirementMissing(sentence, hint="reboot the node")
    raise EngineFailed(sentence, hint="check nvidia-smi on this node; the CPU build is taken with cpu: true "
                                      "under engines:")


def why_no_device(processes: Processes, path: str, outcome: Outcome, facts: NodeFacts) -> str:
    """Return the likeliest reason; the program itself often says none."""
    if facts.reboot_needed:
        return facts.reboot_needed
    folder = os.path.dirname(path)
    plugins = [os.path.join(folder, name) for name in sorted(os.listdir(folder)) if _CUDA_PLUGIN.fullmatch(name)]
    if not plugins:
        return "there is no libggml-cuda.so beside it"
    for plugin in plugins:
        try:
            text = _ldd(processes, plugin)
        except LlmgwError as error:
            return error.message
        lacks = [item for item in ldd.lacks(text) if item.name not in _there(folder)]
        if lacks:
            return f"its {os.path.basename(plugin)} cannot be loaded: {lacks[0].sentence}" + (
                ", which comes with the NVIDIA driver" if lacks[0].name in ldd.DRIVER_LIBRARIES else "")
        if ldd.no_library(text):
            return f"its {os.path.basename(plugin)} cannot be loaded: it is no whole library"
    said = [match.group(1) for match in map(_COMPLAINT.match, (outcome.err + "\n" + outcome.out).splitlines()) if match]
    if said:
        return said[0][:300]
    if outcome.code != 0:
        return f"--list-devices {_end(outcome.code)}: {_last_line(outcome.err or outcome.out)}"
    return "--list-devices names none, and says no reason"


def _ldd(processes: Processes, path: str) -> str:
    outcome = processes.run(Command(("ldd", path), env=ENV, cwd="/"), timeout=LDD_SECONDS)
    return outcome.err + "\n" + outcome.out


def _there(folder: str) -> List[str]:
    """Return the names in a folder; a link to what is gone is not there."""
    return [name for name in os.listdir(folder) if os.path.exists(os.path.join(folder, name))]


def _is_elf(path: str) -> bool:
    if os.path.islink(path) or not os.path.isfile(path):
        return False
    with open(path, "rb") as source:
        return source.read(4) == b"\x7fELF"


def _end(code: int) -> str:
    return f"ends with code {code}" if code >= 0 else f"is ended by signal {-code}"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
