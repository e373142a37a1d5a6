"""Weights from a Hugging Face on loopback: pinned, verified, resumed, explained."""
from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from llmgw.domain.model import CHUNK_BYTES
from llmgw.server import hub, releases
from llmgw.server.hub import Hub
from tests.fakes import gguf_file, safetensors_file
from tests.fakes.hub import COMMIT, FakeHub

MODEL = gguf_file.build(gguf_file.llama(), [gguf_file.tensor("t", [1 << 18])],
                        data=os.urandom(1 << 20)) + os.urandom(CHUNK_BYTES)
TENSORS = safetensors_file.model(70_000)
CONFIG = b'{"model_type": "llama"}'


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(hub, "RETRY_SECONDS", (0.05,))


@pytest.fixture
def fake():
    with FakeHub({"o/one": {"README.md": b"x", "one.gguf": MODEL},
                  "o/two": {"a.gguf": MODEL, "sub/b.gguf": MODEL[:-1]},
                  "o/st": {"config.json": CONFIG, "model.safetensors": TENSORS, "tokenizer.json": b"{}", "x.bin": MODEL}
                  }) as found:
        yield found


@pytest.fixture
def source(fake, tmp_path):
    found = Hub(str(tmp_path), fake.url)
    yield found
    found.close()


def pull(found, source, name="m", until=lambda weights, sentence: weights):
    deadline = time.monotonic() + 60
    while True:
        found.want(source, name)
        weights, sentence = found.status(source)
        if until(weights, sentence):
            return weights, sentence
        assert time.monotonic() < deadline, sentence
        time.sleep(0.02)


def test_the_only_gguf_of_a_repository_becomes_weights(source, fake, tmp_path):
    assert source.status("hf:o/one") == (None, "hf:o/one is not being pulled")
    weights, sentence = pull(source, "hf:o/one", "my-model")
    assert (weights.name, weights.source, weights.revision, weights.format) == ("my-model", "hf:o/one", COMMIT, "gguf")
    (file,) = weights.files
    assert (file.name, file.size_bytes, file.sha256) == ("one.gguf", len(MODEL), hashlib.sha256(MODEL).hexdigest())
    assert file.chunks == tuple(hashlib.sha256(MODEL[at:at + CHUNK_BYTES]).hexdigest()
                                for at in range(0, len(MODEL), CHUNK_BYTES)) and len(file.chunks) == 2
    assert (weights.kv_bytes_per_token, weights.context_train) == (2 * 2 * 32 * 2, 2048)
    assert (tmp_path / "blobs" / "sha256" / file.sha256).read_bytes() == MODEL
    assert sentence == "" and len(weights.fingerprint) == 64 and source.activity() == ()


def test_a_repository_with_several_ggufs_lists_them(source):
    _, sentence = pull(source, "hf:o/two", until=lambda weights, sentence: "GGUF files" in sentence)
    assert sentence == "hf:o/two holds 2 GGUF files: a.gguf, sub/b.gguf; name one: hf:o/two:a.gguf"


def test_a_named_file_is_pulled_under_its_flat_name(fake, tmp_path):
    fake.repos["o/two"]["sub/b.gguf"] = MODEL
    weights, _ = pull(Hub(str(tmp_path), fake.url), "hf:o/two@main:sub/b.gguf")
    assert [file.name for file in weights.files] == ["b.gguf"]


def test_a_safetensors_repository_is_pulled_with_its_small_files(source, tmp_path):
    weights, _ = pull(source, "hf:o/st")
    assert weights.format == "safetensors" and weights.kv_bytes_per_token is None
    assert [file.name for file in weights.files] == ["config.json", "model.safetensors", "tokenizer.json"]
    config = weights.files[0]
    assert config.sha256 == hashlib.sha256(CONFIG).hexdigest()
    assert (tmp_path / "blobs" / "sha256" / config.sha256).read_bytes() == CONFIG


def test_files_are_found_on_every_page(source, fake):
    fake.page_size = 1
    assert len(pull(source, "hf:o/st")[0].files) == 3
    assert sum("cursor=" in path for path in fake.web.paths()) == 3


def test_a_list_without_end_is_refused(source, fake):
    fake.endless_pages = True
    assert "has no end" in pull(source, "hf:o/st", until=lambda weights, sentence: "end" in sentence)[1]


def test_a_cut_transfer_goes_on_where_it_was(source, fake):
    fake.cuts["one.gguf"] = [1 << 20, 1 << 20]
    assert pull(source, "hf:o/one")[0]
    ranges = [request.get("range") for request in fake.web.requests if request["path"] == "/cdn/one.gguf"]
    assert ranges[0] is None and None not in ranges[1:] and len(ranges) == 3


def test_a_second_process_knows_what_the_first_pulled_and_asks_nobody(source, fake, tmp_path):
    first, _ = pull(source, "hf:o/one")
    asked = len(fake.web.requests)
    second = Hub(str(tmp_path), fake.url)
    second.want("hf:o/one", "m")
    assert second.status("hf:o/one") == (first, "") and len(fake.web.requests) == asked


def test_the_commit_stays_when_the_branch_moves(fake, tmp_path, monkeypatch):
    fake.cuts["one.gguf"] = [0] * 1000
    monkeypatch.setattr(releases, "TRIES", 1)
    first = Hub(str(tmp_path), fake.url)
    pull(first, "hf:o/one", until=lambda weights, sentence: "cut off" in sentence)
    first.close()
    fake.commits["main"] = "f" * 40
    fake.cuts["one.gguf"] = []
    asked = len(fake.web.requests)
    weights, _ = pull(Hub(str(tmp_path), fake.url), "hf:o/one")
    assert weights.revision == COMMIT
    assert not any("/revision/" in path for path in fake.web.paths()[asked:])


def test_a_blob_that_is_gone_is_pulled_again(source, fake, tmp_path):
    weights, _ = pull(source, "hf:o/one")
    os.unlink(tmp_path / "blobs" / "sha256" / weights.files[0].sha256)
    assert pull(Hub(str(tmp_path), fake.url), "hf:o/one")[0].fingerprint == weights.fingerprint
    assert fake.downloads("one.gguf") == 2
    os.unlink(tmp_path / "blobs" / "sha256" / weights.files[0].sha256)
    source.want("hf:o/one", "m")
    assert pull(source, "hf:o/one")[0] and fake.downloads("one.gguf") == 3


def test_damaged_memory_of_a_pull_starts_anew(source, fake, tmp_path):
    pull(source, "hf:o/one")
    for name in os.listdir(tmp_path / "hub"):
        (tmp_path / "hub" / name).write_text(json.dumps({"commit": "../x", "weights": 3}))
    assert pull(Hub(str(tmp_path), fake.url), "hf:o/one")[0]


def test_a_wrong_digest_is_refused_and_nothing_is_kept(source, fake, tmp_path):
    fake.wrong_digest = {"one.gguf"}
    _, sentence = pull(source, "hf:o/one", until=lambda weights, sentence: "sha256 is" in sentence)
    assert "expected " + "0" * 64 in sentence
    assert os.listdir(tmp_path / "blobs" / "sha256") == []


def test_a_wrong_small_file_is_refused(source, fake):
    fake.wrong_digest = {"config.json"}
    assert "config.json is not what its commit says" in pull(
        source, "hf:o/st", until=lambda weights, sentence: "commit says" in sentence)[1]


def test_a_file_that_is_no_gguf_is_refused(source, fake):
    fake.repos["o/one"]["one.gguf"] = b"<html>" * 100
    assert "does not start with GGUF" in pull(source, "hf:o/one", until=lambda weights, sentence: "GGUF" in sentence)[1]


@pytest.mark.parametrize("name", ["hf:o/none", "hf:o/one@nobranch"])
def test_what_does_not_exist_is_said_so(source, name):
    _, sentence = pull(source, name, until=lambda weights, sentence: "does not exist" in sentence)
    assert sentence.startswith(f"{name} does not exist, or may not be read without a token; check how it is spelled")


@pytest.mark.parametrize("cut", [0, 1, 4096, CHUNK_BYTES, len(MODEL) - 1])
def test_a_transfer_may_be_cut_at_any_byte(source, fake, tmp_path, cut):
    fake.cuts["one.gguf"] = [cut]
    weights, _ = pull(source, "hf:o/one")
    assert (tmp_path / "blobs" / "sha256" / weights.files[0].sha256).read_bytes() == MODEL


def test_a_hub_that_ignores_ranges_still_brings_it(source, fake):
    fake.ranges, fake.cuts["one.gguf"] = False, [CHUNK_BYTES + 5]
    assert pull(source, "hf:o/one")[0]


@pytest.mark.parametrize("more", [-1000, 1000])
def test_a_hub_that_lies_about_the_length_never_makes_a_blob(source, fake, tmp_path, monkeypatch, more):
    monkeypatch.setattr(releases, "TRIES", 1)
    fake.lies["one.gguf"] = more
    failed = pull(source, "hf:o/one", until=lambda weights, sentence: weights or source._pulls["hf:o/one"].failures)[0]
    if failed is None:
        assert os.listdir(tmp_path / "blobs" / "sha256") == []
    fake.lies.clear()
    weights, _ = pull(source, "hf:o/one")
    assert (tmp_path / "blobs" / "sha256" / weights.files[0].sha256).read_bytes() == MODEL


def test_one_wrong_byte_on_the_way_is_never_kept(source, fake, tmp_path):
    fake.spoil["one.gguf"] = CHUNK_BYTES + 7
    assert "sha256 is" in pull(source, "hf:o/one", until=lambda weights, sentence: "sha256 is" in sentence)[1]
    assert os.listdir(tmp_path / "blobs" / "sha256") == []
    weights, _ = pull(source, "hf:o/one")
    assert (tmp_path / "blobs" / "sha256" / weights.files[0].sha256).read_bytes() == MODEL


def test_a_gated_model_says_whose_terms_to_accept_and_where_the_token_goes(source, fake):
    fake.gated_files, fake.token = True, "hf_right"
    sentence = pull(source, "hf:o/one", until=lambda weights, sentence: "gated" in sentence)[1]
    assert sentence.startswith("hf:o/one is gated or private: ") and f"accept its terms at {fake.url}/o/one" in sentence
    assert "LLMGW_HF_TOKEN_FILE" in sentence and source.progress("hf:o/one")["failed"]


def test_the_token_goes_to_the_configured_host_only(fake, tmp_path):
    (tmp_path / "token").write_text("hf_right\n")
    fake.gated_files, fake.token = True, "hf_right"
    with FakeHub({"o/one": fake.repos["o/one"]}) as elsewhere:       # where the files themselves lie
        fake.files_at = elsewhere.url
        assert pull(Hub(str(tmp_path), fake.url, str(tmp_path / "token")), "hf:o/one")[0]
        assert elsewhere.web.requests and all("authorization" not in one for one in elsewhere.web.requests)
    asked = [one for one in fake.web.requests if one["path"].startswith("/o/one/resolve")]
    assert asked and all(one["authorization"] == "Bearer hf_right" for one in asked)


def test_a_pattern_takes_the_files_that_it_matches(source, fake):
    weights, _ = pull(source, "hf:o/st:*.json")
    assert [file.name for file in weights.files] == ["config.json", "tokenizer.json"]
    assert "has no file like '*.gguf'" in pull(source, "hf:o/st:*.gguf", until=lambda weights, sentence: "like" in sentence)[1]


def test_a_gated_repository_is_read_with_a_token(fake, tmp_path):
    fake.gated, fake.token = {"o/one"}, "hf_secret"
    (tmp_path / "token").write_text("hf_secret\n")
    assert pull(Hub(str(tmp_path), fake.url, str(tmp_path / "token")), "hf:o/one")[0]


def test_a_rate_limit_is_waited_for(source, fake):
    fake.rate_limited = 1
    _, sentence = pull(source, "hf:o/one", until=lambda weights, sentence: "again at" in sentence)
    assert "allows no more requests now" in sentence
    assert pull(source, "hf:o/one")[0]


def test_progress_is_told_while_it_runs(source):
    seen = set()
    pull(source, "hf:o/one", until=lambda weights, sentence: seen.update(source.activity()) or weights)
    assert any("hf:o/one" in sentence for sentence in seen)


def test_two_sources_of_one_file_share_it(source, fake):
    fake.repos["o/two"] = {"one.gguf": MODEL}
    source.want("hf:o/one", "a")
    source.want("hf:o/two", "b")
    first, second = pull(source, "hf:o/one", "a")[0], pull(source, "hf:o/two", "b")[0]
    assert first.fingerprint == second.fingerprint and (first.name, second.name) == ("a", "b")
    assert fake.downloads("one.gguf") == 1


PULL = """
import sys, time
from llmgw.server.hub import Hub
found = Hub(sys.argv[1], sys.argv[2])
deadline = time.monotonic() + 60
while time.monotonic() < deadline:
    found.want("hf:o/st", "m")
    weights, sentence = found.status("hf:o/st")
    if weights is not None:
        print(weights.fingerprint)
        sys.exit(0)
    time.sleep(0.01)
sys.exit(sentence)
"""


@pytest.mark.parametrize("place", [f"write-atomic-before-rename:kill@{count}" for count in (1, 2, 3, 4)]
                         + ["fetch-before-rename:kill", "fetch-after-rename:kill"])
def test_a_kill_at_any_step_leaves_what_the_next_process_completes(fake, tmp_path, place):
    def pull_in_a_process(**environment):
        return subprocess.run([sys.executable, "-c", PULL, str(tmp_path), fake.url], env={**os.environ, **environment},
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert pull_in_a_process(LLMGW_FAILPOINT=place).returncode == -signal.SIGKILL
    done = pull_in_a_process()
    assert done.returncode == 0, done.stderr
    for name in os.listdir(tmp_path / "blobs" / "sha256"):
        if not name.startswith("."):              # a scratch file of the killed process
            assert hashlib.sha256((tmp_path / "blobs" / "sha256" / name).read_bytes()).hexdigest() == name
