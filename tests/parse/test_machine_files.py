"""os-release, cpuinfo, nvidia-smi: recorded files of real systems."""
from __future__ import annotations

import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.domain.errors import LlmgwError, ParseError
from llmgw.parse import nvidia_smi
from llmgw.parse.cpuinfo import cpuinfo
from llmgw.parse.os_release import os_release

DATA = pathlib.Path(__file__).parent.parent / "data"
OS_FILES = sorted((DATA / "os_release").iterdir())
SMI = DATA / "nvidia_smi"
MIB = 1 << 20


@pytest.mark.parametrize("path", OS_FILES, ids=lambda path: path.name)
def test_every_recorded_os_release_has_an_id_and_a_name(path):
    read = os_release(path.read_bytes())
    assert read.id and read.id == read.id.lower() and " " not in read.id
    assert read.pretty_name and not read.pretty_name.startswith('"')


@pytest.mark.parametrize("name, expected", [
    ("debian_12", ("debian", (), "12")), ("amazon_2", ("amzn", ("centos", "rhel", "fedora"), "2")),
    ("sles_15", ("sles", ("suse",), "15.7")), ("arch", ("arch", (), "TEMPLATE_VERSION_ID")),
    ("clearlinux_1", ("clear-linux-os", ("clear-linux-os",), "38250")),
    ("ubuntu_2204", ("ubuntu", ("debian",), "22.04")),
])
def test_id_like_may_be_absent_one_or_several(name, expected):
    read = os_release((DATA / "os_release" / name).read_bytes())
    assert (read.id, read.id_like, read.version_id) == expected


def test_quotes_escapes_and_commands_are_only_text():
    read = os_release(b"# c\nID='my os'\nPRETTY_NAME=\"a \\\"b\\\" $(id) \\$x\"\nID_LIKE=`id`\nbroken\n=x\n")
    assert read.id == "my os" and read.pretty_name == 'a "b" $(id) $x' and read.id_like == ("`id`",)


@given(st.binary(max_size=2000))
def test_any_bytes_give_an_os_release_and_a_cpu(data):
    os_release(data)
    cpuinfo(data)


def test_an_x86_processor_with_avx2_and_amx():
    read = cpuinfo(b"processor\t: 0\nmodel name\t: Intel(R) Xeon(R)\nflags\t\t: fpu avx fma f16c avx2 "
                   b"avx512f amx_int8 amx_tile\n\nprocessor\t: 1\nmodel name\t: Other\nflags\t\t: fpu\n")
    assert (read.model, read.count) == ("Intel(R) Xeon(R)", 2)
    assert read.vector_extensions == ("avx", "avx2", "fma", "f16c", "avx512f", "amx_tile", "amx_int8")


def test_an_arm_processor_names_its_vectors_by_features():
    read = cpuinfo(b"processor\t: 0\nFeatures\t: fp asimd aes asimddp sve i8mm\n")
    assert read.vector_extensions == ("neon", "dotprod", "i8mm", "sve")


@pytest.mark.parametrize("path", sorted(SMI.glob("*x86_64*.csv")), ids=lambda path: path.stem)
def test_recorded_query_output_is_read(path):
    columns = ("index", "uuid", "name", "pci", "driver_version", "compute_cap", "mig.mode.current",
               "memory.total", "memory.used", "memory.free", "utilization", "temperature", "power")
    read = nvidia_smi.gpus(path.read_text(), columns)
    (gpu,) = read.gpus
    assert gpu.index == 0 and gpu.name.startswith("NVIDIA ") and gpu.memory_total_bytes > 8000 * MIB
    assert read.driver in path.stem and gpu.mig is ("-mig" in path.stem)
    assert gpu.compute_capability in ("7.5", "8.9", "9.0")


UUID = "GPU-00000000-0000-0000-0000-000000000000"


def test_unified_memory_is_unknown_and_not_zero():
    read = nvidia_smi.gpus(f"0, {UUID}, NVIDIA GB10, 580.95.05, 12.1, [N/A], [N/A], [N/A]\n")
    assert read.gpus[0].memory_total_bytes is None and read.gpus[0].memory_used_bytes is None
    assert read.gpus[0].compute_capability == "12.1"


def test_a_name_with_commas_and_an_old_driver_without_compute_capability():
    line = f"1, {UUID}, NVIDIA A, B, C, 470.1, [Not Supported], 10 MiB, ERR!\n"
    read = nvidia_smi.gpus(line, nvidia_smi.FIELDS_OLD)
    assert read.gpus[0].name == "NVIDIA A, B, C" and read.gpus[0].compute_capability is None
    assert read.gpus[0].memory_total_bytes == 10 * MIB and read.gpus[0].memory_used_bytes is None


@pytest.mark.parametrize("name, words", [
    ("driver-mismatch.stdout", "driver and library versions differ"),
    ("driver-mismatch-old.stdout", "driver and library versions differ"),
    ("driver-not-loaded.stdout", "the NVIDIA driver is not loaded"),
    ("wsl-driver-not-loaded.stdout", "the NVIDIA driver is not loaded"),
    ("wsl-gpu-blocked.stdout", "blocks the access"),
    ("no-devices.stdout", "finds no device"),
    ("device-handle-lost.stdout", "fallen off the bus"),
    ("mig-list-a100.txt", "nvidia-smi says"),
])
def test_errors_on_stdout_become_a_sentence(name, words):
    text = (SMI / name).read_text() if (SMI / name).exists() else "GPU 0: something"
    with pytest.raises(ParseError) as caught:
        nvidia_smi.gpus(text)
    assert words in caught.value.message


def test_processes_on_gpus():
    assert nvidia_smi.app_pids(f"21180, 2296 MiB, {UUID}\n7, [N/A], {UUID}\nNo running\n") == (
        (21180, 2296 * MIB), (7, None))


@given(st.text(max_size=500))
def test_any_text_gives_gpus_or_our_error(text):
    try:
        nvidia_smi.gpus(text)
    except LlmgwError as error:
        assert len(error.message) <= 500
