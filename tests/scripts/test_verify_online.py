"""verify_online: its own plumbing against stand-ins here, the real internet with ``make verify-online``."""
from __future__ import annotations

import io
import os
import pathlib
import subprocess
import sys
import tarfile

import pytest

from tests.fakes import gguf_file
from tests.fakes.github import FakeGithub
from tests.fakes.hub import FakeHub

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "verify_online.py"
CPU, CPU_ARM = "llama-b10991-bin-ubuntu-x64.tar.gz", "llama-b10991-bin-ubuntu-arm64.tar.gz"
CUDA = "llama-b11434-bin-ubuntu-cuda-13.4-x64.tar.gz"


def archive():
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        member = tarfile.TarInfo("llama-b10991/llama-server")
        member.size = 3
        tar.addfile(member, io.BytesIO(b"elf"))
    return out.getvalue()


def run(**environment):
    return subprocess.run([sys.executable, str(SCRIPT)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          timeout=1800, check=False, env={**os.environ, **environment})


@pytest.fixture
def stand_ins():
    model = gguf_file.small_model()
    tags = {"b10991": {CPU: archive(), CPU_ARM: b"arm"}, "b11434": {CUDA: b"x", "cudart-" + CUDA: b"y"}}
    with FakeGithub(tags) as one, \
            FakeHub({"ggml-org/gemma-3-270m-it-GGUF": {"gemma-3-270m-it-Q8_0.gguf": model},
                     "ggml-org/models-moved": {"tinyllamas/stories260K.gguf": model}}) as two:
        yield one, two


def test_every_check_passes_against_stand_ins(stand_ins):
    github, hub = stand_ins
    done = run(LLMGW_GITHUB_API=github.url, LLMGW_HF_ENDPOINT=hub.url)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\nok ") + done.stdout.startswith("ok ") == 7 and "all checks passed" in done.stdout


def test_a_failed_check_is_one_line_and_exit_3_with_stand_ins(stand_ins):
    github, hub = stand_ins
    github.wrong_digest, hub.repos["ggml-org/models-moved"] = {CPU}, {}
    done = run(LLMGW_GITHUB_API=github.url, LLMGW_HF_ENDPOINT=hub.url)
    assert done.returncode == 3 and done.stdout.count("FAIL  ") == 2 and "2 checks failed" in done.stdout, done.stdout
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.online
def test_the_real_github_and_hugging_face_answer_as_expected():
    done = run()
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
