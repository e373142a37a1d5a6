"""Folders in which a program works as somebody else: lent to its group, and taken back before anything of it is used.

    lent          0770 root:GROUP    nobody but that program comes in
    taken back    0755 root:root     all below is root's; nobody else can change it

The folder's own mode changes last: a kill in between leaves it lent, and so not used.
"""
from __future__ import annotations

import os
import stat

from llmgw.domain.command import RunAs
from llmgw.domain.errors import EngineFailed
from llmgw.system import files
from llmgw.system.files import storing

_LENT = 0o770


def lend(folder: str, user: RunAs, *, keep: bool = False) -> str:
    """Return ``folder``, empty and open to the user's group; ``keep`` what the same user made in it before."""
    if not (keep and _is_lent_to(folder, user)):
        files.remove(folder)
    files.make_dir(os.path.dirname(folder), 0o755)
    with storing("lend", folder):
        os.makedirs(folder, 0o700, exist_ok=True)
        os.chown(folder, -1, user.gid)
        os.chmod(folder, _LENT)
    return folder


def is_lent(folder: str) -> bool:
    """Say whether somebody else may still write there, or what was written is not yet ours."""
    try:
        return bool(os.lstat(folder).st_mode & stat.S_IWGRP)
    except OSError:
        return False


def take_back(folder: str, user: RunAs) -> None:
    """Make all that ``user`` left below ``folder`` ours, and readable; refuse what is no file, folder or link.

    The user's programs have ended. What is ours already is left as it is: a link may lead to any file.
    """
    with storing("take back", folder):
        os.chown(folder, -1, os.getegid())        # now nobody else comes in
        places = [folder]
        while places:
            with os.scandir(places.pop()) as entries:
                for entry in entries:
                    if _take(entry, user):
                        places.append(entry.path)
        os.chmod(folder, 0o755)


def _take(entry: "os.DirEntry[str]", user: RunAs) -> bool:
    """Make one thing ours; True for a folder, whose contents come next."""
    seen = entry.stat(follow_symlinks=False)
    is_folder = stat.S_ISDIR(seen.st_mode)
    if seen.st_uid == os.geteuid() and not is_folder:
        return False                              # such as a second name of a file
    if seen.st_uid not in (user.uid, os.geteuid()) or not (
            is_folder or stat.S_ISREG(seen.st_mode) or stat.S_ISLNK(seen.st_mode)):
        raise EngineFailed(f"{entry.path} is no file of {user.name}", hint="nothing of it is used")
    os.chown(entry.path, os.geteuid(), os.getegid(), follow_symlinks=False)
    if not stat.S_ISLNK(seen.st_mode):
        mode = 0o755 if is_folder or seen.st_mode & 0o100 else 0o644
        if stat.S_IMODE(seen.st_mode) != mode:
            os.chmod(entry.path, mode)
    return is_folder


def _is_lent_to(folder: str, user: RunAs) -> bool:
    try:
        seen = os.lstat(folder)
        if (stat.S_IMODE(seen.st_mode), seen.st_gid) != (_LENT, user.gid):
            return False
        with os.scandir(folder) as entries:
            return all(entry.stat(follow_symlinks=False).st_uid == user.uid for entry in entries)
    except OSError:
        return False
