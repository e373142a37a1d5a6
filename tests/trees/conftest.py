"""Nodes on older systems: the built llmgw.pyz inside trees made by debootstrap, their control plane outside."""
from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest

from tests.conftest import ROOT, load_script
from tests.whole.cluster import Cluster, free_block, until

# A mount namespace of its own: what is mounted for the tree is gone with the last process in it.
ENTER = ('mount -t proc proc "$1/proc" && mount --rbind /dev "$1/dev" && root=$1 && shift && '
         'exec chroot $CHROOT_WORDS "$root" "$@"')
PYZ, PYTHON = "/opt/llmgw.pyz", "/usr/bin/python3"


class Tree:
    """One unpacked tree. Everything in it is run in a chroot with /proc and /dev."""

    def __init__(self, tar, root, pyz):
        self.root = pathlib.Path(root)
        subprocess.run(["tar", "--extract", "--numeric-owner", "--file", str(tar), "--directory", str(root)], check=True)
        for name in ("resolv.conf", "hosts"):
            shutil.copy(pathlib.Path("/etc") / name, self.root / "etc" / name)
        shutil.copy(pyz, self.root / PYZ.lstrip("/"))
        # what apt-get is told on this machine to reach its mirror
        for part in pathlib.Path("/etc/apt/apt.conf.d").glob("*proxy*"):
            shutil.copy(part, self.root / "etc/apt/apt.conf.d" / part.name)
        self.env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8",
                    **{name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}}

    def words(self, *argv):
        return ["unshare", "--mount", "--propagation", "private", "sh", "-c", ENTER, "sh", str(self.root), *map(str, argv)]

    def run(self, *argv, env=None, timeout=300):
        return subprocess.run(self.words(*argv), env={**self.env, **(env or {})}, stdin=subprocess.DEVNULL, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout, check=False)

    def has_package(self, name):
        return "ok installed" in self.run("dpkg-query", "--show", "--showformat", "${Status}", name).stdout

    def without(self, name):
        """Make sure that a package is not installed."""
        if self.has_package(name):
            done = self.run("dpkg", "--purge", name)
            assert done.returncode == 0, done.stdout

    def processes(self):
        """Return the pids of all that runs inside."""
        found = []
        for entry in pathlib.Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and pathlib.Path(os.readlink(entry / "root")) == self.root:
                    found.append(int(entry.name))
        return found

    def end(self):
        def gone():
            for pid in self.processes():
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            return not self.processes()
        until("nothing runs in the tree", gone, 30)
        shutil.rmtree(self.root)


class Site(Cluster):
    """A control plane on this machine whose nodes live in trees."""

    def start_node(self, tree, name, config="", user="", **env):
        """Start an agent in the tree; ``config`` is the rest of its agent.yaml."""
        ports = free_block(16)
        inside = f"/srv/{name}"
        folder = tree.root / inside.lstrip("/")
        folder.mkdir(parents=True)
        shutil.copy(self.token("node"), folder / "token")
        (folder / "agent.yaml").write_text(
            f"server: [{self.server['url']}]\nnode: {name}\ntoken_file: {inside}/token\ndata_dir: {inside}/data\n"
            f"gate_port: {ports}\nengine_ports: {ports + 1}\n{config}")
        if user:
            done = tree.run("chown", "-R", user, inside)
            assert done.returncode == 0, done.stdout
        words = {"CHROOT_WORDS": f"--userspec={user}"} if user else {}
        with open(self.log(name), "ab") as log:
            self.children[name] = subprocess.Popen(
                tree.words(PYTHON, "-I", PYZ, "agent", "--config", f"{inside}/agent.yaml", "--owned"),
                env={**tree.env, "HOME": inside, **words, **env}, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        return folder

    def engine(self, node):
        """Return what the node says of its engine, None before it says anything."""
        seen = next((item for item in self.items("nodes") if item["name"] == node), None)
        return next((item for item in seen["engines"] if item["name"] == "llama.cpp"), None) if seen else None

    def wait_engine(self, node, check, seconds=120.0):
        """Wait until the node says something of its engine that ``check`` likes; return that."""
        last = []

        def looks_right():
            self.check()
            last[:] = [self.engine(node)]
            return last[0] is not None and check(last[0]) and last[0]
        try:
            return until(f"{node}'s engine", looks_right, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}: {last}\n{self.log(node).read_text()[-3000:]}") from None

    def doctor(self, tree, node):
        """Run doctor in the tree on a node's data; return (exit code, what it printed)."""
        done = tree.run(PYTHON, "-I", PYZ, "doctor", "llama.cpp", "--config", f"/srv/{node}/agent.yaml")
        assert "Traceback" not in done.stdout, done.stdout
        return done.returncode, done.stdout


@pytest.fixture(scope="module")
def tree(request, bring, pyz, tmp_path_factory):
    """The tree of the module's SUITE. NOT TESTED is said when this machine or its network cannot have it."""
    with unpacked(request.module.SUITE, pyz, tmp_path_factory) as made:
        yield made


@contextlib.contextmanager
def unpacked(suite, pyz, tmp_path_factory):
    """Make a tree of that suite, and end all that runs in it."""
    trees = load_script(ROOT / "scripts" / "trees.py")
    try:
        tar = trees.tree_tar(suite)
    except trees.NoTree as error:
        pytest.skip(f"NOT TESTED on {trees.SUITES[suite]}: {error}")
    made = Tree(tar, tmp_path_factory.mktemp(suite), pyz)
    try:
        tried = made.run("true")
        if tried.returncode:
            pytest.skip(f"NOT TESTED: this machine does not let a test mount and chroot: {tried.stdout.strip()}")
        yield made
    finally:
        made.end()


@pytest.fixture(scope="module")
def site(tree, pyz, qa_template, release_archive, tmp_path_factory):
    """A control plane that has the archive in the release's own shape."""
    made = Site(pyz, tmp_path_factory.mktemp("site"), qa_template)
    try:
        made.start_server()
        made.ctl("mirror", "import-engine", release_archive.path, "--sha256", release_archive.sha256)
        yield made
    finally:
        made.close()


def host_glibc():
    """Return this machine's glibc as numbers: what is built here needs at most that."""
    text = os.confstr("CS_GNU_LIBC_VERSION") if sys.platform == "linux" else ""
    return tuple(int(part) for part in (text or "glibc 0").split()[-1].split("."))
