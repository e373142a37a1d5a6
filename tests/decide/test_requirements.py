"""Each requirement: ok, missing, a warning or not applicable, with a sentence and what to do."""
from __future__ import annotations

import dataclasses

import pytest

from llmgw.decide import requirements
from llmgw.decide.packages import Ways
from llmgw.decide.requirements import Machine
from llmgw.domain.node import Gpu, NodeFacts, OsRelease
from llmgw.domain.requirement import Library, Needs, Status
from llmgw.engines.needs import NEEDS

DEBIAN = OsRelease("debian", (), "12", "Debian GNU/Linux 12 (bookworm)")
FACTS = NodeFacts(os=DEBIAN, arch="x86_64", libc="glibc 2.36", vector_extensions=("avx", "avx2"),
                  disk_total_bytes=100 * 10**9, disk_free_bytes=50 * 10**9)
H200 = Gpu("GPU-1", 0, "NVIDIA H200", 141 << 30, 0, "9.0")
GPU_FACTS = dataclasses.replace(FACTS, gpus=(H200, H200), nvidia_driver="590.48.01")
WAYS = Ways(DEBIAN, ("apt-get",), root=True)
LLAMA, VLLM = NEEDS["llama.cpp"], NEEDS["vllm"]


def machine(facts=FACTS, ways=WAYS, **changes):
    return Machine(facts, ways, **changes)


def stand(needs, seen):
    return {item.name: (item.status.value, item.message) for item in requirements.check(needs, seen)}


def test_a_plain_node_has_all_that_llama_cpp_needs():
    found = requirements.check(LLAMA, machine(installed=True, lacking=()))
    assert requirements.first_missing(found) is None
    assert {item.status for item in found} == {Status.OK, Status.NOT_APPLICABLE}
    assert stand(LLAMA, machine(installed=True, lacking=()))["libraries"] == ("ok", "ldd finds them all")


def test_every_requirement_has_one_sentence_and_what_is_missing_has_something_to_do():
    bare = NodeFacts(os=OsRelease("alpine", (), "3.20", "Alpine Linux v3.20"), arch="riscv64", libc="musl",
                     disk_total_bytes=10, disk_free_bytes=1, gpus=(dataclasses.replace(H200, compute_capability="5.0"),),
                     nvidia_driver="470.1")
    for needs in (LLAMA, VLLM):
        for item in requirements.check(needs, machine(bare, Ways(bare.os), lacking=(Library("libgomp.so.1"),), gcc=False)):
            assert item.message and "\n" not in item.message and not item.message.endswith(".")
            assert bool(item.hint) == (item.status is Status.MISSING)


@pytest.mark.parametrize("name, facts, expected", [
    ("processor", {"arch": "riscv64"}, ("missing", "no archive is made for processors of type riscv64")),
    ("processor", {"arch": ""}, ("warning", "could not find out which processor this is")),
    ("AVX2", {"vector_extensions": ("avx",)},
     ("warning", "the processor shows no AVX2 (a VM processor type?): it makes everything about five times slower")),
    ("AVX2", {"vector_extensions": ()}, ("warning", "could not find out what the processor can do")),
    ("AVX2", {"arch": "aarch64"}, ("not applicable", "asked of x86-64 processors only")),
    ("disk", {"disk_free_bytes": 10**8},
     ("missing", "100 MB free on the filesystem of the data folder, 500 MB are needed while installing")),
    ("disk", {"disk_total_bytes": 0}, ("warning", "could not find out how much room the data folder has")),
    ("GPU", {}, ("not applicable", "none that llmgw could use: it runs on the CPU")),
    ("GPU", {"gpus": (H200, H200)}, ("ok", "2 x NVIDIA H200")),
    ("GPU", {"reboot_needed": "driver and library versions differ"},
     ("missing", "driver and library versions differ")),
])
def test_llama_cpp_requirement(name, facts, expected):
    assert stand(LLAMA, machine(dataclasses.replace(FACTS, **facts)))[name] == expected


@pytest.mark.parametrize("name, facts, gcc, expected", [
    ("NVIDIA driver", {}, None, ("ok", "590.48.01, 580 or newer is needed")),
    ("NVIDIA driver", {"nvidia_driver": "570.26"}, None,
     ("missing", "the NVIDIA driver is 570.26, 580 or newer is needed")),
    ("NVIDIA driver", {"nvidia_driver": None}, None, ("warning", "could not find out which driver is loaded")),
    ("NVIDIA driver", {"gpus": ()}, None, ("not applicable", "no GPU")),
    ("compute capability", {}, None, ("ok", "9.0, 7.5 or higher is needed")),
    ("compute capability", {"gpus": (H200, dataclasses.replace(H200, index=1, name="NVIDIA P40", compute_capability="6.1"))},
     None, ("missing", "GPU 1 (NVIDIA P40) has compute capability 6.1, 7.5 or higher is needed")),
    ("compute capability", {"gpus": (dataclasses.replace(H200, compute_capability=None),)}, None,
     ("warning", "could not find out which compute capability the GPUs have")),
    ("compute capability", {"gpus": (dataclasses.replace(H200, compute_capability="12.1"),)}, None,
     ("ok", "12.1, 7.5 or higher is needed")),
    ("disk", {"disk_free_bytes": 24 * 10**9}, None,
     ("missing", "24.0 GB free on the filesystem of the data folder, 25.0 GB are needed while installing")),
    ("glibc", {}, None, ("ok", "2.36, 2.31 or newer is needed")),
    ("glibc", {"libc": "glibc 2.9"}, None, ("missing", "glibc is 2.9, 2.31 or newer is needed")),
    ("glibc", {"libc": "musl"}, None,
     ("missing", "this system's C library is musl, glibc 2.31 or newer is needed")),
    ("glibc", {"libc": ""}, None, ("warning", "could not find out which C library this system has")),
    ("gcc", {}, True, ("ok", "gcc and the headers of the C library are here")),
    ("gcc", {}, False, ("missing", "gcc or the headers of the C library are missing: packages gcc and libc6-dev bring them")),
    ("gcc", {}, None, ("warning", "could not find out whether there is a compiler")),
])
def test_vllm_requirement(name, facts, gcc, expected):
    assert stand(VLLM, machine(dataclasses.replace(GPU_FACTS, **facts), gcc=gcc))[name] == expected


def test_an_engine_for_gpus_is_skipped_without_a_fault_where_there_is_none():
    assert requirements.skipped(VLLM, FACTS) == "no GPU that it could use"
    assert requirements.skipped(VLLM, GPU_FACTS) == "" == requirements.skipped(LLAMA, FACTS)
    waiting = dataclasses.replace(FACTS, reboot_needed="versions differ")
    assert requirements.skipped(VLLM, waiting) == "", "a node that waits for its reboot has a GPU"


def test_a_node_that_waits_for_its_reboot_is_missing_something_unless_the_cpu_build_is_wanted():
    waiting = dataclasses.replace(FACTS, reboot_needed="driver and library versions differ")
    found = requirements.first_missing(requirements.check(LLAMA, machine(waiting)))
    assert (found.name, found.hint) == ("GPU", "reboot the node")
    assert requirements.first_missing(requirements.check(LLAMA, machine(waiting, cpu=True))) is None


def test_a_gpu_node_needs_more_room_for_the_gpu_build_only():
    little = dataclasses.replace(GPU_FACTS, disk_free_bytes=10**9)
    assert stand(LLAMA, machine(little))["disk"][0] == "missing"
    assert stand(LLAMA, machine(little, cpu=True))["disk"][0] == "ok"
    assert stand(LLAMA, machine(little, installed=True))["disk"][0] == "not applicable"


def libraries(*lacking, **changes):
    return requirements.libraries(LLAMA, machine(lacking=tuple(lacking), **changes))


OLD = (Library("libgomp.so.1"), Library("libc.so.6", "GLIBC_2.38"), Library("libstdc++.so.6", "GLIBCXX_3.4.32"))


def test_a_missing_library_names_its_package_and_the_command():
    found = libraries(Library("libgomp.so.1"))
    assert (found.message, found.hint) == (
        "libgomp.so.1 is missing: package libgomp1 brings it", "apt-get install -y libgomp1")


def test_a_library_of_the_engine_itself_is_in_no_package():
    found = libraries(Library("libllama.so.0"), Library("libgomp.so.1"))
    assert found.message == "libllama.so.0 is missing, a file of the engine itself" and "put it back" in found.hint
    assert requirements.package_plan(LLAMA, WAYS, [Library("libggml-base.so.0")]) is None


def test_a_library_that_is_too_old_is_mended_by_no_package():
    found = libraries(*OLD)
    assert found.message == ("libgomp.so.1 is missing; libc.so.6 is too old (needs GLIBC_2.38); "
                             "libstdc++.so.6 is too old (needs GLIBCXX_3.4.32)")
    assert found.hint == "use a newer system on this node, or a build made for this system (engines: in agent.yaml)"


def test_a_cuda_build_that_is_too_new_says_which_other_builds_there_are():
    assert libraries(*OLD, cuda="13.4", other_cuda=("12.8",)).hint == (
        "take an older CUDA build with cuda: 12.8 under engines: (this one is 13.4), or the CPU build with cpu: true "
        "under engines:, or use a newer system on this node")
    assert libraries(*OLD, cuda="12.8").hint == (
        "take the CPU build with cpu: true under engines:, or use a newer system on this node")


def test_a_program_for_glibc_on_a_system_with_another_c_library():
    facts = dataclasses.replace(FACTS, os=OsRelease("alpine", (), "3.20", "Alpine Linux v3.20"))
    found = requirements.libraries(LLAMA, machine(facts, Ways(facts.os), lacking=(
        Library("libstdc++.so.6"), Library("ld-linux-x86-64.so.2"))))
    assert found.message == "it is made for glibc, and the C library of Alpine Linux v3.20 is another"


def test_before_anything_is_installed_only_the_usual_libraries_can_be_asked_about():
    assert requirements.libraries(LLAMA, machine()).status is Status.NOT_APPLICABLE
    assert libraries().message == "the usual ones are here"
    assert requirements.libraries(Needs(), machine(lacking=(), installed=True)).message == "ldd finds them all"
