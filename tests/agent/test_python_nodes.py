"""Agents as processes that install a Python engine: two of them alike, one killed between any two steps.

What they install is a stand-in of a few lines; server, agents, uv and Python are real, GitHub and index on loopback.
"""
from __future__ import annotations

import hashlib
import os
import pathlib
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading

import pytest

from llmgw.agent.engine_user import UV_NUMBER
from llmgw.agent.uv import MARKER
from llmgw.api import paths
from llmgw.api.client import ControlClient
from llmgw.domain.secret import Secret
from llmgw.parse import lock
from llmgw.system import accounts, proc, spawn
from llmgw.system.ports import is_free
from tests.fakes.cuda_archive import nvidia_smi
from tests.fakes.github import FakeGithub
from tests.fakes.package_index import PackageIndex
from tests.fakes.python_fleet import tiny_vllm
from tests.server.running import RunningServer, until

AWAY = "http://127.0.0.1:9"       # nobody listens there
CONFIG = """
cluster: test
engines:
  vllm: {version: 0.30.1, as_of: 2026-06-01, python: %s}
"""
STEPS = ("tools-before-rename", "tools-python-unpacked", "tools-python-ours", "python-made", "python-resolved", "python-agreed",
         "python-installed", "python-ours", "python-checked", "python-before-rename", "python-after-rename")
# an agent of root, that may: engines and uv as somebody else; any other: as itself
IS_OTHER = os.geteuid() == 0 and accounts.sees_others()
USER = {"LLMGW_ENGINE_USER": accounts.ENGINE_USER} if IS_OTHER else {}


class Agent:
    """One node's data folder, and the agent processes that work on it."""

    def __init__(self, name, folder, url, token, index, github, port):
        self.name, self.data, self.port = name, folder / name, port
        self._log = folder / f"{name}.log"
        self._words = ["--server", url, "--token-file", token, "--node", name, "--data-dir", str(self.data),
                       "--gate-port", str(port), "--engine-ports", str(port + 1)]
        self._env = {**os.environ, "LLMGW_REHEARSE_NVIDIA_PATH": str(folder / "smi"), "UV_DEFAULT_INDEX": index, "UV_HTTP_RETRIES": "0", "LLMGW_GITHUB_API": github}

    def start(self, **env):
        with open(self._log, "ab") as log:
            self.process = subprocess.Popen([sys.executable, "-m", "llmgw", "--debug", "agent", *self._words],
                                            env={**self._env, **env}, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        return self

    def close(self):
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(60)
        spawn.stop((MARKER, str(self.data)), grace_seconds=1.0)
        spawn.stop(("LLMGW_GATE", str(self.data)), grace_seconds=1.0)

    @property
    def folder(self):
        return self.data / "engines" / "vllm" / "0.30.1"

    def gigabytes(self):
        """What an install needs and nothing else: gone afterwards."""
        return {path.name for path in (self.data / "tools").iterdir()
                if path.name in ("uv-cache", "wheels", "python.tar.gz") or path.name.endswith(".scratch")}

    def list(self):
        return (self.folder / ".llmgw-packages.txt").read_text()

    def owners(self):
        """Whose the engines and the Pythons are, and how many of their folders others than the owner may write in."""
        found = [path.lstat() for top in (self.data / "engines", *self.data.glob("tools/python-*"), *self.data.glob("tools/uv-0*"))
                 for path in (top, *top.rglob("*"))]
        return {seen.st_uid for seen in found}, sum(bool(stat.S_ISDIR(seen.st_mode) and seen.st_mode & 0o022) for seen in found)

    def runs(self):
        return subprocess.run([self.folder / "bin" / "python", "-m", "vllm.entrypoints.cli.main", "--version"],
                              stdout=subprocess.PIPE, text=True, timeout=60, check=False).stdout.endswith("0.30.1\n")


@pytest.fixture
def site(tmp_path, uv_archive, python_archive):
    """A control plane that reaches GitHub, and a function that makes nodes of it."""
    yield from _site(tmp_path, uv_archive, python_archive)


@pytest.fixture
def lonely_site(tmp_path, uv_archive, python_archive):
    """The same where the control plane does not reach GitHub, and the nodes no index."""
    yield from _site(tmp_path, uv_archive, python_archive, away=True)


@pytest.fixture
def open_site(uv_archive, python_archive):
    """The first again, in a folder that everybody may pass through, as /var/lib is."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="llmgw-open-"))
    folder.chmod(0o755)
    try:
        yield from _site(folder, uv_archive, python_archive)
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def cut_off_site(tmp_path, uv_archive, python_archive):
    """The same where only the control plane does not reach GitHub."""
    yield from _site(tmp_path, uv_archive, python_archive, server_away=True)


def _site(tmp_path, uv_archive, python_archive, away=False, server_away=False):
    if shutil.disk_usage(tmp_path).free < 26 * 10**9:
        pytest.skip("vLLM asks for 25 GB of free disk, and there are less")
    version, build = python_archive
    nvidia_smi(tmp_path / "smi")
    with FakeGithub({"0.13.9": {uv_archive.name: uv_archive.path.read_bytes()},
                     version.partition("+")[2]: {build.name: build.path.read_bytes()}}) as github, PackageIndex() as index:
        tiny_vllm(index)
        github_url = AWAY if away else github.url
        server = RunningServer(tmp_path, CONFIG % version).start(LLMGW_GITHUB_API=AWAY if away or server_away else github.url)
        admin = ControlClient([server.url], Secret((server.data / "tokens" / "admin").read_text().strip()))
        agents = []

        def node(name):
            port = next(first for first in range(23000 + os.getpid() % 900 * 10, 60000, 10) if is_free("127.0.0.1", first))
            agents.append(Agent(name, tmp_path, server.url, str(server.data / "tokens" / "node"),
                                f"{AWAY}/simple" if away else index.url, github_url, port + len(agents) * 10))
            return agents[-1]

        def engine(name):
            items = admin.json("GET", paths.ENGINES)["items"]      # empty until the server's first turn
            return dict(items[0]["nodes"]).get(name, {}) if items else {}

        yield type("Site", (), {"node": staticmethod(node), "engine": staticmethod(engine), "admin": admin, "index": index,
                                "github": github, "server": server})
        for agent in agents:
            agent.close()
        admin.close()
        server.stop()


def test_stand_in_two_nodes_end_with_the_same_list_each_from_its_own_resolution(site):
    first, second = site.node("n1").start(), site.node("n2").start()
    for node in (first, second):
        until(lambda node=node: site.engine(node.name).get("usable"), f"{node.name} installs", 240)
    assert first.list() == second.list() and len(lock.read(first.list(), "list")) == 2 and first.runs() and second.runs()
    assert site.github.downloads("uv-x86_64-unknown-linux-musl.tar.gz") == 1         # once per site
    (kept,) = site.admin.json("GET", paths.fill(paths.ENGINE_LOCKS, engine="vllm", version="0.30.1"))["items"]
    assert kept["packages"] == 2 and kept["source"] in ("node/n1", "node/n2")
    said = site.engine("n1")
    assert (said["phase"], said["message"], said["source"]) == ("installed", "vllm 0.30.1", "packages")


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: needs root, which makes a user for the engines")
def test_stand_in_an_agent_of_root_makes_what_the_engines_user_runs_and_may_not_change(open_site):
    if not accounts.sees_others():
        pytest.skip("NOT TESTED: this root may not look into the processes of others")
    open_site.index.hold = threading.Event()
    agent = open_site.node("n1").start(LLMGW_ENGINE_USER=accounts.ENGINE_USER)
    until(lambda: any(path.endswith(".whl") for path in open_site.index.web.paths()), "uv fetches a file", 240)
    user = accounts.find(accounts.ENGINE_USER)
    (uv,) = proc.marked(MARKER, str(agent.data))
    ids = re.findall(r"^[UG]id:(.*)", pathlib.Path(f"/proc/{uv.pid}/status").read_text(), re.MULTILINE)
    assert [set(line.split()) for line in ids] == [{str(user.uid)}, {str(accounts.private(user, UV_NUMBER).gid)}]
    open_site.index.hold.set()
    until(lambda: open_site.engine("n1").get("usable"), "n1 installs", 240)
    assert agent.owners() == ({0}, 0)
    ask = ("import os, sys, tinydep, vllm, vllm.entrypoints.cli.main; print(os.getuid(), os.path.isfile(tinydep.__cached__), "
           "[place for place in sys.argv[1:] if os.access(place, os.W_OK)])")
    done = subprocess.run([agent.folder / "bin" / "python", "-c", ask, agent.folder, agent.folder / "bin", agent.data / "tools"],
                          user=user.uid, group=user.gid, extra_groups=[], cwd="/", env={}, stdout=subprocess.PIPE, text=True,
                          stderr=subprocess.STDOUT, timeout=60, check=False)
    assert done.stdout.splitlines()[-1] == f"{user.uid} True []", done.stdout


def test_stand_in_a_planted_list_is_refused_with_its_line_and_relock_makes_a_new_one(site):
    node = ControlClient([site.server.url], Secret((site.server.data / "tokens" / "node").read_text().strip()))
    path = paths.fill(paths.ENGINE_LOCK, engine="vllm", version="0.30.1", platform="x86_64-manylinux_2_31")
    node.json("PUT", path, {"node": "evil", "as_of": "2026-06-01T00:00:00Z",
                            "text": f"vllm==0.30.1 --hash=sha256:{'e' * 64}\n"})
    node.close()
    agent = site.node("n1").start()
    until(lambda: "line 1: vllm==0.30.1: this node finds no file with sha256 eeeeeeeeeeeeeeee…; line 1: vllm==0.30.1: the file "
          "with sha256" in site.engine("n1").get("message", ""), "the list is refused", 240)
    assert site.engine("n1")["phase"] == "failed" and not agent.folder.exists()
    site.admin.json("DELETE", paths.fill(paths.ENGINE_LOCKS, engine="vllm", version="0.30.1"))
    until(lambda: site.engine("n1").get("usable"), "n1 installs", 240)


def test_the_steps_at_which_agents_are_killed_are_all_that_there_are():
    from llmgw import agent
    found = {step for path in pathlib.Path(agent.__file__).parent.glob("python_*.py")
             for step in re.findall(r'failpoint\.reach\("([a-z-]+)"\)', path.read_text())}
    assert found == {*STEPS, "wheels-one-more"}


def test_stand_in_a_kill_between_any_two_steps_leaves_nothing_that_is_offered_and_does_not_run(open_site):
    site = open_site
    agent = site.node("n1")
    for step in STEPS:
        agent.start(LLMGW_FAILPOINT=f"{step}:kill", **USER)
        assert agent.process.wait(240) == -signal.SIGKILL, step
        assert not site.engine("n1").get("usable"), step
        assert not agent.folder.exists() or (step == "python-after-rename" and agent.runs()), step
    agent.start(**USER)
    until(lambda: site.engine("n1").get("usable"), "n1 installs", 240)
    assert agent.runs() and proc.marked(MARKER, str(agent.data)) == [] and agent.owners() == ({os.geteuid()}, 0)
    fetched = [path for path in site.index.web.paths() if path.endswith(".whl")]
    assert len(fetched) == len(set(fetched)) == 2, "what came once is in the cache"
    left = [path.name for path in (agent.data / "engines" / "vllm").iterdir()]
    assert left == ["0.30.1"]
    until(lambda: not agent.gigabytes(), "what only an install needs is removed", 60)
    agent.close()
    site.index.add("tinydep", "1.1")               # the same again for other packages: the old environment stays until the new one runs
    site.admin.json("DELETE", paths.fill(paths.ENGINE_LOCKS, engine="vllm", version="0.30.1"))
    for step in ("python-resolved", "python-ours", "python-before-rename", "python-after-rename"):
        agent.start(LLMGW_FAILPOINT=f"{step}:kill", **USER)
        assert agent.process.wait(240) == -signal.SIGKILL and agent.runs(), step
    agent.start(**USER)
    until(lambda: not agent.folder.exists(), "the old environment goes, nothing runs of it", 240)
    (new,) = (agent.data / "engines" / "vllm").iterdir()
    assert new.name.startswith("0.30.1~") and site.engine("n1")["usable"] and agent.owners() == ({os.geteuid()}, 0)
    assert "tinydep==1.0" in (agent.data / "state" / "packages" / "vllm-0.30.1.txt").read_text()


def test_stand_in_a_node_asks_github_for_uv_and_python_only_when_the_control_plane_cannot(cut_off_site):
    agent = cut_off_site.node("n1").start()
    until(lambda: cut_off_site.engine("n1").get("usable"), "n1 installs", 240)
    assert agent.runs() and cut_off_site.github.downloads("uv-x86_64-unknown-linux-musl.tar.gz") == 1


def test_stand_in_a_node_without_any_internet_installs_what_was_pulled_into_the_mirror(lonely_site, tmp_path):
    """A third machine reaches GitHub, index and control plane; it has a list of packages from elsewhere."""
    site = lonely_site
    agent = site.node("n1").start()
    said = until(lambda: "this node itself: " in site.engine("n1").get("message", "") and site.engine("n1"), "n1 waits", 240)
    assert said["message"].startswith("the control plane: the files of uv 0.13.9 are not known: ")
    assert "mirror pull-engine vllm, or import-engine uv-x86_64" in said["hint"]
    agent.close()
    packages = tmp_path / "packages.txt"
    packages.write_text("".join(
        f"{name}=={file.split('-')[1]} --hash=sha256:{hashlib.sha256(data).hexdigest()}\n"
        for name, listed in site.index.files.items() for file, (data, _) in listed.items()))
    pulled = subprocess.run(
        [sys.executable, "-m", "llmgw", "ctl", "mirror", "pull-engine", "vllm", "--index", site.index.url, "--list", packages,
         "--server", site.server.url, "--token-file", site.server.data / "tokens" / "admin"], stdin=subprocess.DEVNULL,
        env={**os.environ, "LLMGW_GITHUB_API": site.github.url, "LLMGW_DATA_DIR": str(tmp_path / "third")},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    assert pulled.returncode == 0 and "2 packages are in the mirror, uv and Python too" in pulled.stderr, pulled.stderr
    for web in (site.index.web, site.github.web):
        web.requests.clear()
    agent.start(LLMGW_FAILPOINT="wheels-one-more:kill")
    assert agent.process.wait(240) == -signal.SIGKILL and not agent.folder.exists()
    agent.start()
    until(lambda: site.engine("n1").get("usable"), "n1 installs", 240)
    assert agent.runs() and agent.list() == lock.write(lock.read(packages.read_text(), "list"))
    assert site.index.web.paths() == [] and site.github.web.paths() == [], "nobody asked the internet"
    assert agent.gigabytes() == set()


def test_stand_in_an_agent_that_was_killed_leaves_no_uv_behind_that_writes_on(site):
    site.index.hold = threading.Event()
    agent = site.node("n1").start()
    until(lambda: any(path.endswith(".whl") for path in site.index.web.paths()), "uv fetches a file", 240)
    agent.process.kill()
    agent.process.wait(30)
    (orphan,) = proc.marked(MARKER, str(agent.data))
    agent.start()
    until(lambda: orphan.pid not in [each.pid for each in proc.marked(MARKER, str(agent.data))], "the old uv ends", 60)
    site.index.hold.set()
    until(lambda: site.engine("n1").get("usable"), "n1 installs", 240)
    assert agent.runs()
