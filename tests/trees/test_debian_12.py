"""A Debian 12 node in its minimal form, which has no libgomp1: it gets it, or says why not."""
from __future__ import annotations

import os
import pathlib
import subprocess

import pytest

from tests.trees.conftest import PYTHON, host_glibc
from tests.whole.cluster import until

SUITE = "bookworm"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(
    host_glibc() > (2, 36), reason="NOT TESTED: what this machine builds is too new for Debian 12")]
LACKS = "llama.cpp b10991: libgomp.so.1 is missing: package libgomp1 brings it"
HOLD = """
import fcntl, sys, time
handle = open("/var/lib/dpkg/lock-frontend", "w")
fcntl.lockf(handle, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def bare(tree):
    tree.without("libgomp1")


def notes(site, node):
    """Return what ctl nodes shows of a node, on one line."""
    shown = site.ctl("nodes")
    return " ".join(shown.partition(node)[2].split())


@pytest.mark.parametrize("name, config, user, reason, command", [
    ("not-allowed", "install_packages: false\n", "", "and install_packages is false in agent.yaml",
     "apt-get install -y libgomp1"),
    ("not-root", "", "nobody:nogroup", "and llmgw does not run as root here", "sudo apt-get install -y libgomp1")])
def test_a_node_that_may_not_install_packages_names_the_package_and_the_command(site, tree, name, config, user, reason,
                                                                              command):
    site.start_node(tree, name, config, user)
    try:
        seen = site.wait_engine(name, lambda engine: engine["phase"] == "missing")
        assert seen["message"].startswith(f"{LACKS}, {reason}; tried again in") and seen["hint"] == command
        assert not seen["usable"] and not tree.has_package("libgomp1")
        # the node tries again in between
        until("ctl nodes says it", lambda: f"{LACKS}, {reason}" in notes(site, name), 120)
        until("ctl engines says it", lambda: f"try: {command}" in " ".join(site.ctl("engines").split()), 120)
        if not user:
            code, shown = site.doctor(tree, name)
            assert code == 3 and "libgomp.so.1 is missing: package libgomp1 brings it" in " ".join(shown.split())
            assert f"try: {command}" in shown
    finally:
        site.stop(name)


def test_a_node_without_a_network_says_so_and_goes_on_trying(site, tree):
    unreachable = "http://127.0.0.1:9"
    site.start_node(tree, "offline", http_proxy=unreachable, https_proxy=unreachable)
    try:
        seen = site.wait_engine("offline", lambda engine: engine["phase"] == "failed")
        assert f"{LACKS}, and apt-get does not reach its servers: " in seen["message"]
        assert "127.0.0.1" in seen["message"] and "tried again in" in seen["message"]
    finally:
        site.stop("offline")


def test_a_held_lock_is_waited_for_and_then_the_engine_runs_and_serves(site, tree, gemma):
    holder = subprocess.Popen(tree.words(PYTHON, "-c", HOLD), env=tree.env, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        data = site.start_node(tree, "node-12", LLMGW_REHEARSE_RECHECK_SECONDS="2")
        seen = site.wait_engine("node-12", lambda engine: engine["phase"] == "failed")
        assert f"{LACKS}, and apt-get is used by another program: Could not get lock" in seen["message"]
        assert f"process {holder.pid}" in seen["message"] and not seen["usable"]
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    seen = site.wait_engine("node-12", lambda engine: engine["usable"])
    assert seen["phase"] == "installed" and "build 10991" in seen["message"]
    assert tree.has_package("libgomp1") and "libgomp1" in (data / "data" / "packages.log").read_text()
    site.ctl("mirror", "import", gemma, "--name", "gemma-3-270m")
    site.wait_ready()
    assert site.doctor(tree, "node-12")[0] == 0
    user = next(line for line in (tree.root / "etc/passwd").read_text().splitlines() if line.startswith("llmgw-engine:"))
    uid, shell = user.split(":")[2], user.split(":")[6]
    assert uid != "0" and shell == "/usr/sbin/nologin"
    (engine,) = [pid for pid in tree.processes() if "llama-server" in os.readlink(f"/proc/{pid}/exe")]
    assert f"\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n" in pathlib.Path(f"/proc/{engine}/status").read_text()


def test_a_library_that_goes_is_told_at_the_next_check_while_what_runs_runs_on(site, tree):
    """After the node of the test before: it serves, and looks at its engine every two seconds."""
    if "node-12" not in site.children:
        pytest.skip("needs the node of the test before")
    # the package was purged for this test, as an unrelated upgrade may do
    until("the next check brings it back", lambda: tree.has_package("libgomp1"))
    site.wait_engine("node-12", lambda engine: engine["usable"])
    (replica,) = site.items("replicas")
    own = next((tree.root / "srv/node-12/data/engines/llama.cpp/b10991").glob("libggml-base.so.*.*"))
    own.rename(own.with_suffix(".away"))
    seen = site.wait_engine("node-12", lambda engine: not engine["usable"])
    assert seen["phase"] == "missing" and "libggml-base.so.0 is missing" in seen["message"]
    until("ctl nodes says it", lambda: "libggml-base.so.0 is missing" in notes(site, "node-12"))
    (after,) = site.items("replicas")
    assert (after["id"], after["state"]) == (replica["id"], "ready"), "what runs is left alone"
    own.with_suffix(".away").rename(own)
    site.wait_engine("node-12", lambda engine: engine["usable"])
    until("ctl nodes is silent again", lambda: "libggml-base" not in notes(site, "node-12"))
    site.stop("node-12")
