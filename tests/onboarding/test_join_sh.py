"""join.sh and uninstall.sh in every shell, with a stand-in for llmgw.pyz and programs that only record how they are called."""
from __future__ import annotations

import contextlib
import functools
import hashlib
import http.server
import json
import os
import pathlib
import shutil
import subprocess
import sys
import threading
from urllib.parse import quote

import pytest

pytestmark = pytest.mark.slow
ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SCRIPTS = ROOT / "onboarding"
SHELLS = {"dash": ["dash"], "busybox": ["busybox", "sh"], "bash": ["bash", "--posix"]}
SECRET = "llmgw1.canary-of-a-join-string"
RECORDER = """#!/bin/sh
printf '%s\\n' "$(basename "$0") $*" >> "$RECORD"
case "$(basename "$0") $*" in
    "systemctl restart llmgw-agent.service") mkdir -p "$LLMGW_STATE/agent/state"; : > "$LLMGW_STATE/agent/state/desired.json" ;;
    "systemctl is-active"*) grep -q "systemctl restart" "$RECORD" ;;
esac
"""


def stand_in(number):
    """A program that says its version, as llmgw.pyz does."""
    return f"import sys\nprint('llmgw 0.{number}')\n".encode()


def sha256(data):
    return hashlib.sha256(data).hexdigest()


class Machine:
    """A machine's folders below one of ours, and a shell."""

    def __init__(self, folder, shell):
        self.folder, self.shell = folder, [shutil.which(SHELLS[shell][0]), *SHELLS[shell][1:]]
        self.prefix, self.etc, self.state, self.units = (folder / name for name in ("opt", "etc", "state", "units"))
        self.record, self.bin, self.web = folder / "record", folder / "bin", folder / "web"
        self.units.mkdir()
        self.bin.mkdir()
        self.web.mkdir()
        for name in ("systemctl", "useradd", "usermod", "userdel", "chown"):
            (self.bin / name).write_text(RECORDER)
            (self.bin / name).chmod(0o755)
        self.offer(1)

    def offer(self, number):
        (self.web / "llmgw.pyz").write_bytes(stand_in(number))
        self.hash = sha256(stand_in(number))

    def run(self, *words, script="join.sh", text=None, **environment):
        path = SCRIPTS / script
        if text is not None:
            path = self.folder / "cut.sh"
            path.write_text(text)
        env = {"PATH": f"{self.bin}:{os.environ['PATH']}", "RECORD": str(self.record), "LLMGW_PREFIX": str(self.prefix),
               "LLMGW_ETC": str(self.etc), "LLMGW_STATE": str(self.state), "LLMGW_SYSTEMD_DIR": str(self.units),
               "LLMGW_SYSTEMD_RUN": str(self.units),
               "LLMGW_SERVER": "https://control.example:7800", "LLMGW_JOIN": SECRET, "LLMGW_SHA256": self.hash,
               "LLMGW_PYTHON": sys.executable, "LLMGW_FILE": str(self.web / "llmgw.pyz"), "LLMGW_WAIT": "5", **environment}
        done = subprocess.run([*self.shell, str(path), *words], env={key: value for key, value in env.items() if value},
                              stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
        assert SECRET not in done.stdout + done.stderr
        return done

    def calls(self):
        """Return what was called since the last time."""
        found = self.record.read_text().splitlines() if self.record.exists() else []
        self.record.unlink(missing_ok=True)
        assert SECRET not in "\n".join(found)
        return [line for line in found if line.startswith("systemctl")]

    def installed(self):
        return sorted(path.name for path in self.prefix.iterdir()) if self.prefix.exists() else []


@pytest.fixture(params=SHELLS)
def machine(request, tmp_path):
    if not shutil.which(SHELLS[request.param][0]):
        pytest.skip(f"NOT TESTED: there is no {request.param} here")
    return Machine(tmp_path, request.param)


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *unused):
        pass


def served(folder):
    return listening(functools.partial(Quiet, directory=str(folder)))


@contextlib.contextmanager
def listening(handler):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join(60)


def test_a_stand_in_is_loaded_checked_installed_and_started_and_again_nothing_happens(machine):
    with served(machine.web) as url:
        done = machine.run(LLMGW_FILE="", LLMGW_URL=f"{url}/llmgw.pyz")
        assert done.returncode == 0, done.stderr
        name = f"llmgw-{machine.hash[:12]}.pyz"
        assert machine.installed() == [name, "llmgw.pyz"] and os.readlink(machine.prefix / "llmgw.pyz") == str(
            machine.prefix / name)
        assert machine.calls() == ["systemctl daemon-reload", "systemctl enable llmgw-agent.service",
                                   "systemctl restart llmgw-agent.service"]
        unit = (machine.units / "llmgw-agent.service").read_text()
        assert SECRET not in unit and f"--join-file {machine.etc}/agent.join" in unit and "KillMode=process" in unit
        assert (machine.etc / "agent.join").read_text().strip() == SECRET
        assert (machine.etc / "agent.join").stat().st_mode & 0o777 == 0o600
        assert "the control plane knows this node" in done.stderr
    machine.record.write_text("systemctl restart\n")
    again = machine.run(LLMGW_FILE="", LLMGW_URL="http://127.0.0.1:9/llmgw.pyz")
    assert again.returncode == 0 and "nothing of it has changed" in again.stderr, again.stderr
    assert "systemctl restart llmgw-agent.service" not in machine.calls()
    machine.offer(2)
    assert machine.run().returncode == 0 and "systemctl restart llmgw-agent.service" in machine.calls()
    assert os.readlink(machine.prefix / "llmgw.pyz").endswith(f"{machine.hash[:12]}.pyz")


TOOLS = ("cat", "cut", "tr", "uname", "id", "sed", "mktemp", "cp", "chmod", "mv", "mkdir", "dirname", "grep", "ln", "readlink", "rm",
         "rmdir", "basename", "sha256sum", "sleep")


def only(machine, *more):
    """Return a PATH that leads to few tools and to no Python."""
    folder = machine.folder / "few"
    folder.mkdir()
    for tool in (*TOOLS, *more):
        os.symlink(shutil.which(tool), folder / tool)
    return f"{machine.bin}:{folder}"


def test_where_there_is_no_python_uv_brings_one(machine, uv_archive, python_archive):
    """The real uv and a real Python, from this machine instead of from GitHub."""
    version, python = python_archive
    patch, _, build = version.partition("+")
    major, minor, micro = (int(part) for part in patch.split("."))
    family = python.name.split("-")[2]
    shutil.copy(uv_archive.path, machine.web)
    listing = machine.folder / "pythons.json"
    listing.write_text(json.dumps({f"cpython-{patch}-linux-{family}-gnu": {
        "name": "cpython", "arch": {"family": family, "variant": None}, "os": "linux", "libc": "gnu", "major": major, "minor": minor,
        "patch": micro, "prerelease": "", "url": f"file://{quote(str(python.path))}", "sha256": python.sha256, "variant": None,
        "build": build}}))
    path = only(machine, "tar", "gzip", "curl")
    with served(machine.web) as url:
        told = {"PATH": path, "LLMGW_PYTHON": "", "LLMGW_UV_URL": f"{url}/{uv_archive.name}", "no_proxy": "127.0.0.1",
                "LLMGW_UV_SHA256": uv_archive.sha256, "UV_PYTHON_DOWNLOADS_JSON_URL": str(listing)}
        refused = machine.run("--no-python", **told)
        assert refused.returncode == 69 and "none is installed" in refused.stderr and "try:" in refused.stderr
        shown = machine.run("--dry-run", **told)
        assert shown.returncode == 0 and "would: load" in shown.stderr and not machine.installed()
        wrong = machine.run(**{**told, "LLMGW_UV_SHA256": "0" * 64})
        assert wrong.returncode == 65 and "expected 0000" in wrong.stderr and not machine.installed() and not machine.calls()
        done = machine.run(**told)
    assert done.returncode == 0, done.stderr
    unit = (machine.units / "llmgw-agent.service").read_text()
    program = unit.partition("ExecStart=")[2].split(" ")[0]
    assert program.startswith(f"{machine.prefix}/python/cpython-") and f"as {machine.prefix}/llmgw-" in done.stderr
    told_version = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60).stdout
    assert told_version.strip() == f"Python {patch}"
    again = machine.run(**{**told, "LLMGW_UV_URL": "http://127.0.0.1:9/uv"})
    assert again.returncode == 0 and "uv brings" not in again.stderr, again.stderr
    assert machine.run("--purge", script="uninstall.sh").returncode == 0 and not machine.prefix.exists()


def test_a_proxy_is_used_and_the_service_is_told_of_it(machine):
    """A stand-in for a forward proxy; the server's name leads nowhere."""
    with proxied(machine.web / "llmgw.pyz") as (proxy, asked):
        done = machine.run(LLMGW_FILE="", LLMGW_URL="http://control.invalid:7800/llmgw.pyz", http_proxy=proxy)
    assert done.returncode == 0 and asked == ["http://control.invalid:7800/llmgw.pyz"], done.stderr
    assert (machine.etc / "agent.env").read_text() == f"http_proxy={proxy}\n"
    assert (machine.etc / "agent.env").stat().st_mode & 0o777 == 0o600, "its address may hold a password"


@contextlib.contextmanager
def proxied(file):
    """Run a proxy that answers everything with ``file``; give (its URL, what it was asked)."""
    asked = []

    class Proxy(Quiet):
        def do_GET(self):
            asked.append(self.path)
            data = file.read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    with listening(Proxy) as url:
        yield url, asked


def test_a_wrong_hash_leaves_nothing(machine):
    done = machine.run(LLMGW_SHA256="0" * 64)
    assert done.returncode == 65 and "expected 0000" in done.stderr and not machine.installed() and not machine.calls()


@pytest.mark.parametrize("environment, code, words", [
    ({"LLMGW_SHA256": ""}, 64, "is never run unchecked"), ({"LLMGW_SHA256": "abc"}, 64, "is never run unchecked"),
    ({"LLMGW_SERVER": ""}, 64, "LLMGW_SERVER is missing"), ({"LLMGW_SERVER": "http://10.0.0.1:7800"}, 64, "is not https"),
    ({"LLMGW_JOIN": ""}, 64, "LLMGW_JOIN is missing"), ({"LLMGW_FILE": "/nowhere/at/all.pyz"}, 66, "there is no file"),
    ({"LLMGW_FILE": "", "LLMGW_URL": "http://127.0.0.1:9/llmgw.pyz"}, 69, "cannot load"),
    ({"LLMGW_PYTHON": "/nonexistent/python"}, 69, "no Python 3.9 or newer"),
])
def test_each_cause_has_its_code_and_its_sentence(machine, environment, code, words):
    done = machine.run(**environment)
    assert done.returncode == code and words in done.stderr, done.stderr


def test_an_old_python_and_one_without_its_library_are_told_apart(machine):
    for name, words in (("old", "is Python 3.6, 3.9 is needed"), ("minimal", "lacks sqlite3 http.server")):
        fake = machine.bin / name
        fake.write_text(f"#!/bin/sh\necho '{words}' >&2\nexit 1\n")
        fake.chmod(0o755)
        done = machine.run(LLMGW_PYTHON=str(fake))
        assert done.returncode == 69 and words in done.stderr and "try:" in done.stderr


def test_what_does_not_run_is_not_installed(machine):
    data = b"import sys\nsys.exit('needs something')\n"
    (machine.web / "llmgw.pyz").write_bytes(data)
    done = machine.run(LLMGW_SHA256=sha256(data))
    assert done.returncode == 70 and "needs something" in done.stderr and machine.installed() == []


def test_a_dry_run_changes_nothing(machine):
    done = machine.run("--dry-run")
    assert done.returncode == 0 and "would: install" in done.stderr, done.stderr
    assert not machine.installed() and not machine.etc.exists() and not list(machine.units.iterdir()) and not machine.calls()


def test_without_systemd_it_says_how_to_start_it(machine):
    (machine.bin / "systemctl").unlink()
    done = machine.run(PATH=only(machine))
    assert done.returncode == 0 and "there is no systemd here" in done.stderr, done.stderr
    assert f"-I {machine.prefix}/llmgw.pyz agent --server https://control.example:7800" in done.stderr


def test_where_systemd_does_not_run_it_is_not_asked_for_anything(machine):
    """As in a container, or in an image that is being built."""
    done = machine.run(LLMGW_SYSTEMD_RUN="/nowhere/at/all")
    assert done.returncode == 0 and "there is no systemd here" in done.stderr and not machine.calls()
    built = machine.run(LLMGW_SYSTEMD_RUN="/nowhere/at/all", LLMGW_NO_START="1")
    assert built.returncode == 0 and "installed, not started" in built.stderr and not machine.calls()
    assert (machine.units / "llmgw-agent.service").exists()


@pytest.mark.parametrize("role", ["router", "server"])
def test_router_and_server_are_installed_too(machine, role):
    proof = machine.state / role / ("table.json" if role == "router" else "endpoint.json")
    proof.parent.mkdir(parents=True)
    proof.write_text("{}")
    done = machine.run(role)
    assert done.returncode == 0, done.stderr
    unit = (machine.units / f"llmgw-{role}.service").read_text()
    assert "User=llmgw\n" in unit and (role == "router") == ("--join-file" in unit)
    assert (machine.etc / "server.yaml").exists() == (role == "server")


def test_cut_at_any_line_it_does_nothing(machine):
    lines = (SCRIPTS / "join.sh").read_text().count("\n")
    step = 1 if machine.shell[0].endswith("dash") else 23
    text = "".join(f'head -n {number} {SCRIPTS}/join.sh > {machine.folder}/part.sh; {" ".join(machine.shell)} '
                   f'{machine.folder}/part.sh\n' for number in range(1, lines, step))
    machine.run(text=text)
    assert (machine.folder / "part.sh").exists()
    assert not machine.installed() and not machine.record.exists() and not machine.etc.exists()


def test_uninstall_keeps_what_it_says_and_purge_nothing(machine):
    assert machine.run().returncode == 0
    weights = machine.state / "agent" / "blobs" / "x"
    weights.parent.mkdir()
    weights.write_text("weights")
    machine.calls()
    shown = machine.run("--dry-run", script="uninstall.sh")
    assert shown.returncode == 0 and weights.exists() and machine.installed() and not machine.calls()
    done = machine.run(script="uninstall.sh")
    assert done.returncode == 0, done.stderr
    assert f"kept: {machine.state}/agent" in done.stderr and weights.exists()
    assert not machine.installed() and not list(machine.units.iterdir()) and not (machine.etc / "agent.join").exists()
    assert "systemctl disable --now llmgw-agent.service" in machine.calls()
    assert machine.run("--purge", script="uninstall.sh").returncode == 0 and not machine.state.exists()
    assert machine.run("--everything", script="uninstall.sh").returncode == 64


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root, to be somebody else")
def test_who_is_not_root_is_told_so(machine, tmp_path):
    text = SCRIPTS.joinpath("join.sh").read_text()
    done = subprocess.run(["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *machine.shell, "-c", text, "join.sh"],
                          env={"PATH": os.environ["PATH"], "LLMGW_SHA256": "0" * 64, "LLMGW_SERVER": "https://c:7800"},
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 77 and "needs root" in done.stderr


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="NOT TESTED: shellcheck is not installed")
def test_shellcheck_finds_nothing():
    done = subprocess.run(["shellcheck", "-s", "sh", *map(str, SCRIPTS.glob("*.sh"))], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("role", ["agent", "router", "server"])
def test_the_shipped_unit_is_what_join_sh_writes(role):
    env = {"PATH": os.environ["PATH"], "LLMGW_SERVER": "https://CONTROL:7800"}
    printed = subprocess.run(["sh", str(SCRIPTS / "join.sh"), role, "--print-unit"], env=env, capture_output=True, text=True,
                             timeout=60).stdout
    assert printed == (SCRIPTS / f"llmgw-{role}.service").read_text()


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="NOT TESTED: systemd is not installed")
@pytest.mark.parametrize("role, most", [("agent", 90), ("router", 20), ("server", 20)])
def test_the_units_are_valid_and_closed(role, most, tmp_path):
    unit = tmp_path / f"llmgw-{role}.service"
    program = tmp_path / "python3"
    os.symlink(sys.executable, program)
    unit.write_text((SCRIPTS / unit.name).read_text().replace("/usr/bin/python3", str(program)))
    verified = subprocess.run(["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, timeout=120)
    complaints = [line for line in verified.stderr.splitlines() if unit.name in line]
    assert not complaints, verified.stderr
    done = subprocess.run(["systemd-analyze", "security", "--offline=true", f"--threshold={most}", str(unit)],
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-300:]
