"""Which GPUs this machine has, and which of them llmgw cannot use."""
from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from typing import List, Optional, Tuple

from llmgw.decide.gpu_proof import Holder
from llmgw.domain.command import Command
from llmgw.domain.errors import LlmgwError, ParseError, RebootNeeded
from llmgw.domain.node import Gpu
from llmgw.parse import nvidia_smi
from llmgw.system import rehearsal
from llmgw.system.process import Processes

TIMEOUT_SECONDS = 10.0
PCI_DEVICES = "/sys/bus/pci/devices"
# A display controller of any kind, or a processing accelerator (AMD's compute cards).
_CLASSES = ("0x03", "0x12")
_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}
_PLACES = ("/usr/bin", "/usr/local/bin", "/usr/local/nvidia/bin", "/opt/bin", "/usr/lib/wsl/lib", "/bin")


@dataclass(frozen=True)
class Gpus:
    """``warnings`` names every card that is there and of no use."""

    driver: Optional[str] = None
    gpus: Tuple[Gpu, ...] = ()
    warnings: Tuple[str, ...] = ()
    reboot_needed: str = ""       # why they cannot be used before that


def probe(processes: Processes, *, program: str = "", pci: str = PCI_DEVICES) -> Gpus:
    """Return the NVIDIA GPUs, and a sentence for each other card and for a driver that does not answer."""
    cards = cards_on_the_bus(pci)
    program = program or find_program()
    others = tuple(f"{vendor} GPU found: llmgw uses NVIDIA GPUs only, this one stays unused"
                   for vendor in dict.fromkeys(cards) if vendor == "AMD")
    # Most Intel processors carry a small GPU; only a discrete one is worth a warning.
    others += tuple("Intel GPU found: llmgw uses NVIDIA GPUs only, this one stays unused"
                    for vendor in dict.fromkeys(cards) if vendor == "Intel accelerator")
    if not program:
        if "NVIDIA" in cards:
            others += ("NVIDIA card found, but no driver: nvidia-smi is not installed; install the NVIDIA "
                       "driver to use it",)
        return Gpus(warnings=others)
    try:
        reading = query(processes, program)
    except RebootNeeded as error:
        return Gpus(warnings=others + (f"NVIDIA GPUs cannot be used: {error.message}; {error.hint}",),
                    reboot_needed=error.message)
    except LlmgwError as error:
        if not cards and not os.path.exists("/dev/nvidia0"):
            return Gpus(warnings=others)       # nvidia-smi without any card: a container image
        sentence = f"NVIDIA GPUs cannot be used: {error.message}"
        return Gpus(warnings=others + (sentence + (f"; {error.hint}" if error.hint else ""),))
    return Gpus(reading.driver, reading.gpus, others + _migs(reading.gpus))


def query(processes: Processes, program: str) -> nvidia_smi.Reading:
    """Return what nvidia-smi says. ParseError with the reason when it has no GPUs to tell."""
    text = _ask(processes, program, nvidia_smi.FIELDS)
    try:
        return nvidia_smi.gpus(text, nvidia_smi.FIELDS)
    except ParseError:
        if "compute_cap" not in text:
            raise
    return nvidia_smi.gpus(_ask(processes, program, nvidia_smi.FIELDS_OLD), nvidia_smi.FIELDS_OLD)


def holders(processes: Processes, program: str) -> Tuple[Holder, ...]:
    """Return the programs that hold memory of a GPU now; of a card divided by MIG, the whole card's."""
    out = processes.run(Command((program, "--query-compute-apps=" + ",".join(nvidia_smi.APPS_FIELDS),
                                 "--format=csv,noheader"), env=_ENV), timeout=TIMEOUT_SECONDS).out
    return tuple(Holder(pid, uuid, used) for pid, used, uuid in nvidia_smi.apps(out))


def cards_on_the_bus(pci: str = PCI_DEVICES) -> Tuple[str, ...]:
    """Return the vendors of the graphics and compute cards that the kernel sees, driver or not."""
    found: List[str] = []
    for name in sorted(os.listdir(pci)) if os.path.isdir(pci) else ():
        vendor = _VENDORS.get(_read(os.path.join(pci, name, "vendor")))
        kind = _read(os.path.join(pci, name, "class"))
        if vendor and kind.startswith(_CLASSES):
            # Intel's integrated GPU sits at 00:02.0; a card sits behind a bridge
            discrete = vendor != "Intel" or not name.startswith("0000:00:")
            found.append(vendor if vendor != "Intel" else "Intel accelerator" if discrete else "Intel")
    return tuple(found)


def find_program() -> str:
    """Return the path of nvidia-smi, empty when there is none."""
    places = rehearsal.places("NVIDIA_PATH") or os.pathsep.join(_PLACES)
    return shutil.which("nvidia-smi", path=places) or ""


_ENV = {"PATH": "/usr/bin:/bin", "LC_ALL": "C"}


def _ask(processes: Processes, program: str, fields: Tuple[str, ...]) -> str:
    outcome = processes.run(Command((program, "--query-gpu=" + ",".join(fields), "--format=csv,noheader"),
                                    env=_ENV), timeout=TIMEOUT_SECONDS)
    return outcome.out if outcome.out.strip() else outcome.err


def _migs(gpus: Tuple[Gpu, ...]) -> Tuple[str, ...]:
    return tuple(f"GPU {gpu.index} ({gpu.name}) is divided by MIG, which llmgw does not use: it stays unused"
                 for gpu in gpus if gpu.mig)


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as source:
            return source.read().strip()
    except OSError:
        return ""
