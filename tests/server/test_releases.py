"""Releases from a GitHub on loopback: known without waiting, fetched once, verified always."""
from __future__ import annotations

import hashlib
import os
import threading
import time

import pytest

from llmgw.domain.errors import DigestMismatch, DownloadFailed, LlmgwError, NotFound, ParseError, Unreachable
from llmgw.parse import github_release
from llmgw.server import releases
from llmgw.server.releases import Releases
from llmgw.system.internet import RateLimited, WebPage
from tests.fakes.github import FakeGithub
from tests.fakes.web import FakeWeb, Reply

CPU = "llama-b10991-bin-ubuntu-x64.tar.gz"
DATA = os.urandom(3 << 20)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(releases, "RETRY_SECONDS", (0.05,))


@pytest.fixture
def github():
    with FakeGithub({"b10991": {CPU: DATA, "llama-b10991-bin-macos-arm64.tar.gz": b"mac"}}) as fake:
        yield fake


@pytest.fixture
def source(github, tmp_path):
    found = Releases(str(tmp_path), github.url)
    yield found
    found.close()


def ask_until(source, condition, version="b10991"):
    deadline = time.monotonic() + 60
    while True:
        answer = source.assets("llama.cpp", version)
        if condition(*answer):
            return answer
        assert time.monotonic() < deadline, answer
        time.sleep(0.02)


def test_the_list_is_asked_for_once_and_without_waiting(source, github):
    assets, problem = source.assets("llama.cpp", "b10991")
    assert assets == () and "is being asked for the files of llama.cpp b10991" in problem
    assets, problem = ask_until(source, lambda assets, problem: assets)
    assert problem == "" and github_release.pick(assets, "b10991", "x86_64", None, False).binary.name == CPU
    for _ in range(5):
        source.assets("llama.cpp", "b10991")
    assert len(github.web.requests) == 1


def test_an_engine_that_github_does_not_hold_has_no_list_and_no_problem(source, github):
    assert source.assets("vllm", "0.30.0") == ((), "")
    assert github.web.requests == []


def test_a_version_that_does_not_exist_is_said_so(source):
    _, problem = ask_until(source, lambda assets, problem: "is being asked" not in problem, "b99999")
    assert problem == "the files of llama.cpp b99999 are not known: llama.cpp has no release b99999"


def test_a_failure_is_tried_again_by_itself(source, github):
    github.broken = 2
    assets, _ = ask_until(source, lambda assets, problem: assets)
    assert assets and len(github.web.requests) == 3


def test_a_rate_limit_is_respected_and_says_when(source, github):
    github.rate_limited = 1
    _, problem = ask_until(source, lambda assets, problem: "allows no more" in problem)
    assert "again at " in problem and "UTC" in problem
    source.assets("llama.cpp", "b10991")
    assert len(github.web.requests) == 1                       # not before the second is over
    with pytest.raises(RateLimited):
        source.fetch("llama.cpp", "b10991", CPU)
    assert ask_until(source, lambda assets, problem: assets)


def test_a_captive_portal_is_recognised(source, github):
    github.captive_api = True
    _, problem = ask_until(source, lambda assets, problem: "web page" in problem)
    assert "answered with a web page instead of data" in problem


def test_a_file_without_a_digest_is_named_and_never_fetched(source, github):
    github.null_digest = {CPU}
    _, problem = ask_until(source, lambda assets, problem: assets)
    assert problem == f"left out, because they have no sha256 digest: {CPU}"
    with pytest.raises(NotFound, match="no file .* with a sha256 digest"):
        source.fetch("llama.cpp", "b10991", CPU)


def test_a_release_without_digests_is_a_problem(source, github):
    github.null_digest = set(github.releases["b10991"])
    with pytest.raises(ParseError, match="none of its 2 files has a sha256 digest"):
        source.fetch("llama.cpp", "b10991", CPU)


def test_a_file_is_fetched_verified_and_kept(source, github, tmp_path):
    seen = []
    path = source.fetch("llama.cpp", "b10991", CPU, seen.append)
    assert path == str(tmp_path / "blobs" / "sha256" / hashlib.sha256(DATA).hexdigest())
    assert open_bytes(path) == DATA and seen[-1] == len(DATA)
    assert source.fetch("llama.cpp", "b10991", CPU) == path and github.downloads(CPU) == 1
    assert source.activity() == ()


def test_many_who_want_one_file_cause_one_download(source, github):
    paths = []
    threads = [threading.Thread(target=lambda: paths.append(source.fetch("llama.cpp", "b10991", CPU)))
               for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(paths) == 8 and len(set(paths)) == 1 and github.downloads(CPU) == 1


def test_a_transfer_that_is_cut_off_goes_on_where_it_was(source, github):
    github.cuts[CPU] = [1 << 20, 1 << 19]
    assert open_bytes(source.fetch("llama.cpp", "b10991", CPU)) == DATA
    ranges = [request.get("range") for request in github.web.requests if request["path"] == f"/objects/{CPU}"]
    assert ranges[0] is None and all(item and item != "bytes=0-" for item in ranges[1:]) and len(ranges) == 3


def test_a_server_that_ignores_ranges_is_understood(source, github):
    github.cuts[CPU] = [1 << 20]
    github.ignores_range = True
    assert open_bytes(source.fetch("llama.cpp", "b10991", CPU)) == DATA


def test_what_an_earlier_process_began_is_gone_on_with(github, tmp_path):
    partial = releases.partial_path(str(tmp_path), hashlib.sha256(DATA).hexdigest())
    os.makedirs(os.path.dirname(partial))
    with open(partial, "wb") as out:
        out.write(DATA[:1 << 20])
    assert open_bytes(Releases(str(tmp_path), github.url).fetch("llama.cpp", "b10991", CPU)) == DATA
    assert github.web.requests[-1]["range"] == f"bytes={1 << 20}-"


def test_a_wrong_digest_is_refused_and_nothing_is_kept(source, github, tmp_path):
    github.wrong_digest = {CPU}
    with pytest.raises(DigestMismatch):
        source.fetch("llama.cpp", "b10991", CPU)
    assert [name for _, _, names in os.walk(tmp_path) for name in names] == []


@pytest.mark.parametrize("by", [1, -1])
def test_a_wrong_size_is_refused_in_words_and_nothing_is_kept(source, github, tmp_path, monkeypatch, by):
    monkeypatch.setattr(releases, "TRIES", 1)
    github.wrong_size = {CPU: by}
    with pytest.raises(DownloadFailed, match=f"the file has {len(DATA)} bytes at its source, {len(DATA) + by} are expected"):
        source.fetch("llama.cpp", "b10991", CPU)
    assert not [name for _, _, names in os.walk(tmp_path / "blobs" / "sha256") for name in names]


@pytest.mark.parametrize("fault, error", [("missing", NotFound), ("redirect_loop", DownloadFailed),
                                          ("captive_files", WebPage), ("always cut", Unreachable)])
def test_a_fault_of_the_download_is_an_error_of_ours(source, github, fault, error, monkeypatch):
    monkeypatch.setattr(releases, "TRIES", 2)
    if fault == "missing":
        github.missing = {CPU}
    elif fault == "always cut":
        github.cuts[CPU] = [0] * 20
    else:
        setattr(github, fault, True)
    with pytest.raises(error) as caught:
        source.fetch("llama.cpp", "b10991", CPU)
    assert isinstance(caught.value, LlmgwError)
    assert not (os.path.isdir(os.path.join(source._data_dir, "blobs", "sha256"))
                and os.listdir(os.path.join(source._data_dir, "blobs", "sha256")))


def test_a_token_goes_to_the_api_and_not_to_where_files_lie(github, tmp_path):
    (tmp_path / "token").write_text("ghp_secret\n")
    with FakeWeb(lambda path, headers: Reply(200, DATA)) as elsewhere:
        github.elsewhere = elsewhere.url
        path = Releases(str(tmp_path), github.url, str(tmp_path / "token")).fetch("llama.cpp", "b10991", CPU)
        assert open_bytes(path) == DATA
        assert github.web.requests[0]["authorization"] == "Bearer ghp_secret"
        assert all("authorization" not in request for request in elsewhere.requests)


def test_an_api_that_is_not_there_is_a_sentence(tmp_path, free_port):
    source = Releases(str(tmp_path), f"http://127.0.0.1:{free_port}")
    _, problem = ask_until(source, lambda assets, problem: "refused" in problem)
    assert problem.endswith("connection refused")


def test_closing_ends_a_download_and_keeps_what_has_come(github, tmp_path):
    github.stalls[CPU] = 1 << 20
    source = Releases(str(tmp_path), github.url)
    source._github.internet._timeout = 0.5
    failures = []

    def fetch():
        try:
            source.fetch("llama.cpp", "b10991", CPU)
        except LlmgwError as error:
            failures.append(error)
    thread = threading.Thread(target=fetch)
    thread.start()
    deadline = time.monotonic() + 60
    while not source.activity() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert source.activity()[0].startswith(f"fetching {CPU}: ")
    source.close()
    thread.join(60)
    assert not thread.is_alive() and failures


def open_bytes(path):
    with open(path, "rb") as source:
        return source.read()
