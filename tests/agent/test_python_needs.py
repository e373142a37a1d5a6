"""What a Python engine needs of a node: all that is missing is named at once, before anything is downloaded."""
from __future__ import annotations

import os
import shutil

import pytest

from llmgw.agent.layout import Layout
from llmgw.agent.python_needs import PythonNeeds
from llmgw.agent.uv import Uv
from llmgw.domain.errors import DiskFull, RequirementMissing
from llmgw.domain.node import Gpu, NodeFacts, OsRelease
from llmgw.engines.needs import BY_VERSION, NEEDS, needs_of
from llmgw.engines.recipes import RECIPES

CARD = Gpu("GPU-a", 0, "NVIDIA H100", 80 << 30, 0, "9.0")
WELL = dict(os=OsRelease("debian", (), "12", "Debian 12"), arch="x86_64", libc="glibc 2.36", disk_total_bytes=10**13,
            nvidia_driver="590.48.01", gpus=(CARD,))


def refusal(tmp_path, name="vllm", version="0.30.0", **changes):
    facts = NodeFacts(**{**WELL, **changes})
    try:
        PythonNeeds(Layout(str(tmp_path)), lambda: facts, False).must_fit(name, version, lambda *unused, **more: None)
    except (RequirementMissing, DiskFull) as error:
        return error
    return None


@pytest.fixture(autouse=True)
def compiler():
    if not shutil.which("gcc"):
        pytest.skip("gcc is missing here, and would be named as well")


def roomy(tmp_path):
    if shutil.disk_usage(tmp_path).free < NEEDS["vllm"].free_bytes:
        pytest.skip("there are less than 25 GB of free disk here")


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_a_node_that_has_everything_is_not_refused(tmp_path, name):
    roomy(tmp_path)
    assert refusal(tmp_path, name) is None


def test_everything_that_is_missing_is_named_at_once(tmp_path):
    roomy(tmp_path)
    error = refusal(tmp_path, nvidia_driver="535.183.01", libc="glibc 2.28",
                    gpus=(CARD, Gpu("GPU-b", 1, "Tesla P100", 16 << 30, 0, "6.0")))
    assert error.message == (
        "vllm 0.30.0: the NVIDIA driver is 535.183.01, 580 or newer is needed; GPU 1 (Tesla P100) has compute capability "
        "6.0, 7.5 or higher is needed; glibc is 2.28, 2.31 or newer is needed")
    assert "update the NVIDIA driver" in error.hint and "exclude: [1]" in error.hint


def test_another_version_has_needs_of_its_own(tmp_path):
    roomy(tmp_path)
    assert refusal(tmp_path, "sglang", "0.5.10", nvidia_driver="570.26") is None
    for version in ("0.5.11", "0.5.23", "0.6.0"):
        error = refusal(tmp_path, "sglang", version, nvidia_driver="570.26")
        assert error.message == f"sglang {version}: the NVIDIA driver is 570.26, 580 or newer is needed"
    assert needs_of("sglang", "0.5.11").driver == needs_of("sglang", "").driver == NEEDS["sglang"].driver
    assert needs_of("llama.cpp", "b10991") == NEEDS["llama.cpp"] and needs_of("nothing", "1.0").driver == ""


@pytest.mark.parametrize("name", RECIPES)
def test_packages_are_chosen_for_the_oldest_glibc_that_may_install_them(name):
    assert {needs.glibc for _, needs in BY_VERSION[name]} == {RECIPES[name].glibc}


def test_a_disk_that_is_too_full_is_a_full_disk():
    small = [place for place in ("/run", "/dev", "/dev/shm")
             if os.path.isdir(place) and 0 < shutil.disk_usage(place).free < NEEDS["vllm"].free_bytes]
    if not small:
        pytest.skip("no small filesystem here")
    error = refusal(small[0])
    assert isinstance(error, DiskFull) and "25.0 GB are needed while installing" in error.message


def test_what_uv_says_of_a_full_disk_is_one_sentence(tmp_path):
    program = tmp_path / "uv"
    program.write_text("#!/bin/sh\necho 'error: Failed to extract' >&2\necho '  cause: No space left on device (os error 28)' >&2\nexit 2\n")
    program.chmod(0o755)
    runner = Uv(str(program), Layout(str(tmp_path)), {}, "vllm 0.30.0", lambda: False)
    with pytest.raises(DiskFull) as full:
        runner.install("list.txt", "/python", lambda line: None)
    assert full.value.message == f"vllm 0.30.0: no space left in {tmp_path} while installing its packages"
