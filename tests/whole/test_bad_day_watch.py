"""Watching a cluster that fails in many ways: ctl --watch on a terminal and in a pipe, and logs that say each thing once."""
from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from tests.fakes import gguf_file
from tests.whole.bad_day import NOWHERE, log_lines, logged, repeated
from tests.whole.cluster import Cluster, free_block, until

pytestmark = pytest.mark.slow
CANARY = "CANARYcanaryCANARYcanaryCANARYcanary"
SECRETS = {role: f"llmgw_{role}_Canary{number:02d}_{CANARY}{role:_<7.7}"
           for number, role in enumerate(("admin", "viewer", "node", "router"))}
YAML = """\
cluster: test
listen: 127.0.0.1:0
engines:
  llama.cpp: {version: b10991}
models:
  - {name: broken, engine: llama.cpp, weights: 'mirror:broken', context_length: 512}
  - {name: absent, engine: llama.cpp, weights: 'mirror:absent'}
  - {name: gone, engine: llama.cpp, weights: 'file:/nowhere/gone.gguf'}
"""
FAILS_SECONDS = 12.0


@pytest.fixture(scope="module")
def place(pyz, llama_archive, qa_template, tmp_path_factory):
    """A cluster with a model that no engine can load, two without weights, and roles that nobody answers."""
    made = Cluster(pyz, tmp_path_factory.mktemp("watch"), qa_template)
    made.env["LLMGW_GITHUB_API"] = NOWHERE
    made.config.write_text(YAML)
    (made.dir("server") / "tokens").mkdir(parents=True)
    for role, secret in SECRETS.items():
        made.token(role).write_text(secret + "\n")
    model = made.folder / "broken.gguf"
    model.write_bytes(gguf_file.small_model())
    try:
        made.start_server()
        made.start_agent()
        made.start_router()
        made.ctl("mirror", "import-engine", llama_archive.path, "--sha256", llama_archive.sha256)
        made.ctl("mirror", "import", model, "--name", "broken")
        made.key = json.loads(made.ctl("keys", "create", "canary", "--json"))["secret"]
        start_lost(made)
        until("it crashes", lambda: made.items("replicas") and made.items("replicas")[0]["state"] == "crashloop", 120)
        yield made
    finally:
        made.close()


def start_lost(place):
    """An agent and a router that ask where nobody listens, and an agent whose token is not one."""
    ports = free_block(48)
    (place.folder / "wrong").write_text(SECRETS["node"][:-1] + "x\n")
    for name, server, token in (("lost-1", NOWHERE, place.token("node")), ("lost-2", place.server["url"], place.folder / "wrong")):
        ports += 16
        place.start(name, "agent", "--server", server, "--token-file", token, "--node", name, "--data-dir",
                    place.dir(name), "--gate-port", ports, "--engine-ports", ports + 1, "--owned")
    place.start("lost-3", "router", "--server", NOWHERE, "--token-file", place.token("router"), "--listen",
                "127.0.0.1:0", "--data-dir", place.dir("lost-3"))


# The logs. -----------------------------------------------------------------------------------------------------------

def ask(url, secret, path):
    """Send a request that is refused, with a secret wherever somebody could put one."""
    request = urllib.request.Request(f"{url}{path}?api_key={secret}", data=b'{"model": "broken", "prompt": "x"}', headers={
        "Authorization": f"Bearer {secret}", "X-Api-Key": secret, "Content-Type": "application/json"})
    with contextlib.suppress(urllib.error.HTTPError):
        urllib.request.urlopen(request, timeout=10).close()


def test_what_fails_for_long_is_told_once_and_no_secret_is_in_it(place):
    doors = [place.server["url"], place.router["url"]]
    started, secrets = time.monotonic(), [*SECRETS.values(), place.key]
    while time.monotonic() - started < FAILS_SECONDS:
        for url in doors:
            for secret in secrets:
                ask(url, secret, "/v1/completions")
                ask(url, secret, f"/v1/{secret}")
        time.sleep(0.5)
    assert repeated(place) == []
    keys = [shard["key"] for shard in json.loads(
        (place.dir("node-1") / "state" / "desired.json").read_text())["desired"]["shards"]]
    assert len(keys) == 1
    texts = {str(path): path.read_text(errors="replace") for path in place.folder.rglob("*.log")}
    texts.update({word: place.ctl(word) for word in ("events", "nodes", "models", "replicas", "engines")})
    texts["explain"] = place.ctl("replicas", "--explain")
    assert any("engine.log" in path for path in texts) and any("gate.log" in path for path in texts)
    for where, text in texts.items():
        assert CANARY not in text and place.key[-30:] not in text and keys[0] not in text, where
        assert "Traceback" not in text, where


def test_each_change_of_state_is_one_line_with_its_reason(place):
    for name, words in {
            "server": ("replica/broken-", "reason=Crashloop", "the engine ended unasked"),
            "lost-3": ("no table from the control plane reason=Unreachable",)}.items():
        assert len(logged(place, name, *words)) == 1, (name, words, place.log(name).read_text()[-3000:])
    for name, words in {
            "lost-1": ("no heartbeat reason=Unreachable", "connection refused"),
            "lost-2": ("no heartbeat reason=Unauthorized", "the token is not known here")}.items():
        told = [re.search(r"failures=([0-9]+)", line).group(1) for line in logged(place, name, *words)]
        assert told in (["1"], ["1", "10"]), (name, told)     # the first, and the tenth to show that it lasts
    for model, why in (("absent", "weights mirror:absent are not in the mirror"), ("gone", "cannot read /nowhere/gone.gguf")):
        assert len(logged(place, "server", f"model/{model} reason=Unplaced: ", why)) == 1
    failed = logged(place, "node-1", "shard failed shard=broken-", "reason=Ended")
    assert 3 <= len(failed) <= 6 and all("next_start_in=" in line for line in failed)
    assert all(level != "DEBUG" for name in place.children for level, _ in log_lines(place, name))


def test_a_crash_loop_is_explained_with_its_first_failure(place):
    said = place.ctl("replicas", "--explain")
    assert "crashloop" in said and "first failure, " in said and "  command: " in said and "its log ended:" in said


# --watch. ------------------------------------------------------------------------------------------------------------

def argv(place, *words):
    return [sys.executable, "-I", place.pyz, "ctl", *words, "--server", place.server["url"],
            "--token-file", str(place.token("admin"))]


class Terminal:
    """A command on a terminal of 100 columns; ``shown`` is all that came."""

    def __init__(self, place, *words):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execve(sys.executable, argv(place, *words), {**place.env, "COLUMNS": "100", "TERM": "xterm"})
        self.shown = ""

    def read_until(self, condition, seconds=30.0):
        deadline = time.monotonic() + seconds
        while not condition(self.shown):
            assert time.monotonic() < deadline, self.shown
            if select.select([self.fd], [], [], 0.2)[0]:
                with contextlib.suppress(OSError):
                    self.shown += os.read(self.fd, 1 << 16).decode("utf-8", "replace")

    def end(self):
        """Press Ctrl-C; return the exit code."""
        os.write(self.fd, b"\x03")
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                if select.select([self.fd], [], [], 0.05)[0]:
                    self.shown += os.read(self.fd, 1 << 16).decode("utf-8", "replace")
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                os.close(self.fd)
                return os.waitstatus_to_exitcode(status)
        os.kill(self.pid, signal.SIGKILL)
        raise AssertionError("Ctrl-C ended nothing: " + self.shown)


@pytest.mark.parametrize("word, title, row", [("nodes", "NODE", "node-1"), ("models", "MODEL", "broken"),
                                              ("replicas", "REPLICA", "crashloop")])
def test_watch_on_a_terminal_redraws_in_place_and_ends_with_ctrl_c(place, word, title, row):
    terminal = Terminal(place, word, "--watch")
    terminal.read_until(lambda shown: title in shown and row in shown)
    assert terminal.shown.startswith("\x1b[H\x1b[2J")
    assert terminal.end() == 130
    assert "Traceback" not in terminal.shown and "KeyboardInterrupt" not in terminal.shown
    assert max(len(line) for line in terminal.shown.replace("\x1b[H\x1b[2J", "").splitlines()) <= 110


def test_watch_on_a_terminal_shows_what_changes_and_a_server_that_is_away(place):
    terminal = Terminal(place, "models", "--watch")
    try:
        terminal.read_until(lambda shown: "absent" in shown)
        place.config.write_text(YAML.replace("name: absent", "name: renamed"))
        terminal.read_until(lambda shown: "renamed" in shown)
        assert terminal.shown.count("\x1b[H\x1b[2J") >= 2
        address = place.server["url"].partition("://")[2]
        assert place.stop("server") == 0
        terminal.read_until(lambda shown: f"llmgw: {place.server['url']}: connection refused" in shown)
        place.start("server", "server", "--config", place.config, "--data-dir", place.dir("server"), "--listen", address)
        place.server = place.endpoint("server")
        gone = len(terminal.shown)
        terminal.read_until(lambda shown: "renamed" in shown[gone:])
    finally:
        assert terminal.end() == 130


@pytest.mark.parametrize("word, row", [("nodes", "node-1"), ("models", "broken"), ("replicas", "crashloop")])
def test_watch_in_a_pipe_prints_plain_text_when_something_changed(place, word, row):
    child = subprocess.Popen(argv(place, word, "--watch"), env=place.env, stdin=subprocess.DEVNULL,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with child:
        os.set_blocking(child.stdout.fileno(), False)
        shown = bytearray()

        def comes():
            shown.extend(child.stdout.read() or b"")
            return row.encode() in shown
        until("a table", comes)
        child.send_signal(signal.SIGINT)
        complaint = child.stderr.read()
        assert child.wait(20) == 130 and complaint == b""
    assert b"\x1b" not in shown and shown.endswith(b"\n")


def test_watch_into_a_reader_that_has_seen_enough_ends_without_a_complaint(place):
    command = " ".join(argv(place, "nodes", "--watch")) + " | head -1"
    done = subprocess.run(["sh", "-c", command], env=place.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.stdout.startswith("NODE") and done.stderr == ""
