"""Fixtures that more than one folder uses: the built file, the real engine, the real model."""
from __future__ import annotations

import importlib.util
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent

for _folder in (ROOT / "src", ROOT):          # a plain `pytest` works without an installed llmgw
    if str(_folder) not in sys.path:
        sys.path.insert(0, str(_folder))
if str(ROOT / "src") not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT / "src")] + [entry for entry in [os.environ.get("PYTHONPATH", "")] if entry])

# Started in the background of a script, or by nohup, a process ignores these, and so would every program that a test
# ends by Ctrl-C or by a terminal that goes away.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _handler)

# Tests lie below folders that only their own user may enter. What engines may do that run as a user of
# their own is tested where the data lies in the open: tests/agent/test_engine_user.py, tests/trees/.
if os.geteuid() == 0:
    os.environ.setdefault("LLMGW_ENGINE_USER", "root")

try:
    import hypothesis
    # no deadline: the machine that runs this may be loaded
    hypothesis.settings.register_profile(
        "llmgw", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
    hypothesis.settings.load_profile("llmgw")
except ImportError:                           # the suite's other parts need nothing but pytest
    pass


# What takes long, first: the run is over when its last worker is.
FIRST = ("whole", "trees", "agent", "server", "router")
BROUGHT = {"llama_server", "llama_archive", "uv_archive", "python_archive", "release_archive", "gemma"}


@pytest.hookimpl(optionalhook=True)            # there is no such hook without xdist
def pytest_xdist_make_scheduler(config, log):
    """Return who hands out the tests: one worker gets all of a module, and all of the cluster under fire."""
    from xdist.scheduler import LoadScopeScheduling

    class ByModule(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            module = nodeid.partition("::")[0]
            return "fire" if "/test_fire_" in module else module

    return ByModule(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Mark what uses a real engine or model; leave out what this machine, or this run, cannot have."""
    chosen = config.getoption("-m") or ""
    heavy = "heavy" in chosen and "not heavy" not in chosen
    online = "online" in (config.getoption("-m") or "") and "not online" not in config.getoption("-m")
    items.sort(key=_turn)
    for item in items:
        if BROUGHT & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.engine)
        if item.get_closest_marker("online") and not online:
            item.add_marker(pytest.mark.skip(reason="needs the real internet: make verify-online"))
        if item.get_closest_marker("heavy") and not heavy:
            item.add_marker(pytest.mark.skip(reason="installs gigabytes: make test-engines"))
        if item.get_closest_marker("gpu") and not shutil.which("nvidia-smi"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def _turn(item):
    folder = item.path.parent.name
    fire = item.path.name.startswith("test_fire_")
    return (not fire, FIRST.index(folder) if folder in FIRST else len(FIRST))


@pytest.fixture(scope="session", autouse=True)
def nothing_of_ours_survives(tmp_path_factory):
    """Look, after everything, for programs that an agent of this run started: whatever a test does, none may be left."""
    yield
    if not pathlib.Path("/proc/self/environ").exists():
        return
    wanted = f"LLMGW_DATA_DIR_MARK={tmp_path_factory.getbasetemp()}{os.sep}".encode()
    deadline = time.monotonic() + 30.0
    while True:
        left = [entry.name for entry in pathlib.Path("/proc").iterdir() if entry.name.isdigit() and wanted in _environment(entry)]
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    assert not left, f"programs of this run that nobody ended: {', '.join(left)}"


@pytest.fixture(scope="session", autouse=True)
def no_log_of_ours_shows_a_secret(tmp_path_factory):
    """Search, after everything, what the programs of this run wrote for the tokens, keys and join strings of its tests."""
    yield
    from tests import canaries
    shown = canaries.search(tmp_path_factory.getbasetemp())
    assert not shown, "secrets where none may be:\n" + "\n".join(shown)


def _environment(entry):
    try:
        return (entry / "environ").read_bytes()
    except OSError:
        return b""


def load_script(path: pathlib.Path):
    """Return a script of the repository as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module           # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def bring():
    """scripts/bring.py as a module."""
    return load_script(ROOT / "scripts" / "bring.py")


def _brought(bring, get):
    try:
        return get()
    except bring.CannotBring as error:
        pytest.fail(f"{error}\nto get it: {sys.executable} scripts/bring.py", pytrace=False)


@pytest.fixture(scope="session")
def llama_server(bring):
    """Path of a real llama-server b10991."""
    return _brought(bring, bring.llama_server)


@pytest.fixture(scope="session")
def llama_archive(bring):
    """A release archive with that llama-server: .path, .sha256, .name."""
    return _brought(bring, bring.llama_archive)


@pytest.fixture(scope="session")
def release_archive(bring):
    """An archive in the release's own shape: shared libraries, backends loaded while running, OpenMP."""
    return _brought(bring, bring.release_archive)


@pytest.fixture(scope="session")
def gemma(bring):
    """Path of a real small model (gemma 3 270M, base), as GGUF."""
    return _brought(bring, bring.gemma)


@pytest.fixture(scope="session")
def qa_template():
    """Path of a chat template with which that base model answers questions."""
    return ROOT / "tests" / "data" / "templates" / "qa.jinja"


@pytest.fixture(scope="session")
def pyz(tmp_path_factory):
    """Path of llmgw.pyz, built once from this tree."""
    folder = tmp_path_factory.mktemp("pyz")
    path = folder / "llmgw.pyz"
    built = subprocess.run([sys.executable, str(ROOT / "build_pyz.py"), "--output", str(path)],
                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, check=False)
    if built.returncode:
        pytest.fail(f"build_pyz.py failed:\n{built.stdout}", pytrace=False)
    os.environ["SHIV_ROOT"] = str(tmp_path_factory.mktemp("shiv"))   # tests leave the user's cache alone
    return path


@pytest.fixture
def free_port():
    """A loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="session")
def bring_uv(bring):
    """scripts/bring_uv.py as a module."""
    return load_script(ROOT / "scripts" / "bring_uv.py")


@pytest.fixture(scope="session")
def uv_archive(bring, bring_uv):
    """A release archive of uv: .path, .sha256, .name."""
    return _brought(bring, bring_uv.uv_archive)


@pytest.fixture(scope="session")
def python_archive(bring, bring_uv):
    """(version, archive) of a CPython 3.12, packed as builds of Python are."""
    from tests import interpreters
    interpreter = interpreters.need("3.12")
    try:
        return bring_uv.python_archive(interpreter)
    except bring.CannotBring as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def bring_vllm(bring):
    """scripts/bring_vllm.py as a module."""
    return load_script(ROOT / "scripts" / "bring_vllm.py")


@pytest.fixture(scope="session")
def real_index():
    """What uv has to be told to reach the package index that pip uses here."""
    told = {}
    for line in subprocess.run([sys.executable, "-m", "pip", "config", "list"], stdout=subprocess.PIPE,
                               text=True, timeout=60, check=False).stdout.splitlines():
        key, _, value = line.partition("=")
        name = {"index-url": "UV_DEFAULT_INDEX", "cert": "SSL_CERT_FILE"}.get(key.rpartition(".")[2])
        if name:
            told[name] = value.strip("'\"")
    return {**told, **{name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}}
