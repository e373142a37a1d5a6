"""ldd, --version and names in archives."""
from __future__ import annotations

import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.domain.errors import LlmgwError, ParseError, UnsafeArchive
from llmgw.parse import engine_version, ldd
from llmgw.parse.archive import link_target, member_path

DATA = pathlib.Path(__file__).parent.parent / "data"


@pytest.mark.parametrize("name, sentences", [
    ("backend-dl-libggml-cpu.so.txt", ()),
    ("static.txt", ()), ("script.txt", ()),
    ("debian11-missing-libgomp.txt", ("libgomp.so.1 is missing", "libc.so.6 is too old (needs GLIBC_2.34)")),
    ("debian11-llama-server-built-on-debian12.txt",
     ("libc.so.6 is too old (needs GLIBC_2.34)", "libstdc++.so.6 is too old (needs GLIBCXX_3.4.30)")),
    ("debian11-llama-server-run.txt",
     ("libc.so.6 is too old (needs GLIBC_2.34)", "libstdc++.so.6 is too old (needs GLIBCXX_3.4.30)")),
    ("debian11-missing-libstdcxx-and-old-glibc.txt",
     ("libstdc++.so.6 is missing", "libc.so.6 is too old (needs GLIBC_2.34)")),
    ("missing-cuda-libs.txt",
     ("libcudart.so.12 is missing", "libcublas.so.12 is missing", "libcuda.so.1 is missing")),
    ("missing-cuda-libs.run.txt", ("libcudart.so.12 is missing",)),
    ("musl-ldd-on-glibc-binary.txt",
     ("libstdc++.so.6 is missing", "libgcc_s.so.1 is missing", "ld-linux-x86-64.so.2 is missing")),
])
def test_recorded_ldd_output_gives_one_sentence_per_library(name, sentences):
    assert ldd.missing((DATA / "ldd" / name).read_text()) == sentences


@given(st.text(max_size=500))
def test_any_text_is_read_by_ldd(text):
    ldd.missing(text)


@pytest.mark.parametrize("out, err, build", [
    ("", (DATA / "llamacpp" / "version-b10991.stderr").read_text(), 0),
    ("", "load_backend: loaded CPU\nversion: 0.4.1-dev (build 10991, commit b10991)\nbuilt with GNU\n", 10991),
    ("version: 6500 (b1a2c3d4)\nbuilt with cc\n", "", 6500),
])
def test_llama_server_says_its_build_on_either_stream_in_either_form(out, err, build):
    assert engine_version.llama_cpp(out, err).build == build


def test_a_program_that_says_no_version_is_refused():
    with pytest.raises(ParseError, match="hello"):
        engine_version.llama_cpp("hello\n", "")


def test_devices():
    recorded = (DATA / "llamacpp" / "list-devices-b10991.stdout").read_text()
    assert engine_version.devices(recorded) == ()
    assert engine_version.devices("Available devices:\n  CUDA0: NVIDIA H200 (143000 MiB)\n") == (
        "CUDA0: NVIDIA H200 (143000 MiB)",)


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/etc/passwd", "", "a\0b", "x" * 2000, "d/" * 40 + "f", "a/.."])
def test_names_that_land_outside_are_refused(name):
    with pytest.raises(UnsafeArchive):
        member_path(name)


def test_plain_names_are_taken_apart():
    assert member_path("./llama-b1/bin/./llama-server") == ("llama-b1", "bin", "llama-server")
    assert member_path("./") == ()


@pytest.mark.parametrize("link, target", [
    ("top/libx.so", "libx.so.0"), ("top/libx.so.0", "./libx.so.0.9"), ("top/bin/l", "../lib/a"), ("l", "a/b")])
def test_links_that_stay_inside_are_allowed(link, target):
    assert link_target(tuple(link.split("/")), target)


@pytest.mark.parametrize("link, target", [
    ("l", "../x"), ("top/l", "../../x"), ("l", "/etc"), ("a/b/l", "c/../../../x"), ("a/b/l", "d/.."),
    ("l", ""), ("l", "..")])
def test_links_that_point_outside_or_behind_other_links_are_refused(link, target):
    with pytest.raises(UnsafeArchive):
        link_target(tuple(link.split("/")), target)


@given(st.text(alphabet="a./\0-", max_size=30), st.text(alphabet="a./\0-", max_size=30))
def test_what_is_let_through_never_leaves_the_folder(name, target):
    try:
        parts = member_path(name)
        made = link_target(parts, target)
    except LlmgwError:
        return
    at = list(parts[:-1])
    for part in made.split("/"):
        if part == "..":
            assert at
            at.pop()
        elif part != ".":
            at.append(part)
