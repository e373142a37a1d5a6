"""An archive in the release's own shape on its two other ways to a node: GitHub through the server, GitHub by itself."""
from __future__ import annotations

import json
import pathlib
import urllib.request

import pytest

from tests.fakes.github import FakeGithub
from tests.whole.cluster import MODEL, Cluster, until

pytestmark = pytest.mark.slow
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture
def cluster(pyz, qa_template, tmp_path):
    made = Cluster(pyz, tmp_path, qa_template)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def github(release_archive):
    with FakeGithub({"b10991": {release_archive.name: pathlib.Path(release_archive.path).read_bytes(),
                                "llama-b10991-bin-macos-arm64.tar.gz": b"mac"}}) as fake:
        yield fake


def installed(cluster):
    """Wait until the node has seen its engine run; return what it says."""
    def seen():
        cluster.check()
        found = [engine for node in cluster.items("nodes") for engine in node["engines"] if engine["usable"]]
        return found and found[0]
    return until("the engine is installed", seen, 120)


def test_from_github_through_the_server_to_an_answer_through_the_router(cluster, github, release_archive, gemma):
    cluster.env["LLMGW_GITHUB_API"] = github.url
    cluster.start_server()
    cluster.env["LLMGW_GITHUB_API"] = NOWHERE             # nodes need no internet
    for name in ("node-1", "node-2"):
        cluster.start_agent(name)
    cluster.start_router()
    cluster.ctl("mirror", "import", gemma, "--name", MODEL)
    cluster.wait_ready()
    until("both have it", lambda: sum(engine["usable"] for node in cluster.items("nodes") for engine in node["engines"])
          == 2, 120)
    assert github.downloads(release_archive.name) == 1, "one download for the whole site"
    assert github.web.paths().count("/repos/ggml-org/llama.cpp/releases/tags/b10991") == 1
    key = json.loads(cluster.ctl("keys", "create", "test", "--json"))["secret"]

    def answer():
        body = json.dumps({"model": MODEL, "temperature": 0, "stop": ["\n"], "max_tokens": 16, "messages": [
            {"role": "user", "content": "What is the capital of France?"}]}).encode()
        request = urllib.request.Request(cluster.router["url"] + "/v1/chat/completions", body, {
            "Authorization": f"Bearer {key}", "Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return json.loads(reply.read())["choices"][0]["message"]["content"]
        except OSError:
            return ""                                     # the router has not learned the key yet
    assert "Paris" in until("an answer", answer)
    (engine,) = [pid for pid, words in cluster.left().items() if "--api-key-file" in words]
    maps = pathlib.Path(f"/proc/{engine}/maps").read_text()
    assert "/libggml-cpu-" in maps and "/libgomp.so" in maps, "a variant for this processor was loaded while running"


def test_a_node_asks_github_itself_when_the_server_cannot(cluster, github, release_archive):
    cluster.env["LLMGW_GITHUB_API"] = NOWHERE
    cluster.start_server()
    cluster.env["LLMGW_GITHUB_API"] = github.url
    cluster.start_agent()
    assert "build 10991" in installed(cluster)["message"]
    assert github.downloads(release_archive.name) == 1
    assert not list((cluster.dir("server") / "blobs").glob("sha256/*")), "nodes never upload"
