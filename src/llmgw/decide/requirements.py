"""Does this node have what an engine needs? One sentence for each requirement; agent and doctor ask the same."""
from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Callable, Optional, Sequence, Tuple

from llmgw.decide import packages
from llmgw.domain.node import NodeFacts
from llmgw.domain.requirement import Library, Needs, Requirement, Status

NO_GPU = "no GPU that it could use"
UNPACKED = 4                # an archive and what comes out of it take at most this many times its size
OWN_BUILD = "a build made for this system (engines: in agent.yaml)"
DISK = "disk"
NO_AVX2 = ("the processor shows no AVX2 (a VM processor type?): it makes everything about five times slower",
           "choose the processor type 'host' in the hypervisor")
_LOADERS = ("ld-linux", "ld64.so")     # glibc's own: where it is missing, the C library is another one


@dataclass(frozen=True)
class Machine:
    """What was seen of a node. ``lacking`` None: there was nothing to ask; ``gcc`` None: nobody looked."""

    facts: NodeFacts
    ways: packages.Ways
    installed: bool = False
    lacking: Optional[Tuple[Library, ...]] = None
    gcc: Optional[bool] = None
    archive_bytes: int = 0            # of what is to be installed, when that is known
    cpu: bool = False                 # the CPU build is wanted on purpose
    cuda: str = ""                    # the CUDA version of the archive that was taken
    other_cuda: Tuple[str, ...] = ()  # older ones that the release has too


def check(needs: Needs, machine: Machine) -> Tuple[Requirement, ...]:
    """Return every requirement, in the order in which a person would mend them."""
    return tuple(rule(needs, machine) for rule in _RULES)


def first_missing(requirements: Sequence[Requirement]) -> Optional[Requirement]:
    """Return the first that is missing."""
    return next((item for item in requirements if item.status is Status.MISSING), None)


def skipped(needs: Needs, facts: NodeFacts) -> str:
    """Return why the engine is no business of this node, which is no fault; empty when it is."""
    return NO_GPU if needs.gpu and not facts.gpus and not facts.reboot_needed else ""


def processor(needs: Needs, machine: Machine) -> Requirement:
    arch = machine.facts.arch
    if not needs.processors:
        return _not_asked("processor", "runs on any")
    if not arch:
        return _unknown("processor", "which processor this is")
    if arch in needs.processors:
        return _ok("processor", arch)
    return _missing("processor", f"no archive is made for processors of type {arch}", f"bring {OWN_BUILD}")


def vectors(needs: Needs, machine: Machine) -> Requirement:
    facts = machine.facts
    if not needs.avx2 or facts.arch not in ("x86_64", "amd64"):
        return _not_asked("AVX2", "asked of x86-64 processors only")
    if not facts.vector_extensions:
        return _unknown("AVX2", "what the processor can do")
    if "avx2" in facts.vector_extensions:
        return _ok("AVX2", "the processor has it")
    return Requirement("AVX2", Status.WARNING, *NO_AVX2)


def gpu(needs: Needs, machine: Machine) -> Requirement:
    facts = machine.facts
    if facts.reboot_needed and not machine.cpu:
        return _missing("GPU", facts.reboot_needed, "reboot the node")
    if machine.cpu:
        return _not_asked("GPU", "the CPU build is wanted on purpose")
    if facts.gpus:
        names = [item.name for item in facts.gpus]
        return _ok("GPU", ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)))
    return _not_asked("GPU", NO_GPU if needs.gpu else "none that llmgw could use: it runs on the CPU")


def driver(needs: Needs, machine: Machine) -> Requirement:
    found = machine.facts.nvidia_driver
    if not needs.driver or not machine.facts.gpus:
        return _not_asked("NVIDIA driver", "no particular one is needed" if not needs.driver else "no GPU")
    if not found:
        return _unknown("NVIDIA driver", "which driver is loaded")
    if _numbers(found) >= _numbers(needs.driver):
        return _ok("NVIDIA driver", f"{found}, {needs.driver} or newer is needed")
    return _missing("NVIDIA driver", f"the NVIDIA driver is {found}, {needs.driver} or newer is needed",
                    f"update the NVIDIA driver to {needs.driver} or newer")


def capability(needs: Needs, machine: Machine) -> Requirement:
    """Every GPU counts: placement may take any of them."""
    name = "compute capability"
    if not needs.compute_capability or not machine.facts.gpus:
        return _not_asked(name, "none in particular is needed" if not needs.compute_capability else "no GPU")
    known = [item for item in machine.facts.gpus if item.compute_capability]
    if not known:
        return _unknown(name, "which compute capability the GPUs have")
    lowest = min(known, key=lambda item: _numbers(item.compute_capability or ""))
    if _numbers(lowest.compute_capability or "") >= _numbers(needs.compute_capability):
        return _ok(name, f"{lowest.compute_capability}, {needs.compute_capability} or higher is needed")
    return _missing(name, f"GPU {lowest.index} ({lowest.name}) has compute capability {lowest.compute_capability}, "
                    f"{needs.compute_capability} or higher is needed",
                    f"leave that GPU out: gpus: {{exclude: [{lowest.index}]}} in agent.yaml")


def disk(needs: Needs, machine: Machine) -> Requirement:
    facts = machine.facts
    wanted = needs.free_bytes_with_gpu if facts.gpus and not machine.cpu else 0
    wanted = UNPACKED * machine.archive_bytes or wanted or needs.free_bytes
    if not wanted or machine.installed:
        return _not_asked(DISK, "it is installed already" if machine.installed else "next to nothing is needed")
    if not facts.disk_total_bytes:
        return _unknown(DISK, "how much room the data folder has")
    if facts.disk_free_bytes >= wanted:
        return _ok(DISK, f"{_size(facts.disk_free_bytes)} free, {_size(wanted)} are needed while installing")
    return _missing(DISK, f"{_size(facts.disk_free_bytes)} free on the filesystem of the data folder, "
                    f"{_size(wanted)} are needed while installing", "free some space, or choose another data_dir")


def glibc(needs: Needs, machine: Machine) -> Requirement:
    if not needs.glibc:
        return _not_asked("glibc", "ldd decides")
    name, _, version = machine.facts.libc.partition(" ")
    if not name:
        return _unknown("glibc", "which C library this system has")
    if name != "glibc":
        return _missing("glibc", f"this system's C library is {machine.facts.libc}, glibc {needs.glibc} or newer "
                        "is needed", "use a system with glibc")
    if _numbers(version) >= _numbers(needs.glibc):
        return _ok("glibc", f"{version}, {needs.glibc} or newer is needed")
    return _missing("glibc", f"glibc is {version}, {needs.glibc} or newer is needed", "use a newer system")


def libraries(needs: Needs, machine: Machine) -> Requirement:
    """What ldd says of what is installed, or of what is about to be."""
    lacking = machine.lacking
    if lacking is None:
        return _not_asked("libraries", "nothing is installed that ldd could be asked about")
    if not lacking:
        return _ok("libraries", "ldd finds them all" if machine.installed else "the usual ones are here")
    if any(_is_own(needs, item) for item in lacking):
        gone = [item for item in lacking if _is_own(needs, item)]
        return _missing("libraries", "; ".join(item.sentence for item in gone) + ", a file of the engine itself",
                        "put it back, or remove the folder of this version: it is installed anew then")
    plan = package_plan(needs, machine.ways, lacking)
    if plan is not None:
        return _missing("libraries", packages.sentence(lacking, plan), plan.by_hand)
    if _is_for_glibc(lacking):
        system = machine.facts.os.pretty_name or "this system"
        return _missing("libraries", f"it is made for glibc, and the C library of {system} is another",
                        f"bring {OWN_BUILD}")
    return _missing("libraries", "; ".join(item.sentence for item in lacking), too_old_hint(machine))


def package_plan(needs: Needs, ways: packages.Ways, lacking: Sequence[Library]) -> Optional[packages.Plan]:
    """Return how packages would bring all of ``lacking``; None when none mends that."""
    if _is_for_glibc(lacking) or any(item.needs or _is_own(needs, item) for item in lacking):
        return None
    return packages.for_libraries(ways, lacking)


def _is_own(needs: Needs, library: Library) -> bool:
    return bool(needs.own) and library.name.startswith(needs.own)


def _is_for_glibc(lacking: Sequence[Library]) -> bool:
    return any(item.name.startswith(_LOADERS) for item in lacking)


def too_old_hint(machine: Machine) -> str:
    """Return what helps against libraries that are too old: never a package."""
    if not machine.cuda:
        return f"use a newer system on this node, or {OWN_BUILD}"
    older = (f"an older CUDA build with cuda: {machine.other_cuda[-1]} under engines: (this one is {machine.cuda}), "
             if machine.other_cuda else "")
    return (f"take {older}{'or ' if older else ''}the CPU build with cpu: true under engines:, "
            "or use a newer system on this node")


def compiler(needs: Needs, machine: Machine) -> Requirement:
    if not needs.compiler:
        return _not_asked("gcc", "nothing is compiled")
    if machine.gcc is None:
        return _unknown("gcc", "whether there is a compiler")
    if machine.gcc:
        return _ok("gcc", "gcc and the headers of the C library are here")
    plan = packages.for_compiler(machine.ways)
    bring = f": packages {' and '.join(plan.packages)} bring them" if plan.packages else ""
    why_not = f"{',' if bring else ';'} {plan.why_not}" if plan.why_not else ""
    return _missing("gcc", f"gcc or the headers of the C library are missing{bring}{why_not}", plan.by_hand)


_RULES: Tuple[Callable[[Needs, Machine], Requirement], ...] = (
    processor, gpu, driver, capability, glibc, libraries, compiler, disk, vectors)


def _ok(name: str, message: str) -> Requirement:
    return Requirement(name, Status.OK, message)


def _not_asked(name: str, message: str) -> Requirement:
    return Requirement(name, Status.NOT_APPLICABLE, message)


def _missing(name: str, message: str, hint: str) -> Requirement:
    return Requirement(name, Status.MISSING, message, hint)


def _unknown(name: str, what: str) -> Requirement:
    """What could not be found out stops nothing: the run decides."""
    return Requirement(name, Status.WARNING, f"could not find out {what}")


def _numbers(version: str) -> Tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"[0-9]{1,9}", version)[:4])


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
