"""The built file on each Debian that a node may have: control plane, ctl and doctor run there, from a noexec mount too."""
from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from tests.trees.conftest import PYTHON, PYZ, unpacked
from tests.whole.cluster import until

pytestmark = pytest.mark.slow
SUITES = {"bullseye": "3.9.2", "bookworm": "3.11.", "trixie": "3.13.", "sid": "3.1"}
NOEXEC = ("mount -t tmpfs -o noexec tmpfs /mnt && mkdir -m 700 /mnt/home && cp /opt/llmgw.pyz /mnt && ! /mnt/llmgw.pyz && "
          "export HOME=/mnt/home && sh /mnt/llmgw.pyz --version && sh /mnt/llmgw.pyz --version && ls -A /mnt/home")


@pytest.fixture(scope="module", params=SUITES)
def tree(request, bring, pyz, tmp_path_factory):
    with unpacked(request.param, pyz, tmp_path_factory) as made:
        made.version = SUITES[request.param]
        yield made


def test_it_starts_and_looks_at_the_machine(tree):
    started = tree.run("sh", PYZ, "--version")
    assert started.returncode == 0 and started.stdout.startswith("llmgw "), started.stdout
    done = tree.run(PYTHON, "-I", PYZ, "doctor", "--json", "--data-dir", "/srv/nothing")
    assert done.returncode in (0, 3) and json.loads(done.stdout)["engines"], done.stdout
    told = tree.run(PYTHON, "--version").stdout.split()[1]
    assert told.startswith(tree.version)


@pytest.mark.parametrize("words", [NOEXEC, "HOME=/nowhere/at/all exec sh /opt/llmgw.pyz --version",
                                   "unset HOME; exec sh /opt/llmgw.pyz --version"], ids=["noexec", "no such home", "no home"])
def test_it_starts_without_a_place_that_is_good_for_programs(tree, words):
    done = tree.run("sh", "-c", words)
    assert done.returncode == 0 and "llmgw 0." in done.stdout and "Traceback" not in done.stdout, done.stdout


def test_a_control_plane_runs_there_although_its_file_is_replaced(tree):
    own = tree.root / "srv" / "own.pyz"
    shutil.copy(tree.root / PYZ.lstrip("/"), own)
    (tree.root / "srv" / "server.yaml").write_text("cluster: there\nlisten: 127.0.0.1:0\n")
    log = tree.root / "srv" / "server.log"
    with open(log, "ab") as out:
        server = subprocess.Popen(tree.words(PYTHON, "-W", "error", "-I", "/srv/own.pyz", "server", "--config", "/srv/server.yaml",
                                             "--data-dir", "/srv/server"), env=tree.env, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    endpoint = tree.root / "srv" / "server" / "endpoint.json"

    def listens():
        assert server.poll() is None, log.read_text()
        return endpoint.exists()
    try:
        until("the server listens", listens, 120)
        own.with_suffix(".new").write_text("another one")
        own.with_suffix(".new").replace(own)
        asked = ("--server", json.loads(endpoint.read_text())["url"], "--token-file", "/srv/server/tokens/admin")
        for words in (("nodes",), ("keys", "create", "someone"), ("keys", "list"), ("token", "list"), ("mirror", "gc"),
                      ("events",)):
            done = tree.run(PYTHON, "-W", "error", "-I", PYZ, "ctl", *words, *asked)
            assert done.returncode == 0, done.stdout
    finally:
        server.terminate()
        code = server.wait(60)
    assert code == 0 and "Traceback" not in log.read_text(), log.read_text()


def test_the_smallest_python_of_debian_gets_a_sentence_that_names_the_package(tree):
    """What python3-minimal alone has; the last test, for the tree is without the rest after it."""
    library = tree.run("sh", "-c", "dpkg-query --show --showformat '${Package}\\n' 'libpython3.*-stdlib'").stdout.split()
    done = tree.run("dpkg", "--purge", "--force-depends", *library)
    assert library and done.returncode == 0, done.stdout
    for words in (("server",), ("ctl", "nodes"), ("agent", "--server", "http://127.0.0.1:9")):
        said = tree.run("sh", PYZ, *words)
        assert said.returncode == 69 and "apt-get install" in said.stdout and "Traceback" not in said.stdout, said.stdout
