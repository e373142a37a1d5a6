"""Which package brings a library on this system, with which command, and who may run it."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List, Mapping, Sequence, Tuple

from llmgw.domain.node import OsRelease
from llmgw.domain.requirement import Library

MANAGERS = ("apt-get", "dnf", "yum", "zypper")
_LISTED = "apt-get, dnf, yum or zypper"


@dataclass(frozen=True)
class Family:
    """Systems that call packages by the same names. ``managers``: the first that the machine has is used."""

    name: str
    managers: Tuple[str, ...]
    packages: Mapping[str, str]          # library -> package
    compiler: Tuple[str, ...]            # gcc, and the C library's headers
    search: str                          # finds the package of a library that is not in ``packages``


@dataclass(frozen=True)
class Ways:
    """How packages can come to a machine; filled by whoever looked at it."""

    os: OsRelease
    managers: Tuple[str, ...] = ()       # those of MANAGERS that the machine has
    root: bool = False
    allowed: bool = True                 # install_packages of agent.yaml


@dataclass(frozen=True)
class Plan:
    """How libraries come to the machine. ``argv`` is empty when llmgw itself installs nothing: ``why_not``."""

    packages: Tuple[str, ...] = ()
    argv: Tuple[str, ...] = ()
    refresh: Tuple[str, ...] = ()        # fetches the lists of packages
    why_not: str = ""
    by_hand: str = ""                    # what a person can run, or do


# Names are those of the newest releases; the older ones provide or obsolete them, except libgcc1 of Debian 10.
DEBIAN = Family("Debian", ("apt-get",), {
    "libgomp.so.1": "libgomp1", "libstdc++.so.6": "libstdc++6", "libgcc_s.so.1": "libgcc-s1", "libc.so.6": "libc6",
    "libm.so.6": "libc6", "libssl.so.3": "libssl3", "libcrypto.so.3": "libssl3", "libssl.so.1.1": "libssl1.1",
    "libcrypto.so.1.1": "libssl1.1", "libcurl.so.4": "libcurl4", "libnuma.so.1": "libnuma1", "libz.so.1": "zlib1g",
    "libatomic.so.1": "libatomic1", "libdl.so.2": "libc6", "libpthread.so.0": "libc6",
}, ("gcc", "libc6-dev"), "apt-file search {library}")
RED_HAT = Family("Red Hat", ("dnf", "yum"), {
    "libgomp.so.1": "libgomp", "libstdc++.so.6": "libstdc++", "libgcc_s.so.1": "libgcc", "libc.so.6": "glibc",
    "libm.so.6": "glibc", "libssl.so.3": "openssl-libs", "libcrypto.so.3": "openssl-libs",
    "libssl.so.1.1": "compat-openssl11", "libcrypto.so.1.1": "compat-openssl11", "libcurl.so.4": "libcurl",
    "libnuma.so.1": "numactl-libs", "libz.so.1": "zlib", "libatomic.so.1": "libatomic", "libdl.so.2": "glibc",
    "libpthread.so.0": "glibc",
}, ("gcc", "glibc-devel"), "{manager} provides '*/{library}'")
SUSE = Family("SUSE", ("zypper",), {
    "libgomp.so.1": "libgomp1", "libstdc++.so.6": "libstdc++6", "libgcc_s.so.1": "libgcc_s1", "libc.so.6": "glibc",
    "libm.so.6": "glibc", "libssl.so.3": "libopenssl3", "libcrypto.so.3": "libopenssl3",
    "libssl.so.1.1": "libopenssl1_1", "libcrypto.so.1.1": "libopenssl1_1", "libcurl.so.4": "libcurl4",
    "libnuma.so.1": "libnuma1", "libz.so.1": "libz1", "libatomic.so.1": "libatomic1", "libdl.so.2": "glibc",
    "libpthread.so.0": "glibc",
}, ("gcc", "glibc-devel"), "zypper search --provides {library}")

_FAMILIES: Dict[str, Family] = {
    **dict.fromkeys(("debian", "ubuntu", "raspbian", "linuxmint", "pop", "kali"), DEBIAN),
    **dict.fromkeys(("rhel", "centos", "fedora", "rocky", "almalinux", "ol", "amzn", "clearos"), RED_HAT),
    **dict.fromkeys(("suse", "opensuse", "opensuse-leap", "opensuse-tumbleweed", "sles", "sled", "sles_sap",
                     "suse-microos"), SUSE),
}
# Systems with a package manager of their own, which a person can use: library -> words after the command.
_BY_HAND: Dict[str, Tuple[str, Mapping[str, str]]] = {
    "arch": ("pacman -S --needed", {"libgomp.so.1": "gcc-libs", "libstdc++.so.6": "gcc-libs",
                                    "libgcc_s.so.1": "gcc-libs", "libcurl.so.4": "curl", "libssl.so.3": "openssl"}),
    "alpine": ("apk add", {"libgomp.so.1": "libgomp", "libstdc++.so.6": "libstdc++", "libgcc_s.so.1": "libgcc"}),
    "clear-linux-os": ("swupd bundle-add", {"libgomp.so.1": "c-basic", "libstdc++.so.6": "c-basic"}),
}
_INSTALL: Dict[str, Tuple[str, ...]] = {
    # never at the price of a package that is there
    "apt-get": ("apt-get", "install", "--yes", "--no-install-recommends", "--no-remove"),
    "dnf": ("dnf", "--assumeyes", "--setopt=exit_on_lock=True", "install"),
    "yum": ("yum", "--assumeyes", "--setopt=exit_on_lock=1", "install"),
    "zypper": ("zypper", "--non-interactive", "install", "--no-recommends"),
}
# What a person types.
_TYPED = {"apt-get": "apt-get install -y", "dnf": "dnf install -y", "yum": "yum install -y",
          "zypper": "zypper install -y"}
_REFRESH = {"apt-get": ("apt-get", "update")}       # the others do it themselves


def family(ways: Ways) -> Family:
    """Return the family of a system: by ID, then by ID_LIKE, then by the manager it has; KeyError for none."""
    for name in (ways.os.id, *ways.os.id_like):
        if name in _FAMILIES:
            return _FAMILIES[name]
        if name in _BY_HAND:
            raise KeyError(name)
    for known in (DEBIAN, RED_HAT, SUSE):
        if any(manager in ways.managers for manager in known.managers):
            return known
    raise KeyError(ways.os.id)


def manager(ways: Ways) -> str:
    """Return the package manager to use, empty when the machine has none of its family's."""
    try:
        ours = family(ways)
    except KeyError:
        return ""
    return next((name for name in ours.managers if name in ways.managers), "")


def for_libraries(ways: Ways, libraries: Sequence[Library]) -> Plan:
    """Return how the missing ``libraries`` come to the machine; a package mends none that is too old."""
    names = [library.name for library in libraries]
    if not manager(ways):
        return Plan(why_not=_no_manager(ways), by_hand=_by_hand(ways, names))
    known = family(ways).packages
    if _is_old_debian(ways):
        known = {**known, "libgcc_s.so.1": "libgcc1"}
    unknown = [name for name in names if name not in known]
    if unknown:
        return Plan(why_not=f"which package brings {_list(unknown)} is not known to llmgw",
                    by_hand=family(ways).search.format(library=unknown[0], manager=manager(ways)))
    return _plan(ways, tuple(dict.fromkeys(known[name] for name in names)))


def for_compiler(ways: Ways) -> Plan:
    """Return how gcc and the headers of the C library come to the machine."""
    if not manager(ways):
        return Plan(why_not=_no_manager(ways), by_hand="install gcc and the headers of the C library")
    return _plan(ways, family(ways).compiler)


def sentence(libraries: Sequence[Library], plan: Plan) -> str:
    """Return what is missing, which packages bring it, and why llmgw does not install them, if it does not."""
    text = "; ".join(library.sentence for library in libraries)
    if plan.packages:
        many = len(plan.packages) > 1
        text += (f": {'packages' if many else 'package'} {_list(plan.packages)} "
                 f"{'bring' if many else 'brings'} {'them' if len(libraries) > 1 else 'it'}")
        return text + (f", {plan.why_not}" if plan.why_not else "")
    return text + (f"; {plan.why_not}" if plan.why_not else "")


def _plan(ways: Ways, packages: Tuple[str, ...]) -> Plan:
    program = manager(ways)
    by_hand = f"{'' if ways.root else 'sudo '}{_TYPED[program]} {' '.join(packages)}"
    if not ways.allowed:
        return Plan(packages, why_not="and install_packages is false in agent.yaml", by_hand=by_hand)
    if not ways.root:
        return Plan(packages, why_not="and llmgw does not run as root here", by_hand=by_hand)
    return Plan(packages, (*_INSTALL[program], *packages), _REFRESH.get(program, ()), by_hand=by_hand)


def _no_manager(ways: Ways) -> str:
    system = ways.os.pretty_name or ways.os.id or "this system"
    return f"llmgw installs packages with {_LISTED}, and {system} has none of them"


def _by_hand(ways: Ways, names: Sequence[str]) -> str:
    for system in (ways.os.id, *ways.os.id_like):
        if system in _BY_HAND:
            command, known = _BY_HAND[system]
            found: List[str] = list(dict.fromkeys(known[name] for name in names if name in known))
            if found:
                return f"{'' if ways.root else 'sudo '}{command} {' '.join(found)}"
    return f"install what brings {_list(names)}" if names else ""


def _is_old_debian(ways: Ways) -> bool:
    version = ways.os.version_id.partition(".")[0]
    oldest = {"debian": 11, "raspbian": 11, "ubuntu": 20, "linuxmint": 20}.get(ways.os.id, 0)
    return version.isdigit() and int(version) < oldest


def _list(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]
