"""A Debian 11 machine (Python 3.9.2, OpenSSL 1.1.1) with a network of its own joins with the printed line, as printed."""
from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import ssl
import subprocess
import urllib.error
import urllib.request

import pytest

from tests.conftest import ROOT
from tests.trees.conftest import PYTHON, PYZ, Site
from tests.whole.cluster import MODEL, SERVER_YAML, free_block, until

SUITE = "bullseye"
pytestmark = pytest.mark.slow
HERE, THERE = "198.18.77.1", "198.18.77.2"       # of the range that is kept for tests of networks


@pytest.fixture(scope="module")
def network():
    """A network namespace with one cable to this machine; its loopback is not ours."""
    name, ours, theirs = f"llmgw-{os.getpid()}", f"lg{os.getpid()}a"[-14:], f"lg{os.getpid()}b"[-14:]
    steps = [["ip", "netns", "add", name], ["ip", "link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", name],
             ["ip", "addr", "add", f"{HERE}/30", "dev", ours], ["ip", "link", "set", ours, "up"],
             ["ip", "-n", name, "addr", "add", f"{THERE}/30", "dev", theirs], ["ip", "-n", name, "link", "set", theirs, "up"],
             ["ip", "-n", name, "link", "set", "lo", "up"]]
    try:
        for words in steps:
            done = subprocess.run(words, capture_output=True, text=True, check=False) if shutil.which("ip") else None
            if done is None or done.returncode:
                pytest.skip(f"NOT TESTED: no network namespace can be made here: {done.stderr.strip() if done else 'no ip'}")
        yield name
    finally:
        for words in (["ip", "netns", "del", name], ["ip", "link", "del", ours]):
            with contextlib.suppress(OSError):
                subprocess.run(words, capture_output=True, check=False)


def needs(tree, tool):
    """Install a package of one tool in the tree."""
    if tree.run("sh", "-c", f"command -v {tool}").returncode:
        done = tree.run("sh", "-c", f"apt-get update -qq && apt-get install -y -qq --no-install-recommends {tool}", timeout=600)
        if done.returncode:
            pytest.skip(f"NOT TESTED on Debian 11: its mirror gives no {tool}: {done.stdout[-300:]}")


@pytest.fixture(scope="module")
def joined(tree, network, pyz, qa_template, tmp_path_factory):
    """The line, run as printed in the tree and the namespace; it is a root shell there."""
    needs(tree, "curl")
    site = Site(pyz, tmp_path_factory.mktemp("joins"), qa_template)
    site.config.write_text(SERVER_YAML.replace("127.0.0.1:0", "0.0.0.0:0") + f"names: [{HERE}]\n")
    try:
        site.start_server()
        site.env["LLMGW_CA"] = site.server["ca_file"]
        line = site.ctl("token", "create", "--role", "node").strip()
        assert f"https://{HERE}:" in line
        ports = free_block(16)
        inside = tree.root / "root" / "joins"
        inside.mkdir()
        with open(site.log("node"), "ab") as log:
            site.children["node"] = subprocess.Popen(
                ["ip", "netns", "exec", network, *tree.words(
                    "sh", "-c", f"cd /root/joins && {line.replace('sh ./llmgw.pyz', 'exec sh ./llmgw.pyz')} --node old "
                    f"--gate-port {ports} --engine-ports {ports + 1} --engine-user root --owned")],
                env={"PATH": os.environ["PATH"], "HOME": "/root", "LANG": "C.UTF-8"}, stdin=subprocess.DEVNULL, stdout=log,
                stderr=log)
        site.line = line
        yield site
    finally:
        site.close()


def test_the_line_as_printed_ends_in_a_node_that_is_ready(joined, tree):
    def ready():
        joined.check()
        return [node for node in joined.items("nodes") if node["state"] == "ready" and node["probed"]]
    node, = until("the node is ready", ready, 180)
    assert node["name"] == "old" and node["facts"]["os"]["version_id"] == "11" and node["facts"]["python"].startswith("3.9.2")
    assert node["identity"]["address"] == THERE
    held = tree.root / "var" / "lib" / "llmgw" / "agent" / "state" / "credential.json"
    assert held.stat().st_mode & 0o777 == 0o600
    secret = re.search(r"llmgw1\.[A-Za-z0-9._-]+", joined.line).group(0)
    assert secret not in joined.log("node").read_text() and json.loads(held.read_text())["token"] not in joined.logs()


def test_it_serves_the_real_model_through_the_router(joined, bring, gemma):
    """With a llama-server that was built on Debian 11: scripts/bring_old.py makes it, once."""
    folder = bring.cache_dir() / f"llama-{bring.RELEASE}-{SUITE}"
    path = folder / f"llama-{bring.RELEASE}-bin-ubuntu-{bring.asset_arch()}.tar.gz"
    if not bring.is_whole(path):
        pytest.skip("NOT TESTED: no llama-server for Debian 11 was built here yet: python scripts/bring_old.py (ten minutes)")
    joined.ctl("mirror", "import-engine", path, "--sha256", bring.sha256_of(path))
    joined.ctl("mirror", "import", gemma, "--name", MODEL)
    joined.start("router", "router", "--server", joined.server["url"], "--token-file", joined.token("router"), "--ca-file",
                 joined.server["ca_file"], "--listen", "127.0.0.1:0", "--data-dir", joined.dir("router"))
    joined.router = joined.endpoint("router")
    joined.wait_ready()
    key = json.loads(joined.ctl("keys", "create", "test", "--json"))["secret"]
    import openai
    with openai.OpenAI(base_url=joined.router["url"] + "/v1", api_key=key, max_retries=0, timeout=120) as client:
        def answer():
            try:
                return client.chat.completions.create(model=MODEL, temperature=0, max_tokens=16, stop=["\n"], messages=[
                    {"role": "user", "content": "What is the capital of France?"}]).choices[0].message.content
            except openai.APIStatusError:
                return ""
        assert "Paris" in until("an answer", answer, 120)


def test_join_sh_with_what_the_line_holds_installs_it_and_what_it_prints_joins(joined, tree, network):
    """As the README has it; the tree has no systemd, so the script says what is to be started."""
    line = joined.ctl("token", "create", "--role", "node", "--name", "scripted").strip()
    told = {"LLMGW_SERVER": re.search(r"https://[^/ ']+", line).group(0), "LLMGW_STATE": "/srv/scripted",
            "LLMGW_SHA256": re.search(r"\b[0-9a-f]{64}\b", line).group(0),
            "LLMGW_JOIN": re.search(r"llmgw1\.[A-Za-z0-9._-]+", line).group(0),
            "LLMGW_KEY_PIN": re.search(r"sha256//([A-Za-z0-9+/=]+)", line).group(1)}
    shutil.copy(ROOT / "onboarding" / "join.sh", tree.root / "root")
    words = ["ip", "netns", "exec", network, *tree.words("sh", "/root/join.sh", "agent")]
    env = {"PATH": os.environ["PATH"], "HOME": "/root", "LANG": "C.UTF-8", **told}
    done = subprocess.run(words, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and told["LLMGW_JOIN"] not in done.stdout + done.stderr, done.stderr
    command = re.search(r"there is no systemd here.*\n\s+(\S.*)", done.stderr).group(1).split()
    with open(joined.log("scripted"), "ab") as log:
        joined.children["scripted"] = subprocess.Popen(["ip", "netns", "exec", network, *tree.words(*command)], stdin=subprocess.DEVNULL,
                                                       env={**tree.env, "LANG": "C.UTF-8"}, stdout=log, stderr=log)

    def ready():
        joined.check()
        return [node for node in joined.items("nodes") if node["name"] == "scripted" and node["state"] == "ready" and node["probed"]]
    until("the node of join.sh is ready", ready, 180)
    assert told["LLMGW_JOIN"] not in joined.logs()
    assert "llmgw-engine" in (tree.root / "etc" / "passwd").read_text()


def test_a_control_plane_there_makes_certificates_with_its_own_openssl(tree, network):
    """OpenSSL 1.1.1; this machine's reads them, which from Python 3.13 on is strict."""
    needs(tree, "openssl")
    assert tree.run("openssl", "version").stdout.startswith("OpenSSL 1.1.1")
    place = tree.root / "srv" / "plane"
    place.mkdir()
    (place / "server.yaml").write_text(f"cluster: there\nlisten: 0.0.0.0:7810\nnames: [{THERE}]\n")
    with open(place / "server.log", "ab") as log:
        server = subprocess.Popen(["ip", "netns", "exec", network, *tree.words(
            PYTHON, "-I", PYZ, "server", "--config", "/srv/plane/server.yaml", "--data-dir", "/srv/plane/data")],
            env=tree.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        until("the server listens", lambda: server.poll() is not None or (place / "data" / "endpoint.json").exists(), 120)
        assert server.poll() is None, (place / "server.log").read_text()
        context = ssl.create_default_context(cafile=str(place / "data" / "tls" / "server-ca.pem"))
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
        with opener.open(f"https://{THERE}:7810/healthz", timeout=60) as answer:
            assert answer.status == 200
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"https://{THERE}:7810/healthz", timeout=60)
    finally:
        server.terminate()
        server.wait(60)
