"""doctor as a process: this machine, machines that lack something, and systems without /proc."""
from __future__ import annotations

import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys

import pytest

from llmgw.system import installed
from llmgw.system.installed import Installed

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
UUID = "GPU-00000000-0000-0000-0000-000000000000"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="engines run on Linux only")


@pytest.fixture
def doctor(tmp_path):
    """Run doctor on a data folder of its own; ``before`` are words in front of the interpreter."""
    def run(*words, env=None, before=(), data=None):
        clean = {name: value for name, value in os.environ.items() if not name.startswith("LLMGW_")}
        done = subprocess.run(
            [*before, sys.executable, "-W", "error", "-m", "llmgw", "doctor", *words], stdin=subprocess.DEVNULL,
            env={**clean, "PYTHONPATH": str(ROOT / "src"), "LLMGW_DATA_DIR": str(data or tmp_path / "data"), **(env or {})},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
        assert "Traceback" not in done.stdout + done.stderr, done.stderr
        return done
    return run


def read(done):
    """Return {(engine, requirement): (status, message, hint)} of --json."""
    data = json.loads(done.stdout)
    return {(item["engine"], each["name"]): (each["status"], each["message"], each["hint"])
            for item in data["engines"] for each in item["requirements"]}


def put(tmp_path, program, **changes):
    """Put a whole installed version into the agent's folder."""
    folder = tmp_path / "data" / "agent" / "engines" / "llama.cpp" / "b10991"
    folder.mkdir(parents=True)
    shutil.copy2(program, folder / "llama-server")
    installed.write(str(folder), Installed("llama.cpp", "b10991", "llama-server", "x", **changes))
    return folder


def smi(tmp_path, text, code=0):
    """A program that stands for nvidia-smi, and the setting that lets it be found."""
    folder = tmp_path / "smi"
    folder.mkdir()
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\ncat <<'X'\n{text}\nX\nexit {code}\n")
    (folder / "nvidia-smi").chmod(0o755)
    return {"LLMGW_REHEARSE_NVIDIA_PATH": str(folder)}


def test_a_fresh_machine_is_told_what_each_engine_would_need(doctor, tmp_path):
    done = doctor("--json")
    data = json.loads(done.stdout)
    assert done.returncode == (0 if data["ok"] else 3) and done.stderr == ""
    assert [item["engine"] for item in data["engines"]] == ["llama.cpp", "vllm"]
    assert data["facts"]["arch"] == platform.machine() and data["data_dir"] == str(tmp_path / "data" / "agent")
    assert read(done)["llama.cpp", "program"][0] == "not applicable"
    assert not (tmp_path / "data").exists(), "to look changes nothing"


@pytest.mark.skipif(bool(shutil.which("nvidia-smi")), reason="this machine has a GPU")
def test_exactly_what_this_machine_lacks_is_named(doctor):
    known = subprocess.run(["ldconfig", "-p"], env={"PATH": "/usr/sbin:/sbin:/usr/bin:/bin"}, stdout=subprocess.PIPE, text=True,
                           check=True).stdout
    lacking = [name for name in ("libgomp.so.1", "libstdc++.so.6", "libgcc_s.so.1") if name not in known]
    done = doctor("--json")
    assert list(missing(done)) == (["libraries"] if lacking else []) and done.returncode == (3 if lacking else 0), done.stdout
    assert all(name in missing(done)["libraries"] for name in lacking)


@pytest.mark.skipif(bool(shutil.which("nvidia-smi")), reason="this machine has a GPU")
def test_a_skipped_engine_is_not_missing(doctor):
    done = doctor("vllm", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["engines"][0]["skipped"] == "no GPU that it could use"
    assert doctor("vllm").stdout.rstrip().endswith("vllm: skipped: no GPU that it could use")


def test_an_installed_engine_that_runs_is_ok(doctor, tmp_path, llama_server):
    put(tmp_path, llama_server)
    done = doctor("llama.cpp", "--json")
    assert done.returncode == 0
    assert read(done)["llama.cpp", "libraries"][:2] == ("ok", "ldd finds them all")
    status, message, _ = read(done)["llama.cpp", "program"]
    assert status == "ok" and "build 10991" in message


def test_an_installed_engine_whose_program_is_gone_or_does_not_run_is_missing(doctor, tmp_path, llama_server):
    folder = put(tmp_path, llama_server)
    (folder / "llama-server").write_text("#!/bin/sh\necho broken >&2\nexit 3\n")
    done = doctor("llama.cpp", "--json")
    assert done.returncode == 3 and read(done)["llama.cpp", "program"][:2] == (
        "missing", "llama.cpp b10991: --version ends with code 3: broken")
    (folder / "llama-server").unlink()
    done = doctor("llama.cpp")
    assert done.returncode == 3 and "llama.cpp b10991: missing" in done.stdout and "no such file" in done.stdout


def test_stand_in_a_cuda_build_without_a_device_is_missing_for_doctor_as_for_the_agent(doctor, tmp_path, llama_server):
    put(tmp_path, llama_server, cuda="12.8")
    env = smi(tmp_path, f"0, {UUID}, NVIDIA H200, 590.48.01, 9.0, Disabled, 143771 MiB, 0 MiB")
    done = doctor("llama.cpp", "--json", env=env)
    assert done.returncode == 3 and read(done)["llama.cpp", "GPU"][:2] == ("ok", "1 x NVIDIA H200")
    assert read(done)["llama.cpp", "program"][1] == (
        "llama.cpp b10991: the CUDA build sees no device: there is no libggml-cuda.so beside it")


def test_stand_in_a_driver_that_waits_for_a_reboot_is_missing_with_what_to_do(doctor, tmp_path):
    text = (ROOT / "tests" / "data" / "nvidia_smi" / "driver-mismatch.stdout").read_text()
    done = doctor("llama.cpp", env=smi(tmp_path, text, 18))
    assert done.returncode == 3
    assert "driver and library versions differ" in done.stdout and "try: reboot the node" in done.stdout


def test_stand_in_a_gpu_that_is_too_old_for_vllm(doctor, tmp_path):
    env = smi(tmp_path, f"0, {UUID}, Tesla P4, 570.26, 6.1, [N/A], 7611 MiB, 0 MiB")
    done = doctor("vllm", "--json", env=env)
    assert done.returncode == 3
    assert read(done)["vllm", "NVIDIA driver"][:2] == (
        "missing", "the NVIDIA driver is 570.26, 580 or newer is needed")
    assert read(done)["vllm", "compute capability"][0] == "missing"
    assert read(done)["vllm", "libraries"][0] == "not applicable"


def cards(tmp_path, name="NVIDIA H100 80GB HBM3", driver="590.48.01", capability="9.0"):
    return smi(tmp_path, f"0, {UUID}, {name}, {driver}, {capability}, Disabled, 81559 MiB, 0 MiB")


def missing(done):
    return {name: said[1] for (_, name), said in read(done).items() if said[0] == "missing"}


@pytest.mark.skipif(not shutil.which("gcc"), reason="gcc would be missing too")
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("card, name, said", [
    ({"driver": "535.183.01"}, "NVIDIA driver", "the NVIDIA driver is 535.183.01, 580 or newer is needed"),
    ({"name": "Tesla P100-PCIE-16GB", "capability": "6.0"}, "compute capability",
     "GPU 0 (Tesla P100-PCIE-16GB) has compute capability 6.0, 7.5 or higher is needed"), ({}, "", "")])
def test_stand_in_exactly_what_is_missing_for_a_python_engine_is_named(doctor, tmp_path, engine, card, name, said):
    if shutil.disk_usage(tmp_path).free < 26 * 10**9:
        pytest.skip("there are less than 25 GB of free disk here, which would be missing too")
    done = doctor(engine, "--json", env=cards(tmp_path, **card))
    assert missing(done) == ({name: said} if name else {}) and done.returncode == (3 if name else 0), done.stdout


def test_stand_in_a_disk_without_room_for_a_python_engine_is_named(doctor, tmp_path):
    small = [place for place in ("/run", "/dev", "/dev/shm", "/run/lock")
             if os.path.isdir(place) and 0 < shutil.disk_usage(place).free < 25 * 10**9]
    if not small:
        pytest.skip("no small filesystem here")
    done = doctor("vllm", "--json", env=cards(tmp_path), data=f"{small[0]}/llmgw-test-nothing-there")
    assert list(missing(done)) == ["disk"] and "25.0 GB are needed while installing" in missing(done)["disk"]


def test_the_operators_own_environment_is_asked_what_it_holds(doctor, tmp_path):
    info = tmp_path / "site" / "vllm-0.30.0+cpu.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.30.0+cpu\n")
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nPYTHONPATH={tmp_path}/site exec {sys.executable} \"$@\"\n")
    python.chmod(0o755)
    config = tmp_path / "agent.yaml"
    config.write_text(f"engines:\n  vllm: {{python: {python}}}\n")
    done = doctor("--config", str(config), "--json", "vllm")
    assert read(done)["vllm", "program"][:2] == ("ok", f"{python} holds vllm 0.30.0+cpu")
    config.write_text(f"engines:\n  sglang: {{python: {python}}}\n")
    done = doctor("--config", str(config), "--json", "sglang")
    assert read(done)["sglang", "program"][:2] == ("missing", f"{python} has no package sglang") and done.returncode == 3


def test_the_operators_own_program_is_looked_at(doctor, tmp_path, llama_server):
    config = tmp_path / "agent.yaml"
    config.write_text(f"engines:\n  llama.cpp: {{binary: {llama_server}}}\n")
    done = doctor("--config", str(config), "--json", "llama.cpp")
    assert done.returncode == 0 and read(done)["llama.cpp", "program"][0] == "ok"
    config.write_text("engines:\n  llama.cpp: {binary: /nowhere/llama-server}\n")
    done = doctor("--config", str(config), "--json", "llama.cpp")
    assert done.returncode == 3 and read(done)["llama.cpp", "program"][1] == "/nowhere/llama-server: no such file"


@pytest.mark.parametrize("words, code, said", [
    (("--config", "/nowhere.yaml"), 78, "/nowhere.yaml: no such file"), (("nothing",), 2, "unknown engine 'nothing'"),
    (("--data-dir", "/dev/null/x", "llama.cpp"), 0, "")])
def test_what_cannot_be_looked_at_is_a_sentence(doctor, words, code, said):
    done = doctor(*words)
    assert done.returncode == code and said in done.stderr


def test_a_narrow_terminal_cuts_no_sentence_that_somebody_has_to_act_on(doctor, tmp_path):
    text = "Failed to initialize NVML: Driver/library version mismatch"
    done = doctor("llama.cpp", env={**smi(tmp_path, text, 18), "COLUMNS": "40"})
    table = done.stdout.split("llama.cpp: missing\n")[1].splitlines()
    assert max(map(len, table)) <= 40
    assert "driver and library versions differ" in " ".join(" ".join(table).split())


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="only root can take /proc away")
def test_a_machine_without_proc_and_sys_is_looked_at_all_the_same(doctor):
    hide = 'mount -t tmpfs none /proc && mount -t tmpfs none /sys && exec "$@"'
    if subprocess.run(["unshare", "--mount", "sh", "-c", hide, "sh", "true"], check=False,
                      stderr=subprocess.DEVNULL).returncode:
        pytest.skip("this container may not mount")
    done = doctor("--json", before=("unshare", "--mount", "sh", "-c", hide, "sh"))
    data = json.loads(done.stdout)
    assert done.returncode in (0, 3) and any("processor" in sentence for sentence in data["warnings"])
    assert read(done)["llama.cpp", "AVX2"][0] == "warning"


MAC = """
import os, sys, platform, signal
sys.platform = "darwin"
platform.system = lambda: "Darwin"
for module, name in ((os, "sched_getaffinity"), (os, "pidfd_open"), (signal, "pidfd_send_signal"), (os, "confstr")):
    if hasattr(module, name):
        delattr(module, name)
from llmgw import cli
cli.main(["doctor", "--json"])
"""


def test_stand_in_another_system_is_told_that_engines_run_on_linux_only(tmp_path):
    done = subprocess.run([sys.executable, "-W", "error", "-c", MAC], stdin=subprocess.DEVNULL, text=True, timeout=120,
                          env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "LLMGW_DATA_DIR": str(tmp_path)},
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert {item["skipped"] for item in json.loads(done.stdout)["engines"]} == {
        "engines run on Linux only, this is Darwin"}
