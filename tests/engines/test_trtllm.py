"""TensorRT-LLM: its command, its gauges, and the launcher under a stand-in of its server (real FastAPI and uvicorn)."""
from __future__ import annotations

import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from llmgw.domain.model import ModelSpec, Weights, WeightsFile
from llmgw.domain.replica import GpuSlot, ShardWanted
from llmgw.domain.secret import Secret
from llmgw.engines import registry, widest
from llmgw.engines.base import Place
from llmgw.engines.widest import Status
from llmgw.parse.engine_help import read
from llmgw.system import shipped

TESTS = pathlib.Path(__file__).resolve().parent.parent
STAND_IN = TESTS / "fakes" / "trtllm_stand_in"
KEY = "k" * 43
ENGINE = registry.get("trtllm")


def programs(tmp_path, *, args=(), port=1):
    launcher, key = tmp_path / "launcher.py", tmp_path / "key"
    launcher.write_bytes(shipped.launcher(ENGINE.launcher))
    key.write_text(KEY + "\n")
    (tmp_path / "served").mkdir(exist_ok=True)
    model = ModelSpec("served", "trtllm", "mirror:served", context_length=512, parallel=8, args=tuple(args))
    shard = ShardWanted("r.0", "r", 0, model, "1.2.1", Weights("served", "0" * 64, (WeightsFile("a", 1, "0" * 64),)), Secret(KEY),
                        (GpuSlot("GPU-1", 1), GpuSlot("GPU-2", 3)))
    place = Place(sys.executable, (), str(tmp_path / "served"), str(tmp_path), str(key), "", port, launcher=str(launcher))
    return ENGINE.programs(shard, place)


def test_its_command_has_underscores_the_launcher_and_no_key(tmp_path):
    (program,) = programs(tmp_path)
    words = program.command.argv
    assert words[words.index("--") + 1:][:2] == ("serve", str(tmp_path / "served"))
    assert "--tp_size 2 --max_batch_size 8 --max_seq_len 512" in " ".join(words) and "--host 127.0.0.1" in " ".join(words)
    assert KEY not in str(program.command) and program.command.env["CUDA_VISIBLE_DEVICES"] == "1,3"


def test_every_flag_is_among_those_of_its_source():
    text = (TESTS / "data" / "trtllm" / "serve-help_synthetic.txt").read_text()
    (wide,) = widest.programs(ENGINE, "/p", "/w")
    assert not any(use.flag in ("--key-file", "--merged") for use in wide.uses)
    assert {verdict.status for verdict in widest.judge(wide, read(text))} == {Status.ACCEPTED}


def test_its_gauges_have_names_that_its_source_has_and_absent_ones_are_unknown():
    names = (TESTS / "data" / "trtllm" / "metric-names.txt").read_text().split()
    page = b"trtllm_num_requests_running 3\ntrtllm_num_requests_waiting 2\ntrtllm_kv_cache_utilization 0.5\ntrtllm_generation_tokens_total 7\n"
    for line in page.decode().splitlines():
        assert line.split()[0] in names
    found = ENGINE.gauges(page)
    assert (found.running, found.waiting, found.kv_used, found.generated_tokens) == (3, 2, 0.5, 7)
    empty = ENGINE.gauges(b"trtllm_request_success_total 1\n")
    assert (empty.running, empty.waiting, empty.kv_used) == (None, None, None)


@contextlib.contextmanager
def running(tmp_path, args=()):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (program,) = programs(tmp_path, args=args, port=port)
    child = subprocess.Popen(program.command.argv, env={**program.command.env, "PYTHONPATH": str(STAND_IN), "PYTHONSAFEPATH": ""},
                             cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 60
        while ask(port, "/health")[0] != 200:
            assert child.poll() is None, child.stdout.read().decode()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield port
    finally:
        child.kill()
        child.wait(30)
        child.stdout.close()


def ask(port, path, key=None, method="GET"):
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers, method=method, data=b"{}" if method == "POST" else None)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()
    except OSError:
        return 0, b""


@pytest.fixture(scope="module")
def stand_in():
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")


@pytest.mark.slow
def test_under_a_stand_in_every_request_needs_the_key_and_the_operators_settings_are_kept(stand_in, tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text("kv_cache_config: {free_gpu_memory_fraction: 0.5}\nreturn_perf_metrics: false\n")
    with running(tmp_path, args=["--config", str(own)]) as port:
        assert ask(port, "/health")[0] == 200
        for path, method in (("/v1/models", "GET"), ("/v1/completions", "POST"), ("/update_weights", "POST"), ("/docs", "GET"),
                             ("/prometheus/metrics", "GET"), ("/nothing", "GET"), ("/health", "POST")):
            for key in (None, "", "wrong", KEY[:-1], KEY + "x"):
                assert ask(port, path, key, method)[0] == 401, (path, key)
        assert json.loads(ask(port, "/v1/models", KEY)[1])["data"] == [{"id": "served"}]
        settings = json.loads(json.loads(ask(port, "/v1/completions", KEY, "POST")[1])["choices"][0]["text"])
        assert settings == {"kv_cache_config": {"free_gpu_memory_fraction": 0.5}, "return_perf_metrics": True, "enable_iter_perf_stats": True}
        found = ENGINE.gauges(ask(port, ENGINE.metrics_path, KEY)[1])
        assert (found.running, found.waiting, found.kv_used) == (2, 1, 0.25)
    assert "return_perf_metrics: false" in own.read_text()


@pytest.mark.slow
def test_under_a_stand_in_the_gauges_are_on_without_a_file_of_the_operators(stand_in, tmp_path):
    with running(tmp_path) as port:
        assert ask(port, "/prometheus/metrics", KEY)[0] == 200
    assert (tmp_path / "trtllm.yaml").read_text() == "return_perf_metrics: true\nenable_iter_perf_stats: true\n"
    assert os.stat(tmp_path / "trtllm.yaml").st_mode & 0o777 == 0o600


@pytest.mark.parametrize("change, words", [
    (lambda text: text.replace("self.app =", "self.application = self_app =").replace("self.app.", "self_app.").replace("(self.app,", "(self.application,"),
     "keeps its application elsewhere")])
def test_under_a_stand_in_whose_application_is_elsewhere_it_does_not_start(stand_in, tmp_path, change, words):
    import shutil
    copy = tmp_path / "other"
    shutil.copytree(STAND_IN, copy, ignore=shutil.ignore_patterns("__pycache__"))
    path = copy / "tensorrt_llm" / "serve" / "openai_server.py"
    path.write_text(change(path.read_text()))
    (program,) = programs(tmp_path)
    done = subprocess.run(program.command.argv, env={**program.command.env, "PYTHONPATH": str(copy), "PYTHONSAFEPATH": ""}, cwd=tmp_path,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=False)
    assert done.returncode != 0 and words in done.stdout


def test_without_a_key_it_does_not_start(tmp_path):
    (program,) = programs(tmp_path)
    (tmp_path / "key").write_text("short\n")
    done = subprocess.run(program.command.argv, env=dict(program.command.env), cwd=tmp_path, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=60, check=False)
    assert done.returncode != 0 and "holds no key" in done.stdout
