"""Whatever a program prints, its reader returns a value or an error of ours: never a crash, never without end."""
from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.domain.errors import LlmgwError
from llmgw.parse import (
    address,
    cpuinfo,
    engine_version,
    ldd,
    mounts,
    nvidia_smi,
    os_release,
    package_problem,
    uv_output,
    wheel,
)
from llmgw.parse.uv_output import Progress

DIGITS = st.one_of(st.integers(0, 10 ** 30).map(str), st.just("9" * 5000), st.sampled_from(("²", "١", "1.2.3", "", "-1")))


def worded(*templates):
    """Texts that look like what is read, with odd numbers and words in them, and any text at all."""
    filled = st.builds(lambda template, number, word: template.replace("#", number).replace("@", word),
                       st.sampled_from(templates), DIGITS, st.text(max_size=20))
    return st.lists(st.one_of(filled, st.text(max_size=80)), max_size=5).map("\n".join)


def reads(reader, *given_to_it):
    try:
        reader(*given_to_it)
    except LlmgwError:
        pass


@given(worded("version: 0.4.1 (build #, commit @)", "version: # (abc)", "Available devices:", "  CUDA#: @", "  (none)"),
       st.text(max_size=50))
def test_engine_version(out, err):
    reads(engine_version.llama_cpp, out, err)
    reads(engine_version.devices, out)
    reads(engine_version.has_known_holes, out)


@given(worded("x: version `GLIBC_#' not found", "/l/@: version `GLIBCXX_2.#' not found (required by @)",
              "\t@ => not found", "Error loading shared library @: No such file (needed by @)"))
def test_ldd(text):
    reads(ldd.missing, text)


@given(worded("#, GPU-12345678-1234-1234-1234-123456789012, @, # MiB, # MiB, Enabled, #.#", "#, [N/A]", "#, # MiB"))
def test_nvidia_smi(text):
    reads(nvidia_smi.app_pids, text)
    reads(nvidia_smi.problem, text)


@given(worded("Downloading @ (# MiB)", "Downloading torch (#B)", "Downloaded @", "Resolved # packages in 1s", "error: @"))
def test_uv_output(text):
    before = Progress()
    for line in text.splitlines():
        before = uv_output.progress(before, line)
    assert before.total_bytes >= 0
    reads(uv_output.problem, text)


@given(worded("E: Could not get lock /x. It is held by process # (@)", "Err:# @", "404 Not Found"))
def test_package_problem(text):
    reads(package_problem.problem, text)


@given(worded("server @ nfs rw 0 0", "/dev/sda\\04# / ext4", "none @ tmpfs"), st.text(max_size=30))
def test_mounts(text, path):
    reads(mounts.network_filesystem, text, path)


@given(st.one_of(worded("torch-#-cp3#-abi3-manylinux_#_#_x86_64.whl", "@-1-py3-none-any.whl"), st.text(max_size=80)),
       st.recursive(st.none() | st.integers() | st.text(max_size=20), lambda inner: st.lists(inner, max_size=3)
                    | st.dictionaries(st.sampled_from(("files", "filename", "url", "hashes", "sha256", "size")), inner)))
def test_wheel(name, data):
    reads(wheel.fits, name, "x86_64", (2, 31))
    reads(wheel.listed, data, "torch")


@given(st.text(max_size=80))
def test_address(text):
    for reader in (address.host, address.host_port, address.server_url, address.absolute_path):
        reads(reader, text)


@pytest.mark.parametrize("reader", [
    ldd.missing, nvidia_smi.problem, nvidia_smi.app_pids, package_problem.problem, uv_output.problem,
    lambda text: engine_version.llama_cpp(text, ""), lambda text: os_release.os_release(text.encode()),
    lambda text: cpuinfo.cpuinfo(text.encode())],
    ids=["ldd", "nvidia-smi", "compute apps", "apt-get", "uv", "version", "os-release", "cpuinfo"])
@pytest.mark.parametrize("piece", ["a", "0", " ", "/", "'", "error ", "version: ", "x: version `", "(", ":", "E: "])
def test_a_long_line_takes_time_in_proportion(reader, piece):
    """Twenty times as much in one line: a reader that goes back and forth takes four hundred times as long."""
    def cost(size):
        text = piece * (size // len(piece))
        before = time.process_time()
        reads(reader, text)
        return time.process_time() - before
    assert cost(200_000) < 100 * max(cost(10_000), 0.005)
