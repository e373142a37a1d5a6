"""Environments of packages: made by the real uv from lists that all agree on, or refused with a sentence.

Most packages here are stand-ins of a few lines in an index on loopback; uv and the Python are real.
"""
from __future__ import annotations

import hashlib
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time
from types import SimpleNamespace

import pytest

from llmgw.agent import uv as uv_module
from llmgw.agent.engine_user import EngineUser
from llmgw.agent.layout import Layout
from llmgw.agent.uv import from_node
from llmgw.domain.cluster import AgentConfig
from llmgw.domain.engine import Asset, EnginePhase, Tool
from llmgw.domain.errors import DigestMismatch, DownloadFailed, EngineFailed, TryAgain, Unreachable
from llmgw.domain.node import Gpu
from llmgw.parse import lock
from llmgw.system import accounts, download, files, installed, proc
from tests.fakes import python_fleet
from tests.fakes.package_index import PackageIndex
from tests.fakes.python_fleet import FACTS, Fleet, tiny_vllm

X86 = "x86_64-manylinux_2_31"


@pytest.fixture
def index():
    with PackageIndex() as made:
        tiny_vllm(made)
        yield made


@pytest.fixture
def fleet(tmp_path, uv_archive, python_archive):
    (tmp_path / "server").mkdir()
    made = Fleet(tmp_path / "server", uv_archive, python_archive)
    yield made
    made.close()


@pytest.fixture
def node(tmp_path, fleet, index):
    return fleet.installer(tmp_path / "n1", {"UV_DEFAULT_INDEX": index.url, "UV_HTTP_RETRIES": "0"})


class Told:
    """Collects progress."""

    def __init__(self):
        self.all = []

    def __call__(self, phase, message, done=None, total=None):
        self.all.append((phase, message, done, total))

    def phases(self):
        return list(dict.fromkeys(phase for phase, *_ in self.all))


def test_stand_in_an_environment_is_made_checked_and_named(fleet, node, tmp_path):
    told = Told()
    made = node.install(fleet.wanted(), told)
    folder = tmp_path / "n1" / "engines" / "vllm" / "0.30.1"
    assert made.says == "vllm 0.30.1" and installed.read(str(folder)) == made
    text = (folder / ".llmgw-packages.txt").read_text()
    pins = lock.read(text, "list")
    assert [str(pin) for pin in pins] == ["tinydep==1.0", "vllm==0.30.1"] and text == lock.write(pins)
    assert dict(fleet.wanted().locks) == {X86: made.packages} and made.packages == lock.digest(pins)
    ran = subprocess.run([folder / "bin" / "python", "-c", "import tinydep, vllm; print(tinydep.VERSION)"],
                         stdout=subprocess.PIPE, text=True, check=True)
    assert ran.stdout == "1.0\n"
    assert [phase for phase in told.phases() if phase is not EnginePhase.DOWNLOADING] == [
        EnginePhase.UNPACKING, EnginePhase.RESOLVING, EnginePhase.CHECKING]
    assert any("2 packages of vllm 0.30.1" in message for _, message, *_ in told.all)
    left = {path.name for path in (tmp_path / "n1" / "tools").iterdir()}
    assert "uv-cache" not in left and not [name for name in left if name.endswith(".scratch")]
    assert list((tmp_path / "n1" / "blobs" / "sha256").iterdir()) == []
    node.look(str(folder), made)
    assert node.prove(str(folder), made) == made


def test_stand_in_two_nodes_have_the_same_list_each_by_its_own_resolution(fleet, node, index, tmp_path):
    first = node.install(fleet.wanted(), Told())
    other = fleet.installer(tmp_path / "n2", {"UV_DEFAULT_INDEX": index.url}, node="n2")
    index.web.requests.clear()
    second = other.install(fleet.wanted(), Told())
    assert second.packages == first.packages and any("/simple/vllm" in path for path in index.web.paths())
    lists = [(tmp_path / name / "engines" / "vllm" / "0.30.1" / ".llmgw-packages.txt").read_bytes() for name in ("n1", "n2")]
    assert lists[0] == lists[1]


def test_stand_in_what_the_index_got_later_changes_nothing(fleet, node, index):
    index.add("tinydep", "2.0", at="2026-06-02T00:00:00Z")
    node.install(fleet.wanted(), Told())
    assert "tinydep==1.0" in fleet.locks.text(fleet.wanted(), X86)


@pytest.mark.parametrize("planted, said", [
    (lambda text: text.replace("tinydep==1.0", "tinydep==0.9"), "line 1: tinydep==0.9, this node finds 1.0"),
    (lambda text: text + f"evil==1 --hash=sha256:{'e' * 64}\n", "evil==1 is not what this node finds: no such package is needed"),
    (lambda text: text.replace(text.split("sha256:")[1][:64], "f" * 64), "this node finds no file with sha256 ffffffffffffffff…"),
    (lambda text: "".join(text.splitlines(True)[2:]), "tinydep==1.0 is not in the list")])
def test_stand_in_a_planted_difference_is_refused_with_its_line(fleet, node, tmp_path, planted, said):
    node.install(fleet.wanted(), Told())
    good = fleet.locks.text(fleet.wanted(), X86)
    fleet.locks.relock(fleet.wanted())
    fleet.locks.propose(fleet.wanted(), X86, python_fleet.AS_OF, planted(good), "evil")
    other = fleet.installer(tmp_path / "n2", node._given, node="n2")
    with pytest.raises(EngineFailed) as refused:
        other.install(fleet.wanted(), Told())
    assert "the fleet's list of packages is not what this node finds" in refused.value.message and said in refused.value.message
    assert "ctl engines relock vllm" in refused.value.hint
    assert not (tmp_path / "n2" / "engines" / "vllm" / "0.30.1").exists()


def nothing_is_left(folder):
    engines = folder / "engines" / "vllm"
    assert not engines.exists() or list(engines.iterdir()) == []


def test_stand_in_a_tampered_wheel_is_not_installed(fleet, node, index, tmp_path):
    index.tampered.add("tinydep-1.0-py3-none-any.whl")
    with pytest.raises(EngineFailed, match="gives another file for tinydep==1.0 than the one in the list"):
        node.install(fleet.wanted(), Told())
    nothing_is_left(tmp_path / "n1")


def test_stand_in_a_withdrawn_wheel_fails_closed_and_says_how_to_go_on(fleet, node, index, tmp_path):
    index.gone.add("tinydep-1.0-py3-none-any.whl")
    with pytest.raises(EngineFailed) as refused:
        node.install(fleet.wanted(), Told())
    assert "tinydep-1.0-py3-none-any.whl was withdrawn from the package index" in refused.value.message
    assert "ctl engines relock vllm" in refused.value.hint
    nothing_is_left(tmp_path / "n1")


def test_stand_in_a_version_that_was_yanked_is_told(fleet, node, index, tmp_path):
    index.yanked["tinydep-1.0-py3-none-any.whl"] = "bad"
    with pytest.raises(EngineFailed, match="tinydep==1.0 was withdrawn from the package index") as refused:
        node.install(fleet.wanted(), Told())
    assert "ctl engines relock vllm" in refused.value.hint


def test_stand_in_a_version_that_vanished_is_told(fleet, node, index):
    del index.files["vllm"]["vllm-0.30.1-py3-none-any.whl"]
    with pytest.raises(EngineFailed, match="was withdrawn from the package index, or never was there"):
        node.install(fleet.wanted(), Told())
    index.files["vllm"]["x.whl"] = (b"", "2026-01-01T00:00:00Z")
    del index.files["tinydep"]
    tiny_vllm(index, needs=("nosuchdep",))
    with pytest.raises(EngineFailed, match="nosuchdep was withdrawn from the package index, or never was there"):
        node.install(fleet.wanted(), Told())


def test_an_index_that_is_down_is_named(fleet, tmp_path):
    away = fleet.installer(tmp_path / "n1", {"UV_DEFAULT_INDEX": "http://user:secret@127.0.0.1:9/simple", "UV_HTTP_RETRIES": "0"})
    with pytest.raises(Unreachable) as refused:
        away.install(fleet.wanted(), Told())
    assert "the package index cannot be reached while resolving its packages: http://127.0.0.1:9" in refused.value.message
    assert "secret" not in refused.value.message + refused.value.hint


AWAY = {"UV_DEFAULT_INDEX": "http://127.0.0.1:9/simple", "UV_HTTP_RETRIES": "0"}


def mirrored(fleet, index, tmp_path, without=()):
    """What the control plane says when its mirror holds the wheels of the index."""
    assets = []
    for files_of in index.files.values():
        for name, (data, _) in files_of.items():
            if name not in without:
                path = tmp_path / name
                path.write_bytes(data)
                archive = SimpleNamespace(name=name, path=path, sha256=hashlib.sha256(data).hexdigest())
                fleet.files[name] = archive
                assets.append(Asset(name, len(data), archive.sha256))
    return fleet.wanted(assets=tuple(assets))


def test_stand_in_a_node_without_an_index_installs_what_an_admin_put_into_the_mirror(fleet, node, index, tmp_path):
    node.install(fleet.wanted(), Told())
    text = fleet.locks.text(fleet.wanted(), X86)
    away = fleet.installer(tmp_path / "n2", AWAY, node="n2")
    with pytest.raises(Unreachable):                     # a list that only a node has named is not taken on trust
        away.install(mirrored(fleet, index, tmp_path), Told())
    fleet.locks.vouch(fleet.wanted(), X86, fleet.as_of, text)
    with pytest.raises(Unreachable):                     # the mirror does not hold all of it
        away.install(mirrored(fleet, index, tmp_path, ["tinydep-1.0-py3-none-any.whl"]), Told())
    index.web.requests.clear()
    told = Told()
    made = away.install(mirrored(fleet, index, tmp_path), told)
    assert made.says == "vllm 0.30.1" and index.web.paths() == [] and made.packages == dict(fleet.wanted().locks)[X86]
    assert any("from the mirror" in message for _, message, *_ in told.all)
    assert not (tmp_path / "n2" / "tools" / "wheels").exists()


def test_stand_in_wheels_of_the_mirror_are_not_fetched_from_the_index_again(fleet, node, index, tmp_path):
    node.install(mirrored(fleet, index, tmp_path), Told())
    assert not [path for path in index.web.paths() if path.endswith(".whl")]


def test_stand_in_a_wheel_of_the_mirror_with_another_hash_is_not_taken(fleet, node, index, tmp_path):
    wanted = mirrored(fleet, index, tmp_path)
    (tmp_path / "tinydep-1.0-py3-none-any.whl").write_bytes(b"evil" * 1000)
    with pytest.raises((DigestMismatch, DownloadFailed)):
        node.install(wanted, Told())
    nothing_is_left(tmp_path / "n1")


def test_stand_in_an_index_that_wants_a_login_gets_it_from_the_node(fleet, node, index, tmp_path):
    index.login = "ann:pass"
    with pytest.raises(Unreachable, match="wants a login, or another one"):
        node.install(fleet.wanted(), Told())
    given = from_node(AgentConfig(package_index=index.url.replace("://", "://ann:pass@")), {})
    assert fleet.installer(tmp_path / "n2", given).install(fleet.wanted(), Told()).says == "vllm 0.30.1"


def test_stand_in_an_index_without_dates_cannot_be_used_and_is_told_so(fleet, node, index):
    index.dates = False
    with pytest.raises(EngineFailed, match="does not say when files were uploaded"):
        node.install(fleet.wanted(), Told())


def test_stand_in_a_pth_file_that_nobody_expects_is_refused(fleet, node, index, tmp_path):
    tiny_vllm(index, files={"litellm_init.pth": "import os\n"})
    with pytest.raises(EngineFailed, match="a package brings lib/python3.12/site-packages/litellm_init.pth, which would run"):
        node.install(fleet.wanted(), Told())
    nothing_is_left(tmp_path / "n1")


def test_stand_in_a_module_that_python_would_import_at_every_start_is_refused(fleet, node, index, tmp_path):
    tiny_vllm(index, files={"sitecustomize/__init__.py": "import os\n"})
    with pytest.raises(EngineFailed, match="a package brings lib/python3.12/site-packages/sitecustomize/__init__.py, which would run"):
        node.install(fleet.wanted(), Told())
    nothing_is_left(tmp_path / "n1")


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: needs root, which makes a user for the engines")
def test_stand_in_nothing_of_a_package_has_run_when_it_is_refused(fleet, index, tmp_path):
    """Not even by the compiling of what the engines' user cannot compile later."""
    if not accounts.sees_others():
        pytest.skip("NOT TESTED: this root may not look into the processes of others")
    with tempfile.TemporaryDirectory(prefix="llmgw-open-") as place:
        os.chmod(place, 0o755)
        trace = pathlib.Path(place, "trace")
        trace.mkdir()
        trace.chmod(0o777)
        tiny_vllm(index, files={"litellm_init.pth": f"import os; open({str(trace / 'ran')!r}, 'a').write('x')\n"})
        layout = Layout(str(pathlib.Path(place, "n1")))
        user = EngineUser(accounts.ENGINE_USER, layout, lambda *unused: None)
        node = fleet.installer(pathlib.Path(place, "n1"), {"UV_DEFAULT_INDEX": index.url}, user=user)
        with pytest.raises(EngineFailed, match="litellm_init.pth, which would run at every start of Python"):
            node.install(fleet.wanted(), Told())
        assert list(trace.iterdir()) == []
        nothing_is_left(pathlib.Path(place, "n1"))


@pytest.mark.parametrize("main, said", [
    ("raise RuntimeError('Failed to infer device type')\n", "ends with code 1 and says: RuntimeError: Failed to infer device type"),
    ("print('0.29.0')\n", "calls itself 0.29.0"), ("", "calls itself nothing")])
def test_stand_in_what_does_not_run_is_not_offered(fleet, node, index, tmp_path, main, said):
    tiny_vllm(index, main=main)
    with pytest.raises(EngineFailed, match=said):
        node.install(fleet.wanted(), Told())
    nothing_is_left(tmp_path / "n1")


def test_stand_in_without_an_accelerator_it_is_told_to_run_on_the_cpu(fleet, node, index, tmp_path):
    tiny_vllm(index, main="import os\nassert os.environ.get('VLLM_TARGET_DEVICE') == 'cpu'\n" + python_fleet.MAIN)
    node.install(fleet.wanted(), Told())
    tiny_vllm(index, version="0.30.2", main="import os\nassert 'VLLM_TARGET_DEVICE' not in os.environ\n"
              + python_fleet.MAIN)
    card = fleet.installer(tmp_path / "n2", node._given, facts=FACTS.__class__(arch="x86_64", gpus=(Gpu("GPU-a", 0, "H100"),)))
    card.install(fleet.wanted("0.30.2"), Told())


def test_stand_in_nothing_of_the_users_is_used_and_nothing_written_outside(fleet, node, tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    (home / "uv.toml").write_text("this is no toml")
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "UV_CACHE_DIR", "UV_CONFIG_FILE", "UV_PYTHON_INSTALL_DIR"):
        monkeypatch.setenv(name, str(home))
    before = sorted(str(path) for path in home.rglob("*"))
    node.install(fleet.wanted(), Told())
    assert sorted(str(path) for path in home.rglob("*")) == before
    assert {path.name for path in tmp_path.iterdir()} == {"server", "n1", "home"}


def test_stand_in_an_environment_can_be_removed_and_its_list_stays(fleet, node, tmp_path):
    made = node.install(fleet.wanted(), Told())
    folder = tmp_path / "n1" / "engines" / "vllm" / "0.30.1"
    text = (folder / ".llmgw-packages.txt").read_text()
    node.removing(made)
    files.remove(str(folder))
    assert (tmp_path / "n1" / "state" / "packages" / "vllm-0.30.1.txt").read_text() == text


def test_stand_in_tools_that_nothing_needs_are_removed(fleet, node, tmp_path):
    made = node.install(fleet.wanted(), Told())
    old = tmp_path / "n1" / "tools" / "uv-0.1.0"
    old.mkdir()
    node.sweep([fleet.wanted()], [made])
    assert not old.exists()
    node.sweep([], [made])                        # its environment still runs on that Python
    assert node.prove(str(tmp_path / "n1" / "engines" / "vllm" / "0.30.1"), made).says == "vllm 0.30.1"
    node.sweep([], [])
    assert [path.name for path in (tmp_path / "n1" / "tools").iterdir() if path.name.startswith(("uv-", "python-"))] == []


def test_stand_in_a_new_list_of_the_fleet_makes_an_environment_outdated(fleet, node):
    made = node.install(fleet.wanted(), Told())
    assert not node.is_outdated(made, fleet.wanted())
    fleet.locks.relock(fleet.wanted())
    assert node.is_outdated(made, fleet.wanted())
    again = node.install(fleet.wanted(), Told())
    assert again.packages == made.packages and not node.is_outdated(again, fleet.wanted())


def test_stand_in_ray_goes_into_the_same_resolution_and_has_a_list_of_its_own(fleet, node, index, tmp_path):
    index.add("ray", "2.52.1", needs=("tinydep<3",))
    index.add("ray", "2.53.0", needs=("tinydep>=3",))           # there is none: what is resolved apart would take it
    plain = node.install(fleet.wanted(), Told())
    wanted = fleet.wanted(with_ray=True)
    assert node.is_outdated(plain, wanted) and not node.is_outdated(plain, fleet.wanted())
    made = node.install(wanted, Told())
    assert [str(pin) for pin in lock.read(fleet.locks.text(wanted, f"{X86}-ray"), "list")] == ["ray==2.52.1", "tinydep==1.0", "vllm==0.30.1"]
    assert set(dict(fleet.wanted().locks)) == {X86, f"{X86}-ray"} and made.packages != plain.packages
    assert not node.is_outdated(made, fleet.wanted(with_ray=True)) and node.is_outdated(made, fleet.wanted())


def test_a_wrong_uv_is_refused_before_it_runs(fleet, node, tmp_path):
    (tool, python) = fleet.tools
    wrong = tool.assets[0].__class__(tool.assets[0].name, tool.assets[0].size_bytes, "0" * 64)
    fleet.tools = (Tool("uv", tool.version, (wrong,)), python)
    with pytest.raises(DigestMismatch):
        node.install(fleet.wanted(), Told())


def test_tools_that_are_not_there_yet_are_waited_for_with_the_words_of_the_control_plane(fleet, node):
    fleet.tools = (Tool("uv", "0.13.9", (), "the files of uv 0.13.9 are not known: no answer"), fleet.tools[1])
    with pytest.raises(TryAgain, match="waits for uv 0.13.9: the files of uv 0.13.9 are not known: no answer"):
        node.install(fleet.wanted(), Told())


def test_stand_in_an_install_that_is_to_stop_stops_and_leaves_nothing_running(fleet, index, tmp_path):
    stop, index.hold = threading.Event(), threading.Event()
    node = fleet.installer(tmp_path / "n1", {"UV_DEFAULT_INDEX": index.url}, stopping=stop.is_set)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(_outcome(lambda: node.install(fleet.wanted(), Told()))))
    thread.start()
    deadline = time.monotonic() + 60
    while not any(path.endswith(".whl") for path in index.web.paths()):
        assert time.monotonic() < deadline and not seen, seen
        time.sleep(0.05)
    stop.set()
    thread.join(120)
    index.hold.set()
    assert isinstance(seen[0], download.Stopped)
    assert proc.marked(uv_module.MARKER, str(tmp_path / "n1")) == []
    assert not (tmp_path / "n1" / "engines" / "vllm" / "0.30.1").exists()


def _outcome(act):
    try:
        return act()
    except Exception as error:
        return error


def test_an_operators_environment_must_run_and_be_of_the_wanted_version(fleet, node, tmp_path):
    package = tmp_path / "site" / "vllm"
    (package / "entrypoints" / "cli").mkdir(parents=True)
    for each in (package, package / "entrypoints", package / "entrypoints" / "cli"):
        (each / "__init__.py").write_text("")
    (package / "entrypoints" / "cli" / "main.py").write_text(python_fleet.MAIN)
    info = tmp_path / "site" / "vllm-0.30.0+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.30.0+cpu\n")
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nPYTHONPATH={tmp_path}/site exec {sys.executable} \"$@\"\n")
    python.chmod(0o755)
    assert node.prove_operators("vllm", "0.30.0", str(python)) == ("vllm 0.30.0+cpu", ("CPU",))
    with pytest.raises(EngineFailed, match=r"it holds vllm 0.30.0\+cpu, wanted is 0.31.0"):
        node.prove_operators("vllm", "0.31.0", str(python))
    with pytest.raises(EngineFailed, match="has no package sglang"):
        node.prove_operators("sglang", "", str(python))
    with pytest.raises(EngineFailed, match="cannot run /nowhere/python"):
        node.prove_operators("vllm", "", "/nowhere/python")


def test_a_small_set_of_packages_comes_from_the_real_index(tmp_path, uv_archive, python_archive, real_index):
    from llmgw.engines.recipes import Recipe
    recipe = Recipe("anyio", "agronholm/anyio", ("-c", "import anyio, importlib.metadata as m; print(m.version('anyio'))"), "2.31")
    (tmp_path / "server").mkdir()
    fleet = Fleet(tmp_path / "server", uv_archive, python_archive, {"vllm": recipe})
    try:
        node = fleet.installer(tmp_path / "n1", real_index)
        wanted = fleet.wanted("4.9.0", as_of="2025-06-01T00:00:00Z")
        told = Told()
        node.install(wanted, told)
        names = [pin.name for pin in lock.read(fleet.locks.text(wanted, X86), "list")]
        assert {"anyio", "idna", "sniffio"} <= set(names)
        assert any(f"{len(names)} packages" in message for _, message, *_ in told.all)
    finally:
        fleet.close()


def test_index_and_proxy_are_those_of_the_node():
    environ = {"UV_DEFAULT_INDEX": "https://a/simple", "HTTPS_PROXY": "http://p:1", "no_proxy": "x", "UV_CACHE_DIR": "/x", "HOME": "/h"}
    assert from_node(AgentConfig(), environ) == {"UV_DEFAULT_INDEX": "https://a/simple", "HTTPS_PROXY": "http://p:1", "no_proxy": "x"}
    told = from_node(AgentConfig(http_proxy="http://q:2", package_index="https://b/simple"), environ)
    assert told == {"UV_DEFAULT_INDEX": "https://b/simple", "HTTP_PROXY": "http://q:2", "HTTPS_PROXY": "http://q:2", "no_proxy": "x"}
