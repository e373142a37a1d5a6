"""The commands against the real control plane, as a process."""
from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from llmgw.api import paths
from llmgw.api.client import ControlClient
from llmgw.domain.errors import ApiError
from llmgw.domain.secret import Secret
from tests.fakes import gguf_file
from tests.fakes.github import FakeGithub
from tests.fakes.package_index import PackageIndex

CONFIG = "cluster: test\nengines:\n  llama.cpp: {version: b10991}\nmodels: []\n"
MODEL = CONFIG.replace("models: []", "models:\n  - {name: tiny, engine: llama.cpp, weights: mirror:tiny}")


class Server:
    """`llmgw server` in ``folder``; its data folder is where ctl looks by itself."""

    def __init__(self, folder):
        self.folder, self.data = folder, folder / "data" / "server"
        self.config = folder / "server.yaml"
        self.config.write_text(CONFIG)
        self.start()

    def start(self):
        (self.data / "endpoint.json").unlink(missing_ok=True)
        with open(self.folder / "server.log", "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "error", "-m", "llmgw", "server", "--config", str(self.config), "--data-dir",
                 str(self.data), "--listen", "127.0.0.1:0"], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        wait_for(lambda: (self.data / "endpoint.json").exists() or self.process.poll() is not None)
        assert self.process.poll() is None, (self.folder / "server.log").read_text()
        self.url = json.loads((self.data / "endpoint.json").read_text())["url"]

    def stop(self):
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(60)

    def token(self, role):
        return str(self.data / "tokens" / role)


def wait_for(true, seconds=60):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def server(tmp_path):
    made = Server(tmp_path)
    yield made
    made.stop()


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.gguf"
    path.write_bytes(gguf_file.small_model())
    return path


def test_a_key_is_made_shown_once_and_revoked(ctl, server):
    made = ctl("keys", "create", "ann", "--model", "tiny")
    assert made.returncode == 0 and made.stdout.startswith("llmgw_infer_"), made.stderr
    (key,) = json.loads(ctl("keys", "list", "--json").stdout)["items"]
    assert (key["name"], key["models"], key["secret"]) == ("ann", ["tiny"], "")
    assert made.stdout.strip() not in ctl("keys", "list").stdout
    assert ctl("keys", "revoke", key["id"]).returncode == 0
    assert "revoked" in ctl("keys", "list").stdout
    gone = ctl("keys", "revoke", "nobody")
    assert gone.returncode == 1 and gone.stderr.startswith("llmgw: ") and gone.stderr.count("\n") <= 2


def test_a_model_is_imported_once_and_found_again(ctl, server, tiny):
    first = ctl("mirror", "import", str(tiny), "--name", "tiny")
    assert first.returncode == 0, first.stderr
    assert "the server has it already" in ctl("mirror", "import", str(tiny), "--name", "other").stderr
    mirror = json.loads(ctl("mirror", "list", "--json").stdout)
    assert [model["name"] for model in mirror["models"]] == ["other", "tiny"]
    (file,) = mirror["models"][1]["files"]
    data = tiny.read_bytes()
    assert (file["name"], file["sha256"], file["chunks"]) == (
        "tiny.gguf", hashlib.sha256(data).hexdigest(), [hashlib.sha256(data).hexdigest()])


def test_an_import_that_was_killed_goes_on_where_it_stopped(ctl, server, tmp_path):
    archive = tmp_path / "llama-b10991-bin-ubuntu-x64.tar.gz"
    data = os.urandom(2 * paths.PIECE_BYTES + 100)
    archive.write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    admin = Secret((server.data / "tokens" / "admin").read_text().strip())
    client = ControlClient([server.url], admin)
    client.request("PUT", f"{paths.fill(paths.UPLOAD, digest=digest)}?offset=0", body=data[:paths.PIECE_BYTES],
                   content_type="application/octet-stream")
    client.close()
    done = ctl("mirror", "import-engine", str(archive), "--sha256", digest)
    assert done.returncode == 0 and "goes on at 8.4 MB" in done.stderr, done.stderr
    (held,) = json.loads(ctl("mirror", "list", "--json").stdout)["engines"]
    assert (held["version"], held["asset"]["sha256"]) == ("b10991", digest)


def test_a_wrong_digest_keeps_nothing(ctl, server, tmp_path):
    archive = tmp_path / "llama-b10991-bin-ubuntu-x64.tar.gz"
    archive.write_bytes(b"not what was promised")
    done = ctl("mirror", "import-engine", str(archive), "--sha256", "0" * 64)
    assert done.returncode == 1 and "expected " + "0" * 64 in done.stderr
    assert json.loads(ctl("mirror", "list", "--json").stdout)["engines"] == []


def test_a_viewer_may_look_and_nothing_else(ctl, server):
    given = ["--server", server.url, "--token-file", server.token("viewer")]
    assert ctl("models", *given).returncode == 0
    refused = ctl("keys", "list", *given)
    assert refused.returncode == 1 and "viewer" in refused.stderr and "Traceback" not in refused.stderr
    unknown = ctl("models", "--server", server.url, env={"LLMGW_TOKEN": "llmgw_admin_00000000_x"})
    assert unknown.returncode == 1 and "not known" in unknown.stderr


def test_a_plan_says_what_cannot_be_placed_and_why_and_changes_nothing(ctl, server, tmp_path):
    edited = tmp_path / "edited.yaml"
    edited.write_text(MODEL)
    planned = ctl("plan", str(edited))
    assert planned.returncode == 3 and planned.stdout.startswith("no place  tiny: "), (planned.stdout, planned.stderr)
    assert json.loads(ctl("models", "--json").stdout)["items"] == []
    assert ctl("plan").stdout == "nothing would change\n"


def test_an_edit_that_cannot_be_used_is_told_with_its_line_everywhere(ctl, server, tmp_path):
    broken = tmp_path / "broken.yaml"
    broken.write_text(CONFIG + "modles: []\n")
    assert ctl("plan", str(broken)).returncode == 78
    server.config.write_text(broken.read_text())
    applied = ctl("apply")
    assert applied.returncode == 78 and "line 5" in applied.stderr, applied.stderr
    assert "line 5" in ctl("models").stderr


def test_a_model_without_weights_says_how_to_bring_them(ctl, server):
    server.config.write_text(MODEL)
    wait_for(lambda: "mirror:tiny are not in the mirror" in ctl("models").stdout)
    assert ctl("apply").returncode == 0


def test_events_are_followed_as_they_happen(ctl, server, tmp_path):
    with open(tmp_path / "events", "wb") as out:
        child = subprocess.Popen(
            [sys.executable, "-m", "llmgw", "ctl", "events", "-f", "--server", server.url, "--token-file",
             server.token("admin")], stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
    try:
        wait_for(lambda: "Applied" in (tmp_path / "events").read_text())
        ctl("keys", "create", "later")
        wait_for(lambda: "(later)" in (tmp_path / "events").read_text())
        assert (tmp_path / "events").read_text().count("(later)") == 1
        child.send_signal(signal.SIGINT)
        assert child.wait(60) == 130
        assert "Traceback" not in (tmp_path / "events").read_text()
    finally:
        child.kill()
        child.wait()


def test_what_does_not_exist_is_a_sentence(ctl, server):
    for words in (["logs", "nobody-1"], ["drain", "nobody"], ["undrain", "nobody"]):
        done = ctl(*words)
        assert done.returncode == 1 and done.stderr.startswith("llmgw: ") and "nobody" in done.stderr, done.stderr


def test_a_backup_is_taken_while_it_runs_and_restored_while_it_does_not(ctl, server, tmp_path):
    ctl("keys", "create", "before")
    backup = tmp_path / "backup.sqlite"
    taken = ctl("backup", str(backup))
    assert taken.returncode == 0 and backup.stat().st_mode & 0o777 == 0o600, taken.stderr
    ctl("keys", "create", "after")
    refused = ctl("restore", str(backup))
    assert refused.returncode == 1 and "another server (pid" in refused.stderr, refused.stderr
    assert server.stop() == 0
    restored = ctl("restore", str(backup))
    assert restored.returncode == 0, restored.stderr
    server.start()
    assert [key["name"] for key in json.loads(ctl("keys", "list", "--json").stdout)["items"]] == ["before"]
    assert ctl("restore", str(tmp_path / "none")).returncode == 2


def test_a_backup_that_cannot_be_written_leaves_no_half_file(ctl, server, tmp_path):
    done = ctl("backup", str(tmp_path / "missing" / "b"))
    assert done.returncode == 1 and "No such file" in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.glob("**/*.partial"))


def test_ctl_nodes_is_quick(ctl, server):
    took = []
    for _ in range(5):
        began = time.monotonic()
        assert ctl("nodes").returncode == 0
        took.append(time.monotonic() - began)
    assert min(took) <= 0.25 or os.getloadavg()[0] > 1.5, took


UV = "uv-x86_64-unknown-linux-musl.tar.gz"
PYTHON = "cpython-3.12.16+20261110-x86_64-unknown-linux-gnu-install_only_stripped.tar.gz"


@pytest.mark.slow
def test_stand_in_all_of_an_engine_is_pulled_into_the_mirror_once(server, ctl, tmp_path):
    (tmp_path / "server.yaml").write_text("cluster: test\nengines:\n  llama.cpp: {version: b10991}\n"
                                          "  vllm: {version: 0.30.1, as_of: 2026-06-01}\nmodels: []\n")
    wait_for(lambda: "0.30.1" in ctl("engines", "--json").stdout)
    assert "which package index?" in ctl("mirror", "pull-engine", "vllm", env={"UV_DEFAULT_INDEX": "", "PIP_INDEX_URL": ""}).stderr
    with PackageIndex() as index, FakeGithub({"0.13.9": {UV: b"uv", "uv.zip": b"no"}, "20261110": {"x.tar.gz": b"no"}}) as github:
        index.add("vllm", "0.30.1")
        index.add("tinydep", "1.0")

        def pull(*words, engine="vllm", api=github.url):
            return ctl("mirror", "pull-engine", engine, "--index", index.url, *words, env={"LLMGW_GITHUB_API": api})
        none = pull()
        assert none.returncode == 1 and "there is no list of the packages of vllm 0.30.1" in none.stderr
        assert "--list FILE" in none.stderr and "is not made of packages" in pull(engine="llama.cpp").stderr
        pins = "".join(f"{name}=={version} --hash=sha256:{hashlib.sha256(data).hexdigest()}\n" for name, version, (data, _) in [
            ("vllm", "0.30.1", index.files["vllm"]["vllm-0.30.1-py3-none-any.whl"]),
            ("tinydep", "1.0", index.files["tinydep"]["tinydep-1.0-py3-none-any.whl"])])
        node = ControlClient([server.url], Secret((server.data / "tokens" / "node").read_text().strip()))
        path = paths.fill(paths.ENGINE_LOCK, engine="vllm", version="0.30.1", platform="x86_64-manylinux_2_31")
        node.json("PUT", path, {"node": "n1", "as_of": "2026-06-01T00:00:00Z", "text": pins})
        node.close()
        kept = index.files.pop("tinydep")
        index.add("tinydep", "2.0")
        gone = pull()
        assert gone.returncode == 1 and "tinydep==1.0: the package index has no wheel of it for x86_64" in gone.stderr
        assert "node/n1" in ctl("engines", "lock", "vllm").stdout, "an incomplete pull vouches for nothing"
        index.files["tinydep"] = kept
        pulled = pull()
        assert pulled.returncode == 1 and "2 packages are in the mirror (" in pulled.stderr, pulled.stderr
        assert f"python 3.12.16+20261110 is not in the mirror: its release has no {PYTHON}" in pulled.stderr
        assert "uv 0.13.9 is not" not in pulled.stderr and "admin" in ctl("engines", "lock", "vllm").stdout
        github.releases["20261110"][PYTHON] = b"python"
        index.web.requests.clear()
        pulled = pull()
        assert pulled.returncode == 0 and "2 packages are in the mirror, uv and Python too" in pulled.stderr, pulled.stderr
        shown = ctl("mirror", "list").stdout
        assert all(name in shown for name in ("tinydep-1.0-py3-none-any.whl", "vllm-0.30.1-py3-none-any.whl", UV, PYTHON))
        again = pull(api="http://127.0.0.1:9")
        assert again.returncode == 0 and index.web.paths() == [] and github.downloads(UV) == 1, again.stderr
        (tmp_path / "list.txt").write_text(pins.replace("vllm==0.30.1", "vllm==0.30.0"))
        other = pull("--list", str(tmp_path / "list.txt"))
        assert other.returncode == 1 and "does not hold vllm 0.30.1" in other.stderr


def test_the_list_of_packages_is_shown_taken_from_a_node_and_made_anew(server, ctl, tmp_path):
    (tmp_path / "server.yaml").write_text("cluster: test\nengines:\n  vllm: {version: 0.30.0}\n"
                                          "  sglang: {version: 0.5.23, as_of: 2026-11-01}\nmodels: []\n")
    wait_for(lambda: "sglang" in ctl("engines", "--json").stdout)
    shown = ctl("engines", "lock", "vllm").stdout
    assert "2026-09-23T05:22:21Z" in shown and " 196 " in shown and shown.count("llmgw") == 2
    text = ctl("engines", "lock", "vllm", "--text", "x86_64-manylinux_2_31").stdout
    assert text.count("==") == 196 and "--index" not in text
    empty = ctl("engines", "lock", "sglang")
    assert "no list yet, the first node that installs it makes one" in empty.stdout + empty.stderr

    node = ControlClient([server.url], Secret((server.data / "tokens" / "node").read_text().strip()))
    path = paths.fill(paths.ENGINE_LOCK, engine="sglang", version="0.5.23", platform="x86_64-manylinux_2_34")
    offered = {"node": "n1", "as_of": "2026-11-01T00:00:00Z", "text": f"sglang==0.5.23 --hash=sha256:{'a' * 64}\n"}
    assert node.json("PUT", path, offered)["source"] == "node/n1"
    with pytest.raises(ApiError, match="line 2: only NAME==VERSION"):
        node.json("PUT", path, {**offered, "text": offered["text"] + "--index-url https://example.org\n"})
    node.close()
    assert "node/n1" in ctl("engines", "lock", "sglang").stdout
    again = ctl("engines", "relock", "sglang")
    assert again.returncode == 0 and "1 lists forgotten" in again.stderr
    assert "a new list is made by the next node" in ctl("engines", "lock", "sglang").stdout
    assert "first found by node n1" in ctl("events").stdout
    unknown = ctl("engines", "lock", "llama.cpp")
    assert unknown.returncode == 1 and "not among the wanted engines" in unknown.stderr
