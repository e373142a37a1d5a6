"""A look at a real llama-server and at builds that lie; where the machine cannot have it, a stand-in says it."""
from __future__ import annotations

import os
import shutil

import pytest

from llmgw.domain.command import Outcome
from llmgw.domain.errors import EngineFailed, RequirementMissing
from llmgw.domain.node import NodeFacts
from llmgw.domain.requirement import Library
from llmgw.probe import engine
from llmgw.system.process import Processes

NO_DEVICES = Outcome(0, "Available devices:\n  (none)\n", "")
CUDA = Outcome(0, "Available devices:\n  CUDA0: NVIDIA H200 (143771 MiB, 143000 MiB free)\n", "")


class StandIn:
    """Answers for programs that this machine cannot have."""

    def __init__(self, **answers):
        self.answers = answers

    def run(self, command, **unused):
        return self.answers[command.argv[0] if "/" not in command.argv[0] else command.argv[1].strip("-")]


def built(tmp_path, *names):
    for name in ("llama-server",) + names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"\x7fELF")
    return str(tmp_path / "llama-server")


def test_the_real_program_lacks_nothing_here_and_says_its_build(llama_server):
    assert engine.lacking(Processes(), engine.elves_beside(str(llama_server))) == ()
    assert engine.run(Processes(), str(llama_server), "llama.cpp b10991").says.build == 10991
    assert engine.devices(Processes(), str(llama_server))[0] == ()


def test_every_elf_of_an_install_is_asked_wherever_it_lies_and_links_and_texts_are_not(tmp_path):
    built(tmp_path, "bin/llama-bench", "lib/libggml-cpu-haswell.so", "lib/libllama.so.0.4")
    (tmp_path / "lib" / "libllama.so.0").symlink_to("libllama.so.0.4")
    (tmp_path / "LICENSE").write_text("MIT")
    assert [os.path.relpath(path, tmp_path) for path in engine.elves(str(tmp_path))] == [
        "bin/llama-bench", "lib/libggml-cpu-haswell.so", "lib/libllama.so.0.4", "llama-server"]


def test_beside_an_operators_program_only_its_own_libraries_are_asked(tmp_path):
    path = built(tmp_path, "libggml-cpu.so", "libother.so", "bash")
    assert [os.path.basename(found) for found in engine.elves_beside(path)] == ["llama-server", "libggml-cpu.so"]


def test_stand_in_a_library_of_the_install_or_of_the_driver_is_not_missed_and_others_are_each_once(tmp_path):
    built(tmp_path, "libggml-cuda.so", "libggml-base.so")
    said = Outcome(0, "libggml-base.so => not found\n\tlibcuda.so.1 => not found\n\tlibgomp.so.1 => not found\n", "")
    assert engine.lacking(StandIn(ldd=said), engine.elves(str(tmp_path))) == (Library("libgomp.so.1"),)


def test_stand_in_a_link_to_a_library_that_is_gone_is_missed(tmp_path):
    built(tmp_path)
    (tmp_path / "libllama.so.0").symlink_to("libllama.so.0.4")
    said = Outcome(0, "\tlibllama.so.0 => not found\n", "")
    assert engine.lacking(StandIn(ldd=said), engine.elves(str(tmp_path))) == (Library("libllama.so.0"),)


def see(tmp_path, facts=NodeFacts(), **answers):
    return engine.must_see_cuda(StandIn(**answers), str(tmp_path / "llama-server"), "llama.cpp b11026", facts)


def test_stand_in_a_cuda_build_with_a_device_names_it(tmp_path):
    assert see(tmp_path, **{"list-devices": CUDA}) == ("CUDA0: NVIDIA H200 (143771 MiB, 143000 MiB free)",)


DRIVER = Outcome(0, "\tlibcuda.so.1 => not found\n", "")
SAID = ("ggml_cuda_init: failed to initialize CUDA: no CUDA-capable device is detected\n")


@pytest.mark.parametrize("names, ldd, listed, reason", [
    ((), None, NO_DEVICES, "there is no libggml-cuda.so beside it"),
    (("libggml-cuda.so",), DRIVER, NO_DEVICES,
     "its libggml-cuda.so cannot be loaded: libcuda.so.1 is missing, which comes with the NVIDIA driver"),
    (("libggml-cuda.so",), Outcome(0, "\tlibnccl.so.2 => not found\n", ""), NO_DEVICES,
     "its libggml-cuda.so cannot be loaded: libnccl.so.2 is missing"),
    (("libggml-cuda.so",), Outcome(1, "", "\tnot a dynamic executable\n"), NO_DEVICES,
     "its libggml-cuda.so cannot be loaded: it is no whole library"),
    (("libggml-cuda.so",), Outcome(0, "", ""), Outcome(0, NO_DEVICES.out, SAID),
     "failed to initialize CUDA: no CUDA-capable device is detected"),
    (("libggml-cuda.so",), Outcome(0, "", ""), Outcome(-11, "", "CUDA error\n"),
     "--list-devices is ended by signal 11: CUDA error"),
    (("libggml-cuda.so",), Outcome(0, "", ""), NO_DEVICES, "--list-devices names none, and says no reason"),
    (("libggml-cuda.so",), Outcome(0, "", ""), Outcome(0, "Available devices:\n  Vulkan0: Intel\n", ""),
     "--list-devices names none, and says no reason"),
])
def test_stand_in_a_cuda_build_without_a_device_is_refused_with_the_likeliest_reason(tmp_path, names, ldd, listed, reason):
    built(tmp_path, *names)
    with pytest.raises(EngineFailed) as caught:
        see(tmp_path, ldd=ldd, **{"list-devices": listed})
    assert caught.value.message == f"llama.cpp b11026: the CUDA build sees no device: {reason}"
    assert "cpu: true" in caught.value.hint


def test_stand_in_a_node_that_waits_for_its_reboot_is_told_to_reboot(tmp_path):
    built(tmp_path, "libggml-cuda.so")
    with pytest.raises(RequirementMissing, match="sees no device: versions differ") as caught:
        see(tmp_path, NodeFacts(reboot_needed="versions differ"), **{"list-devices": NO_DEVICES})
    assert caught.value.hint == "reboot the node"


def test_a_cut_library_is_no_whole_library(tmp_path, llama_server):
    """The real ldd on a real file that was cut."""
    built(tmp_path)
    (tmp_path / "libggml-cuda.so").write_bytes(llama_server.read_bytes()[:1 << 16])
    reason = engine.why_no_device(Processes(), str(tmp_path / "llama-server"), NO_DEVICES, NodeFacts())
    assert reason == "its libggml-cuda.so cannot be loaded: it is no whole library"


@pytest.mark.skipif(not shutil.which("ldconfig", path="/usr/sbin:/sbin:/usr/bin"), reason="this system has no ldconfig")
def test_usual_libraries_are_looked_up_in_the_loaders_cache():
    assert engine.usual_libraries(Processes(), ("libc.so.6", "libnobody.so.9")) == (Library("libnobody.so.9"),)
