"""The real vLLM 0.30.0: its list of packages, its installation, and a model that it serves. `make test-engines` only.

What was measured is printed: run with -s, as `make test-engines` does.
"""
from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import time

import pytest

from llmgw.domain.engine import DEFAULT_VERSIONS
from llmgw.engines.recipes import RECIPES
from llmgw.parse import lock, utc
from llmgw.system import shipped
from tests import interpreters
from tests.fakes.python_fleet import Fleet
from tests.whole.cluster import Cluster, free_block, until

pytestmark = [pytest.mark.heavy, pytest.mark.slow]
VERSION = DEFAULT_VERSIONS["vllm"]
AS_OF = utc.later(RECIPES["vllm"].published[VERSION], utc.DAY_SECONDS)
X86 = "x86_64-manylinux_2_31"
ROOM = 30 * 10**9


def say(what, since=None):
    print(f"\n{what}" + (f" in {time.monotonic() - since:.1f} s" if since else ""), flush=True)


def size_of(folder):
    return sum(path.lstat().st_size for path in pathlib.Path(folder).rglob("*") if not path.is_symlink())


@pytest.fixture
def fleet(tmp_path, uv_archive, python_archive):
    (tmp_path / "server").mkdir()
    made = Fleet(tmp_path / "server", uv_archive, python_archive)
    made.as_of = AS_OF
    yield made
    made.close()


def test_vllm_is_installed_from_the_shipped_list_moved_and_runs(fleet, tmp_path, real_index):
    """The product's own path: resolve, compare with the shipped list, install with hashes, check, rename."""
    if shutil.disk_usage(tmp_path).free < ROOM:
        pytest.skip(f"less than {ROOM // 10**9} GB free here")
    moments = []

    def told(phase, message, done=None, total=None):
        if not moments or moments[-1][0] is not phase:
            moments.append((phase, time.monotonic(), message))

    since = time.monotonic()
    made = fleet.installer(tmp_path / "n1", real_index).install(fleet.wanted(VERSION), told)
    folder = tmp_path / "n1" / "engines" / "vllm" / VERSION
    say(f"vLLM {VERSION} as of {AS_OF}: {made.archive}, {size_of(folder) / 1e9:.2f} GB", since)
    for (phase, begun, message), (_, ended, _) in zip(moments, moments[1:] + [(None, time.monotonic(), "")]):
        say(f"  {phase.value}: {ended - begun:.1f} s ({message})")
    kept = lock.read(shipped.lock("vllm", VERSION), "shipped")
    assert lock.differences(kept, lock.read((folder / ".llmgw-packages.txt").read_text(), "found")) == ()
    assert made.packages == lock.digest(kept) and len(kept) == 196
    say("files that end in .pth: " + (", ".join(sorted(path.name for path in folder.rglob("*.pth"))) or "none"))
    elsewhere = tmp_path / "elsewhere"
    os.rename(folder, elsewhere)
    since = time.monotonic()
    ran = subprocess.run([elsewhere / "bin" / "vllm", "--version"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                         env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "VLLM_TARGET_DEVICE": "cpu"}, timeout=600, check=False)
    assert ran.returncode == 0 and ran.stdout.splitlines()[-1] == VERSION, ran.stderr[-2000:]
    say(f"moved, vllm --version says {ran.stdout.splitlines()[-1]}", since)


SERVER = f"""
cluster: test
listen: 127.0.0.1:0
engines:
  vllm: {{version: {VERSION}}}
models:
  - name: tiny
    engine: vllm
    weights: mirror:tiny
    gpus: 0
    context_length: 256
    parallel: 4
    args: [--enforce-eager]
"""


@pytest.fixture(scope="module")
def vllm_on_cpu(bring, bring_vllm):
    """(Python of an environment with vLLM for the CPU, folder of a tiny model)."""
    try:
        python = bring_vllm.environment(interpreters.need("3.11"))
        return python, bring_vllm.tiny_model(python)
    except bring.CannotBring as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def cluster(pyz, vllm_on_cpu, qa_template, tmp_path_factory):
    python, model = vllm_on_cpu
    made = Cluster(pyz, tmp_path_factory.mktemp("cluster"), qa_template)
    made.config.write_text(SERVER)
    config = made.folder / "agent.yaml"
    ports = free_block(16)
    try:
        made.start_server()
        config.write_text(f"server: {made.server['url']}\ntoken_file: {made.token('node')}\nnode: node-1\n"
                          f"data_dir: {made.dir('node-1')}\ngate_port: {ports}\nengine_ports: {ports + 1}\n"
                          f"engines: {{vllm: {{python: {python}}}}}\n")
        made.start("node-1", "agent", "--config", config, "--owned")
        made.start_router()
        made.ctl("mirror", "import", model, "--name", "tiny")
        since = time.monotonic()
        made.wait_ready("tiny", 1800)          # 16 s on an idle machine, 400 s on a busy one
        say("vLLM on the CPU is ready", since)
        made.key = json.loads(made.ctl("keys", "create", "test", "--json"))["secret"]
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def client(cluster):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=cluster.router["url"] + "/v1", api_key=cluster.key, max_retries=0, timeout=120) as made:
        def knows():
            try:
                return "tiny" in [model.id for model in made.models.list()]
            except openai.APIStatusError:
                return False
        until("the router knows the key and the model", knows)
        yield made


ASK = {"model": "tiny", "messages": [{"role": "user", "content": "Say something"}], "temperature": 0, "max_tokens": 16}


def test_a_model_is_served_plain_through_router_gate_and_engine(client):
    since = time.monotonic()
    answer = client.chat.completions.create(**ASK)
    assert answer.model == "tiny" and answer.usage.completion_tokens == 16 and answer.choices[0].finish_reason == "length"
    say("16 tokens", since)
    assert client.completions.create(model="tiny", prompt="a", max_tokens=4).usage.completion_tokens == 4


def test_a_model_is_served_streamed(client):
    pieces = list(client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True}))
    assert pieces[-1].usage.completion_tokens == 16
    assert sum(bool(piece.choices and piece.choices[0].delta.content) for piece in pieces) > 4


def test_its_gauges_are_shown_and_its_engine_is_the_operators(cluster, client):
    def gauges():
        (replica,) = cluster.items("replicas")
        found = replica["gauges"]
        return found if found and found["running"] is not None and (found["generated_tokens"] or 0) >= 16 else None
    found = until("gauges are shown", gauges)
    assert found["waiting"] == 0 and 0 <= found["kv_used"] <= 1
    say(f"gauges: {found}")
    (engine,) = cluster.items("engines")
    (_, seen), = engine["nodes"]
    assert seen["source"] == "operator" and seen["devices"] == ["CPU"] and f"vllm {VERSION}+cpu" in seen["message"]


def test_what_an_engine_keeps_open_stays_behind_the_gate(cluster, client):
    """vLLM's key guards only some of its paths; the gate lets none of the others through."""
    (replica,) = cluster.items("replicas")
    (node,) = cluster.items("nodes")
    gate = f"http://127.0.0.1:{node['identity']['gate_port']}"
    import urllib.error
    import urllib.request
    for path in ("/invocations", "/tokenize", "/docs", "/openapi.json", "/version", "/v1/load_lora_adapter"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(urllib.request.Request(gate + path, data=b"{}"), timeout=20)
        assert refused.value.code in (401, 404), path
        refused.value.close()
    assert replica["state"] == "ready"


def test_engine_check_asks_the_real_vllm_on_a_machine_without_gpu(vllm_on_cpu, pyz, tmp_path):
    import sys
    python, _ = vllm_on_cpu
    since = time.monotonic()
    done = subprocess.run([sys.executable, str(pyz), "ctl", "engine-check", "vllm", "--python", str(python), "--json"],
                          cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["version"].startswith(VERSION) and found["devices"] == ["CPU"]
    serve = next(program for program in found["programs"] if program["program"] == "vllm serve")
    assert not serve["skipped"] and {flag["status"] for flag in serve["flags"]} == {"accepted"}
    assert all(program["skipped"] or program["flags"] for program in found["programs"])
    say(f"engine-check: {found['summary']}", since)
