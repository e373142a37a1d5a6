"""Bring the file trees of older systems, as tar files in the user's cache folder, for tests on real nodes.

debootstrap makes each once, in its minimal form with a python3 added, and needs root and a Debian mirror.

    python scripts/trees.py [bookworm] [bullseye] [trixie] [sid]     paths on stdout, one `NAME=PATH` a line
"""
from __future__ import annotations

import functools
import os
import shutil
import sys
from pathlib import Path
from typing import List

from bring import CannotBring, cache_dir, give_name, is_whole, locked, make, run, tell

SUITES = {"bookworm": "Debian 12", "bullseye": "Debian 11", "trixie": "Debian 13", "sid": "Debian sid"}


class NoTree(CannotBring):
    """This machine, or its network, cannot make such a tree; nothing is wrong with the project."""


def tree_tar(suite: str) -> Path:
    """Return the tar file of a minimal system of that suite; make it when there is none."""
    path = cache_dir() / "trees" / suite / f"{suite}-minbase-python3.tar"
    return path if is_whole(path) else locked(path, make_tree)


def make_tree(path: Path) -> None:
    suite = path.parent.name
    must_be_able()
    folder = path.parent / "tree.tmp"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        run(["debootstrap", "--variant=minbase", "--include=python3", suite, str(make(folder))],
            f"making a tree of {SUITES[suite]} once (one to three minutes); kept in {path.parent}",
            why="debootstrap needs a Debian mirror: check the network")
    except CannotBring as error:
        raise NoTree(str(error)) from error
    for name in ("resolv.conf", "hosts"):          # those of the day it was made are of no use
        (folder / "etc" / name).unlink(missing_ok=True)
    scratch = path.with_name(path.name + ".tmp")
    run(["tar", "--create", "--numeric-owner", "--one-file-system", "--exclude=./var/cache/apt/archives/*.deb",
         "--exclude=./dev/*", "--file", str(scratch), "--directory", str(folder), "."], "packing the tree")
    give_name(scratch, path)
    shutil.rmtree(folder, ignore_errors=True)


def must_be_able() -> None:
    if sys.platform != "linux" or os.geteuid() != 0:
        raise NoTree("a tree of another system is made and entered by root on Linux only")
    for tool in ("debootstrap", "unshare", "chroot"):
        if not shutil.which(tool):
            raise NoTree(f"{tool} is not installed here; Debian/Ubuntu: apt-get install debootstrap util-linux")


def main(words: List[str]) -> int:
    unknown = [word for word in words if word not in SUITES]
    if unknown:
        print(f"usage: trees.py [{'] ['.join(SUITES)}]", file=sys.stderr)
        return 2
    return tell("trees", {word: functools.partial(tree_tar, word) for word in words or SUITES})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
