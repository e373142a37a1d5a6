"""A node asks GitHub itself only when the control plane cannot, and demands the same digests."""
from __future__ import annotations

import dataclasses
import hashlib
import pathlib

import pytest

from llmgw.agent.outside import Outside
from llmgw.domain.engine import Asset, EnginePhase, EngineWanted
from llmgw.domain.errors import ApiError, DownloadFailed, LlmgwError, TryAgain
from tests.fakes.control_plane import engine_of
from tests.fakes.github import FakeGithub

CPU = "llama-b10991-bin-ubuntu-x64.tar.gz"
ASSET = Asset(CPU, 4, hashlib.sha256(b"data").hexdigest())
CUT = EngineWanted("llama.cpp", "b10991", assets_problem="api.github.com: connection refused", server_cannot=True)
REFUSED = ApiError("the server says no", status=503, reason="Unreachable")


@pytest.fixture
def github(monkeypatch):
    with FakeGithub({"b10991": {CPU: b"data"}}) as fake:
        monkeypatch.setenv("LLMGW_GITHUB_API", fake.url)
        yield fake


def test_the_list_is_githubs_own_and_is_asked_for_once(github):
    outside = Outside()
    assert outside.listed(CUT).assets == (ASSET,) == outside.listed(CUT).assets
    assert len(github.web.requests) == 1
    with outside.opener("llama.cpp", "b10991", ASSET, REFUSED)(0) as source:
        assert source.read(10) == b"data"


def test_a_file_without_a_digest_or_with_another_one_is_not_taken(github):
    github.null_digest.add(CPU)
    with pytest.raises(TryAgain, match="connection refused; this node itself: .* sha256 digest"):
        Outside().listed(CUT)
    github.null_digest.clear()
    github.wrong_digest.add(CPU)
    with pytest.raises(DownloadFailed, match="the server says no; GitHub lists no .* with the same digest"):
        Outside().opener("llama.cpp", "b10991", ASSET, REFUSED)


@pytest.mark.parametrize("fault, said", [("captive_api", "web page instead of data"), ("rate_limited", "no more requests"),
                                         ("broken", "HTTP 502")])
def test_when_neither_side_gets_through_both_say_why_and_what_would_help(github, fault, said):
    setattr(github, fault, 100)
    for ask in (lambda: Outside().listed(CUT), lambda: Outside().opener("llama.cpp", "b10991", ASSET, REFUSED)):
        with pytest.raises(LlmgwError) as caught:
            ask()
        assert said in caught.value.message and "ctl mirror import-engine" in caught.value.hint
        assert "connection refused" in caught.value.message or "the server says no" in caught.value.message


def test_one_reason_for_both_is_said_once(github, monkeypatch):
    monkeypatch.setenv("LLMGW_GITHUB_API", "http://127.0.0.1:9")
    same = dataclasses.replace(CUT, assets_problem="the files are not known: http://127.0.0.1:9: connection refused")
    with pytest.raises(TryAgain) as caught:
        Outside().listed(same)
    assert caught.value.message == f"the control plane: {same.assets_problem}; this node itself: the same"


def test_a_version_that_github_does_not_have_is_said_to_be_wrong(github):
    with pytest.raises(LlmgwError, match="has no release b99999") as caught:
        Outside().listed(dataclasses.replace(CUT, version="b99999"))
    assert "server.yaml" in caught.value.hint


@pytest.mark.slow
def test_a_node_helps_itself_where_the_control_plane_fails_and_waits_where_that_is_at_work(node, plane, llama_archive):
    data = pathlib.Path(llama_archive.path).read_bytes()
    with FakeGithub({"b10991": {llama_archive.name: data}}) as github:
        plane.offer(archive=llama_archive)
        plane.cannot = ["TryAgain", "TryAgain", "Unreachable"]
        plane.want([engine_of(llama_archive)])
        node.start(LLMGW_GITHUB_API=github.url)
        plane.wait(lambda seen: seen.engines and seen.engines[0].usable)
        assert github.downloads(llama_archive.name) == 1 and plane.cannot == [] == plane.ranges
        assert "not installed" not in node.log()


@pytest.mark.slow
def test_a_node_asks_nobody_outside_while_the_control_plane_can(node, plane, llama_archive):
    with FakeGithub({"b10991": {}}) as github:
        plane.want([EngineWanted("llama.cpp", "b10991", assets_problem="github is being asked")])
        node.start(LLMGW_GITHUB_API=github.url)
        plane.wait(lambda seen: seen.engines and seen.engines[0].phase is EnginePhase.RESOLVING)
        plane.offer(archive=llama_archive)
        plane.want([engine_of(llama_archive)])
        plane.wait(lambda seen: seen.engines and seen.engines[0].usable)
        assert github.web.requests == []
