"""A Debian 11 node (glibc 2.31) and an engine that was built on a newer system."""
from __future__ import annotations

import json
import re
import shutil

import pytest

from tests.fakes.cuda_archive import GPU, cuda_archives, nvidia_smi
from tests.trees.conftest import PYTHON, PYZ, host_glibc
from tests.whole.cluster import until

SUITE = "bullseye"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(
    host_glibc() <= (2, 31), reason="NOT TESTED: what this machine builds is not too new for Debian 11")]


def missing(tree, *words):
    """Return the exit code of doctor in the tree and {(engine, requirement): (sentence, hint)} of what it misses."""
    done = tree.run(PYTHON, "-I", PYZ, "doctor", "--json", "--data-dir", "/srv/nothing", *words)
    engines = json.loads(done.stdout)["engines"]
    return done.returncode, {(engine["engine"], item["name"]): (item["message"], item["hint"])
                             for engine in engines for item in engine["requirements"] if item["status"] == "missing"}


@pytest.fixture
def bare(tree):
    for package in ("libgomp1", "gcc"):
        tree.without(package)
    if shutil.disk_usage(tree.root).free < 26 * 10**9:
        pytest.skip("there are less than 25 GB of free disk here, which would be missing too")


def test_doctor_names_exactly_what_a_minimal_system_lacks(tree, bare):
    lacks = ("libgomp.so.1 is missing: package libgomp1 brings it", "apt-get install -y libgomp1")
    assert missing(tree) == (3, {("llama.cpp", "libraries"): lacks})
    assert missing(tree, "vllm", "sglang") == (0, {}), "without a GPU they are skipped, which is no fault"


def test_stand_in_doctor_names_exactly_what_it_lacks_for_engines_of_packages(tree, bare):
    """A program stands for nvidia-smi: an H100 with a driver that will do."""
    gcc = ("gcc or the headers of the C library are missing: packages gcc and libc6-dev bring them",
           "apt-get install -y gcc libc6-dev")
    smi = nvidia_smi(tree.root / "usr" / "bin")
    try:
        assert missing(tree, "vllm") == (3, {("vllm", "gcc"): gcc})
        assert missing(tree, "sglang") == (3, {
            ("sglang", "glibc"): ("glibc is 2.31, 2.34 or newer is needed", "use a newer system"), ("sglang", "gcc"): gcc})
        shown = tree.run(PYTHON, "-I", PYZ, "doctor", "vllm", "--data-dir", "/srv/nothing").stdout
        assert [line.split()[0] for line in shown.splitlines() if " missing" in line and not line.startswith(" ")] == [
            "vllm:", "gcc"], shown
    finally:
        smi.unlink()


def test_a_build_for_a_newer_system_is_refused_with_each_library_once(site, tree):
    site.start_node(tree, "node-11")
    seen = site.wait_engine("node-11", lambda engine: engine["phase"] in ("missing", "failed", "installed"))
    assert seen["phase"] == "missing" and not seen["usable"]
    sentence = seen["message"].split("; tried again in")[0]
    libraries = re.findall(r"(lib\S+) is (?:missing|too old \(needs [A-Z]+_[0-9.]+\))", sentence)
    assert {"libc.so.6", "libstdc++.so.6"} <= set(libraries) and len(libraries) == len(set(libraries)), sentence
    assert re.search(r"libc\.so\.6 is too old \(needs GLIBC_2\.3[2-9]\)", sentence)
    assert re.search(r"libstdc\+\+\.so\.6 is too old \(needs GLIBCXX_3\.4\.\d\d\)", sentence)
    # the node tries again in between
    until("ctl nodes says it", lambda: sentence in " ".join(site.ctl("nodes").split()), 120)
    assert "use a newer system on this node" in seen["hint"]
    assert not tree.has_package("libgomp1"), "no package mends a library that is too old"
    code, _ = site.doctor(tree, "node-11")
    assert code == 3
    assert not list((tree.root / "srv/node-11/data/engines").glob("*/b10991")), "nothing is marked as installed"
    site.stop("node-11")


def test_stand_in_a_cuda_build_for_a_newer_system_says_which_other_builds_there_are(site, tree, release_archive, tmp_path):
    """As on a GPU node with an old system; a program stands for nvidia-smi."""
    for label in ("12.8", "13.0"):
        for archive in cuda_archives(tmp_path, release_archive, label):
            site.ctl("mirror", "import-engine", archive.path, "--sha256", archive.sha256)
    smi = nvidia_smi(tree.root / "usr" / "bin", GPU.replace("590.48.01", "620.10"))
    site.start_node(tree, "gpu-11")
    try:
        seen = site.wait_engine("gpu-11", lambda engine: engine["phase"] in ("missing", "failed", "installed"))
        assert seen["phase"] == "missing" and "libc.so.6 is too old" in seen["message"]
        assert seen["hint"] == ("take an older CUDA build with cuda: 12.8 under engines: (this one is 13.0), or the CPU "
                                "build with cpu: true under engines:, or use a newer system on this node")
    finally:
        smi.unlink()
        site.stop("gpu-11")
