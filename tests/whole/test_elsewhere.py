"""Control plane, router, ctl and doctor where there is no /proc, no pidfd, no epoll and no systemd; the agent says Linux only."""
from __future__ import annotations

import json
import subprocess
import sys
import urllib.request

import pytest

from tests.conftest import ROOT
from tests.whole.cluster import Cluster, until

# What macOS lacks is taken away before anything of llmgw is imported. Only a real one shows how its kqueue behaves.
ELSEWHERE = """
import select
del select.epoll                                   # before selectors, which socket imports, has seen it
import builtins, errno, io, os, platform, resource, signal, socket, sys, time, types
for module, names in (
        (os, "pidfd_open sched_getaffinity sched_setaffinity confstr posix_fadvise posix_fallocate fdatasync copy_file_range memfd_create "
             "eventfd splice pipe2 getrandom waitid prlimit getresuid setresuid listxattr getxattr setxattr O_TMPFILE O_PATH O_DIRECT "
             "CLONE_NEWNS unshare setns"),
        (signal, "pidfd_send_signal sigtimedwait sigwaitinfo SIGRTMIN SIGPWR SIGSTKFLT"),
        (resource, "prlimit RUSAGE_THREAD"), (time, "CLOCK_BOOTTIME"),
        (socket, "AF_NETLINK AF_VSOCK SOCK_CLOEXEC SOCK_NONBLOCK TCP_KEEPIDLE TCP_USER_TIMEOUT TCP_DEFER_ACCEPT TCP_QUICKACK TCP_CORK "
                 "SO_PEERCRED SO_BINDTODEVICE SO_INCOMING_CPU")):
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)

def closed(real):
    def called(path, *more, **named):
        text = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else ""
        if text.rstrip("/") in ("/proc", "/sys", "/run/systemd") or text.startswith(("/proc/", "/sys/", "/run/systemd/")):
            raise FileNotFoundError(errno.ENOENT, "not on this system", text)
        return real(path, *more, **named)
    return called

builtins.open = io.open = closed(open)
for name in ("open", "stat", "lstat", "listdir", "scandir", "readlink", "access"):
    setattr(os, name, closed(getattr(os, name)))
sys.modules["_scproxy"] = types.SimpleNamespace(_get_proxy_settings=dict, _get_proxies=dict)
sys.platform = "darwin"
platform.system = lambda: "Darwin"
os.environ.pop("NOTIFY_SOCKET", None)
from llmgw import cli
cli.main(sys.argv[1:])
"""


class Elsewhere(Cluster):
    """Every program runs with less."""

    def words(self, *words):
        return [sys.executable, "-W", "error", "-c", ELSEWHERE, *map(str, words)]

    def start(self, name, *words):
        with open(self.log(name), "ab") as log:
            self.children[name] = subprocess.Popen(self.words(*words), env=self.env, cwd=str(self.folder),
                                                   stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def run(self, *words):
        return subprocess.run(self.words(*words), env=self.env, cwd=str(self.folder), stdin=subprocess.DEVNULL, timeout=120,
                              capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def place(qa_template, tmp_path_factory):
    made = Elsewhere("no pyz", tmp_path_factory.mktemp("elsewhere"), qa_template)
    made.env["PYTHONPATH"] = str(ROOT / "src")
    try:
        made.start_server()
        made.start_router()
        yield made
    finally:
        made.close()


def test_stand_in_the_control_plane_answers_ctl_and_feeds_the_router(place):
    asked = ("--server", place.server["url"], "--token-file", place.token("admin"))
    made = place.run("ctl", "keys", "create", "someone", "--json", *asked)
    assert made.returncode == 0, made.stderr
    key = json.loads(made.stdout)["secret"]
    for words in (("nodes",), ("models",), ("replicas", "--explain"), ("engines",), ("events",), ("mirror", "list"), ("token", "list")):
        done = place.run("ctl", *words, *asked)
        assert done.returncode == 0 and "Traceback" not in done.stderr, (words, done.stderr)

    def answered():
        place.check()
        request = urllib.request.Request(place.router["url"] + "/v1/models", headers={"Authorization": f"Bearer {key}"})
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return json.load(answer)["object"] == "list"
        except OSError:                           # it has not heard of the key yet
            return False
    until("the router knows the key", answered)
    for name in ("server", "router"):
        assert place.stop(name) == 0, place.log(name).read_text()
        assert "Traceback" not in place.log(name).read_text()


def test_stand_in_doctor_looks_at_the_machine_and_the_agent_says_linux_only(place):
    done = place.run("doctor", "--json", "--data-dir", place.dir("nothing"))
    assert done.returncode == 0, done.stderr
    assert {item["skipped"] for item in json.loads(done.stdout)["engines"]} == {"engines run on Linux only, this is Darwin"}
    refused = place.run("agent", "--server", "http://127.0.0.1:9", "--data-dir", place.dir("nothing"))
    assert refused.returncode == 78 and refused.stderr == "llmgw: the agent runs on Linux only, this is Darwin\n"
