"""What bad days are made of: a small disk, a process without rights, a port that is taken, a run to its end."""
from __future__ import annotations

import contextlib
import ctypes
import datetime
import functools
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass

import pytest

LOG_LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (DEBUG|INFO|WARNING|ERROR) ")
CLONE_NEWNS = 0x00020000
NOWHERE = "http://127.0.0.1:9"          # the discard port: nobody listens there
TOKEN = "llmgw_node_CANARY99_" + "c" * 43


@dataclass(frozen=True)
class Ended:
    """How a command ended: its code, what it logged, and the sentences after that."""

    code: int
    log: str
    said: str

    @property
    def sentence(self):
        """The one line that says what is wrong and why; there is exactly one."""
        lines = [line for line in self.said.splitlines() if not line.startswith("  try: ")]
        assert len(lines) == 1 and lines[0].startswith("llmgw: "), self.said + self.log
        assert "Traceback" not in self.log, self.log
        return lines[0][len("llmgw: "):]

    @property
    def advice(self):
        return "".join(line[len("  try: "):] for line in self.said.splitlines() if line.startswith("  try: "))


def ended(cluster, *words, powerless=False, timeout=60.0, cwd=None):
    """Run ``llmgw.pyz WORDS`` to its end."""
    argv = [sys.executable, "-I", cluster.pyz, *map(str, words)]
    done = subprocess.run(without_rights(argv) if powerless else argv, env=cluster.env, stdin=subprocess.DEVNULL,
                          cwd=str(cwd or cluster.folder), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          timeout=timeout, check=False)
    lines = done.stderr.splitlines()
    logged = [line for line in lines if LOG_LINE.match(line)]
    return Ended(done.returncode, "\n".join(logged), "\n".join(line for line in lines if line not in logged))


def without_rights(argv):
    """Return ``argv`` run without any capability: root, to whom other users' private files are closed."""
    if os.geteuid() == 0:
        if not shutil.which("setpriv"):
            pytest.skip("NOT TESTED: no setpriv here, and root may open every file")
        return ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--", *argv]
    return argv


@contextlib.contextmanager
def others_folder(path):
    """A folder that somebody else keeps for himself."""
    path.mkdir()
    if os.geteuid() == 0:
        os.chown(path, 4711, 4711)
        os.chmod(path, 0o700)
    else:
        os.chmod(path, 0)
    try:
        yield path
    finally:
        os.chmod(path, 0o700)


@contextlib.contextmanager
def taken_port():
    """A loopback port where somebody else listens."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


@functools.lru_cache(maxsize=1)
def _own_mounts():
    """From here on mounts are of this process and its children: nothing of them is left, however it ends."""
    if not ctypes.CDLL(None).unshare(CLONE_NEWNS):
        subprocess.run(["mount", "--make-rprivate", "/"], check=False)


class SmallDisk:
    """A tmpfs at ``path``. Filling it costs no memory: it is made as small as what it holds."""

    def __init__(self, path, size_bytes=64 << 20, options=""):
        self.path, self._size = pathlib.Path(path), size_bytes
        self.path.mkdir(exist_ok=True)
        _own_mounts()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}{options}", "llmgw-test", str(path)],
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode:
            pytest.skip(f"NOT TESTED: this user cannot mount a tmpfs, so no disk is full: {done.stdout.strip()}")

    def free_bytes(self):
        stat = os.statvfs(self.path)
        return stat.f_bavail * stat.f_frsize

    def fill(self, free_bytes=0):
        """Leave just so much free. Whoever writes meanwhile may get a little of it."""
        stat = os.statvfs(self.path)
        self._remount(max((stat.f_blocks - stat.f_bfree) * stat.f_frsize + free_bytes, 4096))

    def empty(self):
        """Give the space back."""
        self._remount(self._size)

    def _remount(self, size):
        for extra in range(0, 64 << 12, 1 << 12):     # what was written since counts too
            done = subprocess.run(["mount", "-o", f"remount,size={size + extra}", str(self.path)], check=False,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if not done.returncode:
                return
        raise AssertionError(done.stdout)

    def close(self):
        subprocess.run(["umount", "-l", str(self.path)], check=False)


@contextlib.contextmanager
def small_disk(path, size_bytes=64 << 20, options=""):
    disk = SmallDisk(path, size_bytes, options)
    try:
        yield disk
    finally:
        disk.close()


@contextlib.contextmanager
def read_only(path):
    """Make a folder read-only under those who use it, as a disk that fails does: for all that is opened from now on."""
    _own_mounts()
    for words in (["--bind", str(path), str(path)], ["-o", "remount,bind,ro", str(path)]):
        done = subprocess.run(["mount", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode:
            pytest.skip(f"NOT TESTED: this user cannot mount, so no folder becomes read-only: {done.stdout.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=False)


class FailingDisk:
    """An ext4 of its own at ``path``, which meets an error on demand: the kernel makes it read-only under everybody."""

    def __init__(self, path, size_bytes):
        self.path, self._image = pathlib.Path(path), pathlib.Path(f"{path}.ext4")
        self.path.mkdir()
        _own_mounts()
        with open(self._image, "wb") as image:
            image.truncate(size_bytes)
        try:
            self._run("mkfs.ext4", "-q", "-F", str(self._image))
            self._mount()
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stdout", None) or str(error)
            pytest.skip(f"NOT TESTED: this user cannot mount an ext4, so no disk fails: {said.strip()}")
        if not os.access(self._trigger, os.W_OK):
            self.close()
            pytest.skip("NOT TESTED: no trigger_fs_error here, so no disk fails")

    def _mount(self):
        self._run("mount", "-o", "loop,errors=remount-ro", str(self._image), str(self.path))
        device = self._run("findmnt", "-no", "SOURCE", str(self.path)).strip()
        self._trigger = pathlib.Path("/sys/fs/ext4", os.path.basename(device), "trigger_fs_error")

    def _run(self, *words):
        return subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True).stdout

    def fail(self):
        self._trigger.write_text("a test of llmgw")

    def repair(self):
        """Repair it as the next boot would: nobody may use it any more."""
        self._run("umount", str(self.path))
        done = subprocess.run(["e2fsck", "-fy", str(self._image)], stdout=subprocess.PIPE, text=True, check=False)
        assert done.returncode in (0, 1), done.stdout              # 1: errors were corrected
        self._mount()

    def close(self):
        subprocess.run(["umount", "-l", str(self.path)], check=False)


@contextlib.contextmanager
def failing_disk(path, size_bytes):
    disk = FailingDisk(path, size_bytes)
    try:
        yield disk
    finally:
        disk.close()


def log_lines(cluster, name):
    """Return [(level, text without the time)] of a role's log; a traceback is part of its line."""
    found = []
    for line in cluster.log(name).read_text(errors="replace").splitlines():
        if LOG_LINE.match(line):
            found.append(line.split(" ", 2)[1:])
        elif found:
            found[-1][1] += "\n" + line
    return [tuple(item) for item in found]


def logged(cluster, name, *words):
    """Return the lines of a role's log that hold all ``words``."""
    return [text for _, text in log_lines(cluster, name) if all(word in text for word in words)]


def repeated(cluster, seconds=5.0):
    """Return the lines of all roles' logs that came a second time within ``seconds``: a fault told again and again."""
    found = []
    for name in cluster.children:
        last = {}
        for line in cluster.log(name).read_text(errors="replace").splitlines():
            if LOG_LINE.match(line):
                stamp, text = line.split(" ", 1)
                at = datetime.datetime.strptime(stamp, "%Y-%m-%dT%H:%M:%S.%fZ").timestamp()
                if at - last.get(text, float("-inf")) < seconds:
                    found.append(f"{name}: {line}")
                last[text] = at
    return found
