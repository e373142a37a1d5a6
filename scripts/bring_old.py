"""Bring a llama-server for old systems: built once inside a Debian 11 tree (glibc 2.31), kept in the cache folder.

    python scripts/bring_old.py [--here-too]    NAME=PATH on stdout

`--here-too`: where no llama-server was brought yet, this one is also this machine's own (it runs on newer systems),
and nothing is built twice.
"""
from __future__ import annotations

import functools
import os
import shutil
import sys
import tarfile
from pathlib import Path
from typing import Dict, List

import bring
import trees
from bring import RELEASE, Archive, CannotBring

SUITE = "bullseye"
ENTER = ('mount -t proc proc "$1/proc" && mount --rbind /dev "$1/dev" && root=$1 && shift && exec chroot "$root" "$@"')


def old_archive() -> Archive:
    """Return the archive of a static llama-server that needs glibc 2.31 only; build it when there is none."""
    path = bring.cache_dir() / f"llama-{RELEASE}-{SUITE}" / f"llama-{RELEASE}-bin-ubuntu-{bring.asset_arch()}.tar.gz"
    if not bring.is_whole(path):
        bring.locked(path, build_old)
    return Archive(path, bring.record_of(path)["sha256"], path.name)


def build_old(path: Path) -> None:
    """Build in the tree with its own compiler, and pack as the release does."""
    tar, work = trees.tree_tar(SUITE), bring.make(path.parent / "work")
    root = work / "tree"
    if not (root / ".has-compiler").exists():
        shutil.rmtree(root, ignore_errors=True)
        bring.run(["tar", "--extract", "--numeric-owner", "--file", str(tar), "--directory", str(bring.make(root))],
                  "unpacking the tree of Debian 11")
        enter(root, ["apt-get", "update", "-qq"], "asking its mirror")
        enter(root, ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "g++", "make", "cmake"],
              "installing its compiler")
        (root / ".has-compiler").touch()
    if not (root / "src").exists():
        source = bring.source_tree(work, bring.build_tools(work))
        shutil.copytree(source / "llama.cpp", root / "src.tmp", symlinks=True)
        os.replace(root / "src.tmp", root / "src")
    enter(root, ["cmake", "-S", "/src", "-B", "/made", *bring.CMAKE_OPTIONS, *bring.STATIC_OPTIONS],
          "configuring llama-server")
    enter(root, ["cmake", "--build", "/made", "--target", "llama-server", f"-j{os.cpu_count() or 1}"],
          "building llama-server for old systems (three to ten minutes)")
    server = path.with_name("llama-server")
    shutil.copy2(root / "made" / "bin" / "llama-server", server)
    bring.strip([server])
    bring.must_be_release(server)
    shutil.copy2(root / "src" / "LICENSE", path.with_name("LICENSE"))
    bring.pack_archive(path)
    shutil.rmtree(work, ignore_errors=True)


def here_too(old: Archive) -> None:
    """Let that program be what bring.llama_server() returns, when there is none yet."""
    path = bring.cache_dir() / f"llama-{RELEASE}" / "llama-server"
    if not bring.is_whole(path):
        bring.locked(path, lambda target: take_out(old, target))


def take_out(old: Archive, path: Path) -> None:
    scratch = path.with_name("llama-server.tmp")
    with tarfile.open(old.path) as archive:
        for name, target in (("llama-server", scratch), ("LICENSE", path.with_name("LICENSE"))):
            source = archive.extractfile(f"llama-{RELEASE}/{name}")
            if source is None:
                raise CannotBring(f"{old.path} holds no {name}: remove it, and run this again")
            with source, open(target, "wb") as file:
                shutil.copyfileobj(source, file)
    scratch.chmod(0o755)
    bring.must_be_release(scratch)
    bring.give_name(scratch, path)


def enter(root: Path, words: List[str], what: str) -> None:
    """Run a program in the tree, with the network of this machine; its mounts end with it."""
    for name in ("resolv.conf", "hosts"):
        shutil.copy(Path("/etc") / name, root / "etc" / name)
    for part in Path("/etc/apt/apt.conf.d").glob("*proxy*"):     # what apt-get is told here to reach its mirror
        shutil.copy(part, root / "etc/apt/apt.conf.d" / part.name)
    environment: Dict[str, str] = {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8",
        "DEBIAN_FRONTEND": "noninteractive",
        **{name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}}
    bring.run(["unshare", "--mount", "--propagation", "private", "sh", "-c", ENTER, "sh", str(root), *words], what,
              environment, why="the tree needs a Debian mirror, and a machine where root may mount")


def main(words: List[str]) -> int:
    if words not in ([], ["--here-too"]):
        print("usage: bring_old.py [--here-too]", file=sys.stderr)
        return 2
    return bring.tell("bring_old", {"old": functools.partial(brought, bool(words))})


def brought(is_here_too: bool) -> Path:
    old = old_archive()
    if is_here_too:
        here_too(old)
    return old.path


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
