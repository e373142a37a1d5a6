"""Installing packages: programs that stand for a package manager, and the real apt-get where it can be asked."""
from __future__ import annotations

import os
import pathlib
import shutil
import stat
import time

import pytest

from llmgw.domain.errors import PackagesFailed
from llmgw.system import packages


def stand_in(folder, name, script):
    path = folder / name
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def log(tmp_path):
    return str(tmp_path / "packages.log")


def test_stand_in_it_is_asked_nothing_and_gets_a_plain_environment(tmp_path, log, monkeypatch):
    monkeypatch.setenv("https_proxy", "http://proxy:1")
    monkeypatch.setenv("LLMGW_TOKEN", "secret")
    program = stand_in(tmp_path, "apt-get", "env; echo \"umask $(umask)\"; echo \"words $*\"; read x || echo no input\n")
    before = os.umask(0o077)
    try:
        packages.install((program, "install", "libgomp1"), (), log)
    finally:
        os.umask(before)
    said = pathlib.Path(log).read_text().splitlines()
    assert {"DEBIAN_FRONTEND=noninteractive", "LC_ALL=C", "https_proxy=http://proxy:1", "umask 0022",
            "words install libgomp1", "no input"} <= set(said)
    assert not any("secret" in line or line.startswith("PYTHON") for line in said)
    assert stat.S_IMODE(os.stat(log).st_mode) == 0o600


def test_stand_in_stale_lists_are_fetched_and_it_is_tried_once_more(tmp_path, log):
    program = stand_in(tmp_path, "apt-get", f"""
if [ "$1" = update ]; then touch {tmp_path}/lists; exit 0; fi
[ -e {tmp_path}/lists ] && exit 0
echo "E: Unable to locate package $2"; exit 100
""")
    packages.install((program, "install", "libgomp1"), (program, "update"), log)


def test_stand_in_no_network_while_the_lists_are_fetched_is_the_reason_and_not_the_unknown_package(tmp_path, log):
    program = stand_in(tmp_path, "apt-get", """
if [ "$1" = update ]; then echo "W: Failed to fetch x  Temporary failure resolving 'mirror.example'"; exit 0; fi
echo "E: Unable to locate package $2"; exit 100
""")
    with pytest.raises(PackagesFailed) as caught:
        packages.install((program, "install", "libgomp1"), (program, "update"), log)
    assert "does not reach its servers" in caught.value.message and "mirror.example" in caught.value.message
    assert caught.value.waits


@pytest.mark.parametrize("said, words, waits", [
    ("E: Could not get lock /var/lib/dpkg/lock-frontend. It is held by process 42 (apt-get)",
     "is used by another program: Could not get lock /var/lib/dpkg/lock-frontend. It is held by process 42", True),
    ("E: dpkg was interrupted, you must manually run 'dpkg --configure -a' to correct the problem.",
     "not in order: dpkg was interrupted, you must manually run 'dpkg --configure -a'", False),
    ("E: You don't have enough free space in /var/cache/apt/archives/.", "has no room", False),
    ("E: Unable to locate package libgomp1", "finds no such package", False),
    ("Something new", "fails: Something new", False),
])
def test_stand_in_what_is_in_the_way_becomes_a_sentence(tmp_path, log, said, words, waits):
    program = stand_in(tmp_path, "apt-get", f"cat <<'X'\n{said}\nX\nexit 100\n")
    with pytest.raises(PackagesFailed) as caught:
        packages.install((program, "install", "libgomp1"), (), log)
    assert words in caught.value.message and caught.value.waits is waits


def test_stand_in_one_that_does_not_end_is_ended_and_told(tmp_path, log):
    program = stand_in(tmp_path, "dnf", "echo 'Waiting for process with pid 7 to finish.'; exec sleep 60\n")
    begun = time.monotonic()
    with pytest.raises(PackagesFailed, match="used by another program"):
        packages.install((program,), (), log, deadline_seconds=5)
    program = stand_in(tmp_path, "yum", "echo 'Downloading'; exec sleep 60\n")
    with pytest.raises(PackagesFailed, match="is not done after 0.5 seconds"):
        packages.install((program,), (), log, deadline_seconds=0.5)
    assert time.monotonic() - begun < 30


def test_a_package_manager_that_is_not_there_is_a_sentence(log):
    with pytest.raises(PackagesFailed, match="cannot run /no/apt-get"):
        packages.install(("/no/apt-get", "install"), (), log)


def test_managers_of_this_machine():
    assert packages.managers(("apt-get", "no-such-manager")) == (("apt-get",) if shutil.which("apt-get") else ())


@pytest.mark.skipif(not shutil.which("apt-get") or os.geteuid() != 0, reason="needs apt-get, as root")
def test_the_real_apt_get_names_a_package_that_does_not_exist(log):
    with pytest.raises(PackagesFailed) as caught:
        packages.install(("apt-get", "install", "--yes", "--simulate", "llmgw-no-such-package"), (), log)
    assert "llmgw-no-such-package" in caught.value.message
