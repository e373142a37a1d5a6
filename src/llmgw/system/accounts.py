"""The user that engines run as when the agent is root: found or made, and let into what it has to read."""
from __future__ import annotations

import grp
import os
import pwd
import shutil
from typing import List, Optional, Tuple

from llmgw.domain.command import Command, RunAs
from llmgw.domain.errors import CommandFailed, RequirementMissing
from llmgw.system import data_dir
from llmgw.system.files import storing
from llmgw.system.process import Processes, barrier

ENGINE_USER = "llmgw-engine"
GPU_GROUPS = ("video", "render")
MAKE_SECONDS = 60.0
ASK_SECONDS = 20.0
PRIVATE_GROUPS = 2_000_000_000    # numbers that neither systems, users nor containers use; a port is added
CAP_SYS_PTRACE = 19
PATH = "/usr/sbin:/usr/bin:/sbin:/bin"


def is_root() -> bool:
    """Say whether this process may run programs as somebody else."""
    return hasattr(os, "geteuid") and os.geteuid() == 0


def find(name: str) -> Optional[RunAs]:
    """Return the user of that name, with its groups and those that open GPUs; None when there is none."""
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        return None
    groups = {entry.pw_gid, *os.getgrouplist(name, entry.pw_gid)}
    for group in GPU_GROUPS:
        try:
            groups.add(grp.getgrnam(group).gr_gid)
        except KeyError:
            continue
    return RunAs(name, entry.pw_uid, entry.pw_gid, tuple(sorted(groups)))


def need(name: str) -> RunAs:
    """Return the user; the usual one is made when it is not there. RequirementMissing says why there is none."""
    found = find(name)
    if found is not None:
        return found
    if name != ENGINE_USER:
        raise RequirementMissing(f"engine_user: there is no user {name} on this machine",
                                 hint=f"make it, or leave the key out: then {ENGINE_USER} is made and used")
    said = _make(name)
    found = find(name)               # made by another agent at the same moment is as good
    if found is None:
        raise RequirementMissing(f"engines run as the user {name}, which cannot be made: {said}",
                                 hint=f"make it: useradd --system --no-create-home --user-group {name}; or say "
                                      "engine_user: root in agent.yaml to run engines as root")
    return found


def _make(name: str) -> str:
    """Make a system user without home and login; return what was said when that failed."""
    steps: List[Tuple[str, ...]] = []
    if shutil.which("useradd", path=PATH):
        shell = shutil.which("nologin", path=PATH) or "/bin/false"
        steps = [("useradd", "--system", "--user-group", "--no-create-home", "--home-dir", "/nonexistent",
                  "--shell", shell, "--comment", "llmgw engines", name)]
    elif shutil.which("adduser", path=PATH):                  # busybox
        steps = [("addgroup", "-S", name),
                 ("adduser", "-S", "-D", "-H", "-h", "/nonexistent", "-s", "/sbin/nologin", "-G", name, name)]
    said = "" if steps else "there is neither useradd nor adduser"
    for words in steps:
        try:
            outcome = Processes().run(Command(words, env={"PATH": PATH, "LC_ALL": "C"}, cwd="/"), timeout=MAKE_SECONDS)
        except CommandFailed as error:
            return error.message
        if outcome.code:
            said = (outcome.err or outcome.out).strip()[-300:] or f"{words[0]} ends with code {outcome.code}"
    return said


def sees_others() -> bool:
    """Say whether this process can look into those of another user: the root of a container often cannot."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as source:
            held = next((line.split()[1] for line in source if line.startswith("CapEff:")), "0")
    except OSError:
        return False
    return bool(int(held, 16) >> CAP_SYS_PTRACE & 1)


def may_enter(user: RunAs, folder: str) -> bool:
    """Ask the system itself whether this user may enter a folder: modes, lists of access, network disks."""
    command = Command(("test", "-x", folder), env={"PATH": PATH}, cwd="/", run_as=user)
    return Processes().run(command, timeout=ASK_SECONDS).code == 0


def closed(user: Optional[RunAs], folder: str) -> str:
    """Return the first folder above ``folder`` that this user (None: one that is in no group) may not enter."""
    return barrier(os.path.join(folder, "x"), user.uid, user.groups) if user else barrier(
        os.path.join(folder, "x"), -1, ())


def private(user: RunAs, number: int) -> RunAs:
    """Return the same user with a group of its own: the kernel keeps two such programs out of each other.

    Files of one are closed to the other, and so are its memory and environment in /proc:
    for those user *and* group must be the same.
    """
    group = PRIVATE_GROUPS + number
    return RunAs(user.name, user.uid, group, user.groups) if _is_mapped(group) else user


def _is_mapped(group: int) -> bool:
    """Say whether this user namespace knows a group of that number."""
    try:
        with open("/proc/self/gid_map", encoding="ascii") as source:
            ranges = [[int(word) for word in line.split()] for line in source]
    except (OSError, ValueError):
        return False
    return any(len(row) == 3 and row[0] <= group < row[0] + row[2] for row in ranges)


def open_above(folder: str) -> None:
    """Let others pass through llmgw's own folders above ``folder``, which were made for root alone perhaps."""
    top = data_dir.default_root()
    place = os.path.dirname(folder)
    while place == top or place.startswith(top + os.sep):
        with storing("open to the engine user", place):
            mode = os.stat(place).st_mode & 0o7777
            if not mode & 0o001:
                os.chmod(place, mode | 0o011)
        place = os.path.dirname(place)


def share(folder: str, user: RunAs, mode: int = 0o750) -> None:
    """Let the user's group into a folder of root's, by ``mode``.

    What a former agent made for root alone is opened below it first; a kill in between is seen to by the next start.
    """
    with storing("open to the engine user", folder):
        seen = os.lstat(folder)
        if mode & 0o040 and not seen.st_mode & 0o040:
            _open_below(folder)
        if seen.st_gid != user.gid:
            os.chown(folder, -1, user.gid)
        if seen.st_mode & 0o7777 != mode:
            os.chmod(folder, mode)


def _open_below(top: str) -> None:
    """Make all below ``top`` readable; who may come as far as ``top`` is decided there."""
    for place, folders, names in os.walk(top):
        for name in folders + names:
            path = os.path.join(place, name)
            if os.path.islink(path):
                continue
            mode = os.stat(path).st_mode & 0o7777
            wanted = mode | 0o044 | (0o011 if mode & 0o100 else 0)
            if wanted != mode:
                os.chmod(path, wanted)


def give(path: str, user: RunAs, mode: int) -> None:
    """Make a file or folder the user's own, in its group."""
    with storing("give to the engine user", path):
        os.chown(path, user.uid, user.gid, follow_symlinks=False)
        os.chmod(path, mode)
