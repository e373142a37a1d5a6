"""The console in a pseudo-terminal, against a real server: keys, resizing, a lost connection, an import from Ollama."""
from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from tests.ctl.test_real_server import Server
from tests.fakes.terminal import Terminal
from tests.server.running import StandInNode

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent.parent
OLLAMA = ROOT / "tests" / "data" / "ollama"
pytestmark = pytest.mark.slow


class Site:
    """A server, a node that is only heartbeats, and what ctl needs to find both."""

    def __init__(self, folder):
        self.server = Server(folder)
        self.env = {"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": str(ROOT / "src"), "TERM": "xterm-256color",
                    "LANG": "C.UTF-8", "LLMGW_DATA_DIR": str(folder / "data")}

    def console(self, *words, **more):
        env = {**self.env, **more.pop("env", {})}
        return Terminal([sys.executable, "-W", "error", "-m", "llmgw", "ctl", "console", *words], env, **more)

    def client(self, role):
        from llmgw.api.client import ControlClient
        from llmgw.domain.secret import Secret
        return ControlClient([self.server.url], Secret((self.server.data / "tokens" / role).read_text().strip()), timeout=60)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    made = Site(tmp_path_factory.mktemp("site"))
    node = StandInNode(made, "anna")
    node.beat()
    yield made
    node.client.close()
    made.server.stop()


def left_as_it_was(terminal):
    """Whether the program ended well and gave the screen back."""
    assert terminal.process.wait(60) == 0
    terminal._reader.join(10)
    return b"\x1b[?1049l" in terminal.raw


def test_nodes_and_mirror_are_seen_and_q_leaves_the_terminal_as_it_was(site):
    with site.console() as terminal:
        terminal.until("anna")
        assert "[1 Nodes]" in terminal.lines[0] and "q leave" in terminal.lines[23] and len(terminal.lines) == 24
        terminal.press("enter")
        terminal.until("processor")
        terminal.press("escape")
        terminal.until("1 nodes, ")
        terminal.press("tab")
        terminal.until("[2 Mirror]")
        terminal.press("?")
        terminal.until("this help")
        terminal.press("q")
        assert left_as_it_was(terminal)


def test_it_follows_a_resize_to_larger_and_to_tiny_and_back(site):
    with site.console() as terminal:
        terminal.until("anna")
        terminal.resize(120, 40)
        terminal.until(lambda text: "q leave" in terminal.lines[39] and "q leave" not in terminal.lines[23])
        terminal.resize(10, 3)
        terminal.until(lambda text: len(terminal.lines) == 3 and "llmgw" in terminal.lines[0])
        terminal.resize(80, 24)
        terminal.until(lambda text: "q leave" in terminal.lines[23] and "anna" in text)
        terminal.press("q")
        assert left_as_it_was(terminal)


@pytest.mark.parametrize("env", [{"TERM": "vt100"}, {"NO_COLOR": "1"}, {"LANG": "C", "LC_ALL": "C"}], ids=str)
def test_terminals_without_colour_or_unicode_are_fine(site, env):
    with site.console(env=env) as terminal:
        terminal.until("anna")
        assert b"\x1b[31m" not in terminal.raw
        terminal.press("q")
        assert terminal.process.wait(60) == 0


def test_a_model_of_ollama_is_imported_with_i_and_enter(site):
    with site.console("--ollama-dir", str(OLLAMA), columns=120) as terminal:
        terminal.press("2")
        terminal.until("[2 Mirror]")
        terminal.press("I")
        shown = terminal.until("tiny-vision:latest")
        assert "cannot be taken" in shown
        at = next(number for number, line in enumerate(terminal.lines) if line.startswith("tiny-vision:latest"))
        terminal.press(*["down"] * (at - 2))
        terminal.press("enter")
        terminal.until("tiny-vision:latest: in the mirror")
        terminal.until(lambda text: any(line.startswith("tiny-vision:latest") and " tiny-vision " in f"{line} "
                                        for line in terminal.lines))
        terminal.press("escape")
        terminal.until("gguf+vision")
        terminal.press("q")
        assert left_as_it_was(terminal)
    client = site.client("admin")
    assert [model["name"] for model in client.json("GET", "/v1/mirror")["models"]] == ["tiny-vision"]
    client.close()


def test_a_server_that_is_gone_is_said_and_its_return_is_seen(tmp_path):
    site = Site(tmp_path)
    try:
        with site.console("--server", site.server.url, "--token-file", site.server.token("admin")) as terminal:
            terminal.until("no node has called yet")
            site.server.process.send_signal(signal.SIGKILL)
            site.server.process.wait(30)
            terminal.until("what is shown may be old")
            port = site.server.url.rpartition(":")[2]
            with open(tmp_path / "server.log", "ab") as log:
                site.server.process = subprocess.Popen(
                    [sys.executable, "-m", "llmgw", "server", "--config", str(site.server.config), "--data-dir",
                     str(site.server.data), "--listen", f"127.0.0.1:{port}"], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            terminal.until(lambda text: "may be old" not in text)
            terminal.press("q")
            assert left_as_it_was(terminal)
    finally:
        site.server.stop()


def test_without_a_terminal_it_says_what_to_use_instead(site):
    done = subprocess.run([sys.executable, "-m", "llmgw", "ctl", "console"], env=site.env, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 2 and "needs a terminal" in done.stderr and "--watch" in done.stderr
    assert json.dumps(done.stdout) == '""'
