"""The mirror's commands against the real server: Ollama, Hugging Face, looking after it."""
from __future__ import annotations

import hashlib
import json
import os
import pathlib
import signal
import time

import pytest

from llmgw.api import paths
from llmgw.api.client import ControlClient
from llmgw.domain.secret import Secret
from tests.ctl.test_real_server import CONFIG, Server, wait_for
from tests.fakes import gguf_file
from tests.fakes.hub import COMMIT, FakeHub

OLLAMA = pathlib.Path(__file__).resolve().parent.parent / "data" / "ollama"
MODEL = gguf_file.small_model()
PROJECTOR = gguf_file.build([gguf_file.string("general.architecture", "clip"),
                             gguf_file.string("general.type", "mmproj")], data=b"\0" * 200)


@pytest.fixture(scope="module")
def hub():
    with FakeHub({"o/vision": {"README.md": b"x", "m-Q4_K_M.gguf": MODEL, "m-Q8_0.gguf": MODEL,
                               "mmproj-m-f16.gguf": PROJECTOR}, "o/gated": {"m.gguf": MODEL}}) as found:
        found.gated, found.token = {"o/gated"}, "hf_right"
        yield found


@pytest.fixture
def server(tmp_path, hub, monkeypatch):
    monkeypatch.setenv("LLMGW_HF_ENDPOINT", hub.url)
    made = Server(tmp_path)
    yield made
    made.stop()


def mirror(ctl):
    return json.loads(ctl("mirror", "list", "--json").stdout)


def blob(server, digest):
    return server.data / "mirror" / "blobs" / "sha256" / digest


def test_models_of_ollama_are_listed_and_brought_in_with_projector_and_notes(ctl, server):
    env = {"OLLAMA_MODELS": str(OLLAMA)}
    listed = ctl("mirror", "import-ollama", "--list", env=env)
    assert listed.returncode == 0 and "tiny-vision:latest" in listed.stdout and "cloud model" in listed.stdout
    done = ctl("mirror", "import-ollama", "tiny-vision", env=env)
    assert done.returncode == 0 and "weights: mirror:tiny-vision" in done.stderr, done.stderr
    (model,) = mirror(ctl)["models"]
    assert (model["projector"], model["source"]) == ("mmproj-tiny-vision-latest.gguf", "ollama:tiny-vision:latest")
    shown = ctl("mirror", "show", "tiny-vision").stdout
    assert "vision       yes" in shown and "{{ .Prompt }}" in shown and "Synthetic licence text" in shown
    items = json.loads(ctl("mirror", "import-ollama", "--list", "--json", env=env).stdout)["items"]
    assert {item["name"]: item["mirror"] for item in items if item["mirror"]} == {"tiny-vision:latest": "tiny-vision"}
    for name, words in (("tiny-cloud:120b-cloud", "is a cloud model"), ("../x", "not a name"), ("nobody", "no model")):
        refused = ctl("mirror", "import-ollama", name, env=env)
        assert refused.returncode == 1 and words in refused.stderr and "Traceback" not in refused.stderr


def test_a_repository_is_pulled_by_the_server_with_a_glob_and_pinned(ctl, server, hub):
    done = ctl("mirror", "pull", "hf:o/vision", "--include", "m-*.gguf")
    assert done.returncode == 1 and "one of 1 parts, and there are 2 GGUF files" in done.stderr, done.stderr
    done = ctl("mirror", "pull", "hf:o/vision@main", "--include", "m*[M6].gguf", "--name", "v")
    assert done.returncode == 0 and COMMIT[:12] in done.stderr, done.stderr
    model = next(model for model in mirror(ctl)["models"] if model["name"] == "v")
    assert (model["revision"], model["projector"]) == (COMMIT, "mmproj-m-f16.gguf")
    assert [file["name"] for file in model["files"]] == ["m-Q4_K_M.gguf", "mmproj-m-f16.gguf"]


def test_a_server_that_is_killed_in_a_pull_takes_it_up_by_itself(ctl, server, hub):
    hub.repos["o/big"] = {"big.gguf": MODEL + os.urandom(3 << 20)}
    hub.cuts["big.gguf"] = [1 << 20, 1 << 20]
    client = ControlClient([server.url], Secret((server.data / "tokens" / "admin").read_text().strip()))
    client.json("POST", paths.MIRROR_PULLS, {"source": "hf:o/big", "name": "big"})
    client.close()
    partial = server.data / "mirror" / "blobs" / "partial"
    wait_for(lambda: partial.is_dir() and any(path.stat().st_size for path in partial.iterdir()))
    server.process.send_signal(signal.SIGKILL)
    server.process.wait(30)
    server.start()
    wait_for(lambda: [model["name"] for model in mirror(ctl)["models"]] == ["big"])
    assert ctl("mirror", "verify").returncode == 0


@pytest.mark.parametrize("source, words", [("hf:o/none", "does not exist"), ("hf:o/gated", "without a token"),
                                           ("hf:o/vision:no-such.gguf", "has no file"), ("hf:x", "not a Hugging Face")])
def test_what_cannot_be_pulled_is_said_and_wanted_no_more(ctl, server, source, words):
    done = ctl("mirror", "pull", source)
    assert done.returncode == 1 and words in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert mirror(ctl)["models"] == []


def test_what_is_in_use_is_removed_only_by_force(ctl, server, tmp_path):
    path = tmp_path / "tiny.gguf"
    path.write_bytes(MODEL)
    assert ctl("mirror", "import", str(path)).returncode == 0
    server.config.write_text(CONFIG.replace("models: []", "models:\n  - {name: chat, engine: llama.cpp, weights: mirror:tiny}"))
    wait_for(lambda: mirror(ctl)["uses"][0]["models"] == ["chat"])
    refused = ctl("mirror", "remove", "tiny")
    assert refused.returncode == 1 and "chat would lose the weights" in refused.stderr and "--force" in refused.stderr
    assert "chat" in ctl("mirror", "list").stdout
    assert ctl("mirror", "remove", "tiny", "--force").returncode == 0
    assert mirror(ctl)["models"] == []
    assert "no such model" in ctl("mirror", "show", "tiny").stderr


def test_gc_takes_what_is_old_and_has_no_name(ctl, server, tmp_path):
    path = tmp_path / "tiny.gguf"
    path.write_bytes(MODEL)
    done = ctl("mirror", "import", str(path), "--link")
    assert done.returncode == 0 and "sending" not in done.stderr, done.stderr
    kept = hashlib.sha256(MODEL).hexdigest()
    old, young, part = "a" * 64, "b" * 64, server.data / "mirror" / "uploads" / ("c" * 64 + ".part")
    for digest in (old, young):
        blob(server, digest).write_bytes(b"x" * 100)
    part.write_bytes(b"y" * 100)
    long_ago = time.time() - 30 * 3600
    for path in (blob(server, old), blob(server, kept), part):
        os.utime(path, (long_ago, long_ago))
    dry = ctl("mirror", "gc", "--dry-run")
    assert dry.returncode == 0 and dry.stdout.count("\n") == 2 and old in dry.stdout and part.exists()
    assert ctl("mirror", "gc").returncode == 0
    assert not blob(server, old).exists() and not part.exists()
    assert blob(server, young).exists() and blob(server, kept).exists()
    assert "nothing that nobody needs" in ctl("mirror", "gc").stderr


def test_verify_finds_a_flipped_byte_and_an_import_sends_only_what_is_missing(ctl, server, tmp_path):
    path = tmp_path / "big.gguf"
    data = MODEL + os.urandom((17 << 20) - len(MODEL))
    path.write_bytes(data)
    assert ctl("mirror", "import", str(path)).returncode == 0
    assert "1 files are whole" in ctl("mirror", "verify").stderr
    target = blob(server, hashlib.sha256(data).hexdigest())
    spoiled = bytearray(data)
    spoiled[9 << 20] ^= 1
    target.write_bytes(spoiled)
    found = ctl("mirror", "verify", "big")
    assert found.returncode == 3 and "goes on at byte 8388608" in found.stdout, (found.stdout, found.stderr)
    assert "damaged: big.gguf" in ctl("mirror", "list").stdout
    again = ctl("mirror", "import", str(path))
    assert again.returncode == 0 and "big.gguf: goes on at 8.4 MB" in again.stderr, again.stderr
    assert ctl("mirror", "verify").returncode == 0 and target.read_bytes() == data
    assert "no such model" in ctl("mirror", "verify", "nobody").stderr
