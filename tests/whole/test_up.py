"""`llmgw.pyz up` as a newcomer meets it: the built file, a real engine, a real model, a real shell."""
from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

pytestmark = pytest.mark.slow
READY_SECONDS = 240
END_SECONDS = 90


class Up:
    """One run of `up` on ``folder``; its words are in ``out`` and ``err``."""

    def __init__(self, pyz, folder, *words):
        self.folder, self.ready_file = folder, folder.parent / "ready.json"
        if self.ready_file.exists():
            self.ready_file.unlink()
        self._out, self._err = folder.parent / "out", folder.parent / "err"
        with open(self._out, "wb") as out, open(self._err, "wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, str(pyz), "up", "--data-dir", str(folder), "--json-ready", str(self.ready_file),
                 *words],
                stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True)

    @property
    def out(self):
        return self._out.read_text()

    @property
    def err(self):
        return self._err.read_text()

    def endpoint(self):
        """Where its server listens, once it does."""
        path = self.folder / "server" / "endpoint.json"
        self.wait(lambda: path.exists(), "no server listens")
        return json.loads(path.read_text())

    def ready(self):
        self.wait(self.ready_file.exists, "not ready")
        return json.loads(self.ready_file.read_text())

    def wait(self, true, what):
        deadline = time.monotonic() + READY_SECONDS
        while not true():
            assert self.process.poll() is None, f"up ended: {self.err}"
            assert time.monotonic() < deadline, f"{what}: {self.err}\n{self.logs()}"
            time.sleep(0.1)

    def logs(self):
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in self.folder.glob("logs/*.log"))

    def stop(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        return self.process.wait(END_SECONDS)

    def curl_line(self):
        (line,) = [line for line in self.out.splitlines() if line.startswith("curl ")]
        return line


def left_behind(folder):
    """Everything alive that names the folder in its command or environment."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/cmdline", "rb") as cmdline, open(f"/proc/{name}/environ", "rb") as environ:
                said = cmdline.read(), environ.read()
            with open(f"/proc/{name}/stat") as stat:
                zombie = stat.read().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            continue
        if not zombie and any(os.fsencode(str(folder)) in part for part in said):
            found.append((int(name), said[0]))
    return found


def ctl(pyz, endpoint, *words):
    return subprocess.run([sys.executable, str(pyz), "ctl", *words, "--server", endpoint["url"], "--token-file",
                           endpoint["admin_token_file"]], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, timeout=120, check=False)


@contextmanager
def running(pyz, folder, *words):
    """An `up` that is ended, with all it started, whatever the test does."""
    up = Up(pyz, folder, *words)
    try:
        yield up
    finally:
        if up.process.poll() is None:
            up.stop()
        for pid, _ in left_behind(folder):
            os.kill(pid, signal.SIGKILL)


def shell(line):
    return subprocess.run(line, shell=True, stdout=subprocess.PIPE, text=True, timeout=120, check=True).stdout


@pytest.fixture(scope="module")
def words(gemma, qa_template):
    return ["--model", str(gemma), "--name", "gemma", "--context-length", "2048", "--chat-template", str(qa_template)]


@pytest.fixture(scope="module")
def first(pyz, llama_archive, words, tmp_path_factory):
    """A first start on an empty folder, seen to the end: (folder, its ready file, what the tests want to know)."""
    folder = tmp_path_factory.mktemp("up") / "data"
    with running(pyz, folder, *words) as up:
        endpoint = up.endpoint()
        imported = ctl(pyz, endpoint, "mirror", "import-engine", str(llama_archive.path),
                       "--sha256", llama_archive.sha256)
        assert imported.returncode == 0, imported.stderr
        ready = up.ready()
        seen = {
            "answer": shell(up.curl_line()), "out": up.out, "ready": ready,
            "ctl": {name: ctl(pyz, endpoint, *name.split()) for name in (
                "nodes", "models", "replicas", "engines", "events", "keys list", "mirror list", "replicas --explain")},
            "refused": subprocess.run([sys.executable, str(pyz), "up", "--data-dir", str(folder)], check=False,
                                      stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=60),
            "alive": left_behind(folder)}
        seen["code"], seen["left"], seen["err"] = up.stop(), left_behind(folder), up.err
    return folder, seen


def test_the_printed_line_runs_as_printed_and_the_answer_is_right(first):
    answer = json.loads(first[1]["answer"])
    assert "Paris" in answer["choices"][0]["message"]["content"], answer


def test_url_key_and_one_line_are_the_data_and_the_states_are_not(first):
    _, seen = first
    assert seen["ready"]["key"] in seen["out"] and seen["ready"]["url"] + "/v1\n" in seen["out"]
    assert seen["out"].count("curl ") == 1 and "curl" not in seen["err"]
    assert seen["ready"]["key"] not in seen["err"]
    for said in ("llama.cpp b10991: installed", "gemma: ready", "stopping", "stopped"):
        assert said in seen["err"], seen["err"]


def test_ctl_shows_the_same_machine(first):
    shown = {name: done.stdout for name, done in first[1]["ctl"].items()}
    assert all(done.returncode == 0 for done in first[1]["ctl"].values()), first[1]["ctl"]
    assert "ready" in shown["nodes"] and "1/1" in shown["models"] and "installed" in shown["engines"]
    assert "up" in shown["keys list"] and "llama.cpp b10991" in shown["mirror list"] and "gemma" in shown["replicas"]
    assert shown["events"] and "rank 0" in shown["replicas --explain"]


def test_a_second_up_on_the_same_folder_is_refused_with_a_sentence(first):
    refused = first[1]["refused"]
    assert refused.returncode == 1 and "another llmgw up (pid" in refused.stderr


def test_the_end_leaves_no_process_behind(first):
    _, seen = first
    assert seen["code"] == 0 and seen["left"] == []
    assert len(seen["alive"]) >= 6, "up, server, agent, router, gate and engine were there before"
    for pid in seen["ready"]["pids"].values():
        assert not os.path.exists(f"/proc/{pid}")


def test_no_log_holds_a_key_or_a_token(first):
    folder, seen = first
    secrets = [seen["ready"]["key"]] + [path.read_text().strip() for path in (folder / "server" / "tokens").iterdir()]
    assert len(secrets) >= 5 and all(len(secret) > 40 for secret in secrets)
    texts = [path.read_text(errors="replace") for path in folder.rglob("*.log*")] + [seen["err"]]
    assert len(texts) >= 5 and not [secret for secret in secrets for text in texts if secret in text]


def test_the_second_start_needs_nothing_and_keeps_the_key(pyz, words, first):
    folder, seen = first
    began = time.monotonic()
    with running(pyz, folder, *words) as up:
        ready = up.ready()
        took = time.monotonic() - began
        assert ready["key"] == seen["ready"]["key"]
        assert "Paris" in shell(up.curl_line())
        assert "sending" not in up.err and "reading" not in up.err, up.err
        assert took < 60, f"{took:.0f} s: {up.err}"
        assert up.stop(signal.SIGINT) == 0
    assert left_behind(folder) == []


def test_kill_9_of_up_leaves_nothing_and_the_next_start_serves(pyz, first):
    folder, _ = first
    with running(pyz, folder) as up:
        up.ready()
        up.process.kill()
        up.process.wait()
        deadline = time.monotonic() + END_SECONDS
        while left_behind(folder):
            assert time.monotonic() < deadline, left_behind(folder)
            time.sleep(0.1)
    with running(pyz, folder) as up:
        up.ready()
        assert "Paris" in shell(up.curl_line())


@pytest.mark.parametrize("role", ["server", "agent", "router"])
def test_a_role_that_dies_ends_everything_with_one_sentence(pyz, first, role):
    folder, _ = first
    with running(pyz, folder, "--no-model") as up:
        os.kill(up.ready()["pids"][role], signal.SIGKILL)
        assert up.process.wait(END_SECONDS) == 1
        assert f"llmgw: the {role} ended: signal 9\n" in up.err
    assert left_behind(folder) == []


def test_taken_ports_are_replaced_and_the_choice_is_said(pyz, tmp_path):
    held = []
    for port in (7800, 7801, 7802):
        taken = socket.socket()
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("127.0.0.1", port))
            taken.listen()
        except OSError:                       # somebody else holds it already
            pass
        held.append(taken)
    try:
        with running(pyz, tmp_path / "data", "--no-model") as up:
            ready = up.ready()
            assert all(f"port {port} is taken" in up.err for port in (7800, 7801, 7802))
            assert ready["url"] in up.err and not ready["url"].endswith(":7801")
            assert "no model yet" in up.err
    finally:
        for taken in held:
            taken.close()


def test_a_broken_configuration_is_one_sentence_and_exit_78(pyz, tmp_path):
    broken = tmp_path / "server.yaml"
    broken.write_text("cluster: x\nmodles: []\n")
    with running(pyz, tmp_path / "data", "--config", str(broken)) as up:
        assert up.process.wait(60) == 78
        assert "llmgw: the server did not start: " in up.err and "line 2: modles: unknown key" in up.err
        assert "Traceback" not in up.err


def test_an_edit_that_cannot_be_used_is_told_while_it_serves_on(pyz, tmp_path):
    with running(pyz, tmp_path / "data", "--no-model") as up:
        up.ready()
        config = tmp_path / "data" / "server.yaml"
        good = config.read_text()
        config.write_text(good + "modles: []\n")
        up.wait(lambda: "modles: unknown key" in up.err, "the edit is not told")
        config.write_text(good)
        up.wait(lambda: "server.yaml is in order again" in up.err, "the repair is not told")


def test_a_file_that_is_no_model_is_one_sentence_and_everything_stopped(pyz, gemma, tmp_path):
    cut = tmp_path / "cut.gguf"
    with open(gemma, "rb") as whole:
        cut.write_bytes(whole.read(1 << 20))
    with running(pyz, tmp_path / "data", "--model", str(cut)) as up:
        assert up.process.wait(60) == 1
        assert up.err.count("llmgw: ") == 1 and "cut.gguf: not a usable GGUF file" in up.err
    assert left_behind(tmp_path / "data") == []


def test_a_terminal_that_goes_away_ends_it_in_order(pyz, tmp_path):
    with running(pyz, tmp_path / "data", "--no-model") as up:
        up.ready()
        assert up.stop(signal.SIGHUP) == 0
    assert left_behind(tmp_path / "data") == []
