"""A shard on GPUs is ready only when its GPUs hold memory of it: asked of a stand-in for nvidia-smi."""
from __future__ import annotations

import dataclasses
import os

import pytest

from llmgw.agent.gpu_proof import RELEASE_SECONDS, GpuProof
from llmgw.domain.command import Command
from llmgw.domain.engine import EngineWanted
from llmgw.domain.replica import GpuSlot, ShardState
from llmgw.system import spawn
from tests.fakes.control_plane import shard_of

UUID = "GPU-5f0b3a8e-1111-2222-3333-444455556666"
SCRIPT = """#!/bin/sh
case "$*" in
  *query-gpu*) cat {folder}/gpus ;;
  *query-compute-apps*) cat {folder}/apps ;;
esac
"""


class Smi:
    """A folder with an nvidia-smi that says what it is told to."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir()
        (folder / "nvidia-smi").write_text(SCRIPT.format(folder=folder))
        (folder / "nvidia-smi").chmod(0o755)
        self.says("4 MiB")

    def says(self, used, apps=""):
        for name, text in (("gpus", f"0, {UUID}, NVIDIA H200, 590.48.01, 9.0, Disabled, 143771 MiB, {used}\n"), ("apps", apps)):
            (self.folder / f"{name}.new").write_text(text)
            os.replace(self.folder / f"{name}.new", self.folder / name)


@pytest.fixture
def smi(tmp_path):
    return Smi(tmp_path / "smi")


@pytest.mark.parametrize("used, apps, words", [
    ("900 MiB", "", ""), ("4 MiB", "", "GPU 0 holds nothing"), ("4 MiB", "PID, 500 MiB, UUID", ""), ("4 MiB", "PID, [N/A], UUID", ""),
    ("[N/A]", "PID, 19135, UUID", ""), ("[N/A]", "", ""), ("900 MiB", "4000001, 800 MiB, UUID", ""), ("4 MiB", "4000001, 800 MiB, UUID", "GPU 0 holds nothing")])
def test_what_nvidia_smi_says_decides(smi, tmp_path, monkeypatch, used, apps, words):
    monkeypatch.setenv("LLMGW_REHEARSE_NVIDIA_PATH", str(smi.folder))
    marker = ("LLMGW_TEST_MARK", str(tmp_path))
    proof = GpuProof((GpuSlot(UUID, 0),))
    identity = spawn.start(Command(("sleep", "600"), env={"PATH": "/usr/bin:/bin"}), marker, str(tmp_path / "log"))
    try:
        smi.says(used, apps.replace("PID", str(identity.pid)).replace("UUID", UUID))
        said = proof.why_not(marker)
        assert words in said and bool(words) is bool(said)
    finally:
        assert spawn.stop(marker, grace_seconds=2.0) == []
        spawn.forget(identity.pid)


def test_memory_of_an_ended_program_is_waited_for_and_not_for_ever(smi, monkeypatch, caplog):
    monkeypatch.setenv("LLMGW_REHEARSE_NVIDIA_PATH", str(smi.folder))
    proof, said = GpuProof((GpuSlot(UUID, 0),)), "GPU 0 still shows memory of programs that ended"
    assert proof.unreleased(0.0) == ""
    smi.says("900 MiB", f"4000001, 800 MiB, {UUID}")
    assert proof.unreleased(10.0) == proof.unreleased(10.0 + RELEASE_SECONDS - 1.0) == said and not caplog.records
    assert proof.unreleased(10.0 + RELEASE_SECONDS) == "" and said in caplog.text
    smi.says("4 MiB")
    assert proof.unreleased(200.0) == ""
    smi.says("900 MiB", f"{os.getpid()}, 800 MiB, {UUID}")      # somebody else by now
    assert proof.unreleased(300.0) == "" == GpuProof((), first=False).unreleased(300.0)
    smi.says("900 MiB", f"4000001, 800 MiB, {UUID}")
    assert GpuProof((GpuSlot(UUID, 0),), first=False).unreleased(0.0) == said


def test_without_a_driver_or_without_gpus_there_is_nothing_to_prove(smi, monkeypatch, tmp_path):
    assert GpuProof(()).why_not(("A", "b")) == ""
    monkeypatch.setenv("LLMGW_REHEARSE_NVIDIA_PATH", str(tmp_path / "none"))
    assert GpuProof((GpuSlot(UUID, 0),)).why_not(("A", "b")) == ""


@pytest.mark.slow
def test_a_real_engine_on_the_cpu_that_was_given_a_gpu_is_ended_with_a_sentence(
        smi, node, plane, seeded, gemma, gemma_weights, llama_server, tmp_path):
    shard = dataclasses.replace(shard_of(gemma_weights), gpus=(GpuSlot(UUID, 0),))
    config = tmp_path / "agent.yaml"
    config.write_text(f"engines:\n  llama.cpp: {{binary: {llama_server}}}\n")
    plane.want([EngineWanted("llama.cpp", "b10991")], [shard])
    node.start("--config", str(config), LLMGW_REHEARSE_NVIDIA_PATH=str(smi.folder))
    seen = node.seen(plane.wait(lambda observed: any(one.reason == "NotOnGpu" for one in observed.shards), 90))
    assert seen.state is not ShardState.READY
    assert seen.message == "the engine does not use its GPUs: GPU 0 holds nothing of it: it probably runs on the CPU"
    smi.says("[N/A]")                              # from here on nobody can tell
    node.ready(after=seen.incarnation - 1)
