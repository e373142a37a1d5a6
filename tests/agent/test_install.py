"""Installing and fetching with the real archive: kills between any two steps, and everything that can be wrong."""
from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import pathlib
import random
import tarfile
import types

import pytest

from llmgw.agent.install import Installer
from llmgw.agent.layout import Layout
from llmgw.agent.prove import Prover
from llmgw.domain.command import Outcome
from llmgw.domain.engine import Asset, EnginePhase, EngineWanted
from llmgw.domain.errors import CommandFailed, EngineFailed, RequirementMissing
from llmgw.domain.model import WeightsPhase
from llmgw.domain.node import NodeFacts, OsRelease
from llmgw.system.installed import Installed
from tests.agent.conftest import wait_for
from tests.fakes.control_plane import engine_of, sha256_of, shard_of, weights_of

FINISHED = (EnginePhase.INSTALLED, EnginePhase.FAILED, EnginePhase.MISSING, EnginePhase.SKIPPED)


def phase(plane, *wanted, seconds=60):
    """Wait until the one engine is in a phase of ``wanted``; return what is said of it."""
    def condition(observed):
        return observed.probed and observed.engines and observed.engines[0].phase in (wanted or FINISHED)
    return plane.wait(condition, seconds).engines[0]


@pytest.mark.parametrize("place", [
    "fetch-before-rename", "fetch-after-rename", "unpack-before-links", "install-unpacked",
    "write-atomic-before-rename", "install-before-rename", "install-after-rename"])
def test_a_kill_between_any_two_steps_of_an_install_is_repaired(node, plane, llama_archive, place):
    plane.offer(archive=llama_archive)
    plane.want([engine_of(llama_archive)])
    # the first files written whole are the desired state and the gate's table, the third is the marker
    node.start(LLMGW_FAILPOINT=f"{place}:kill@{3 if place.startswith('write') else 1}")
    assert node.ended() == -9
    node.start()
    assert phase(plane).phase is EnginePhase.INSTALLED
    engines = node.data / "engines" / "llama.cpp"
    wait_for(lambda: os.listdir(engines) == ["b10991"], what="nothing but the version")
    wait_for(lambda: not list((node.data / "blobs").glob("*/*")), what="no archive left")
    assert list((engines / "b10991").glob(".*")) == [engines / "b10991" / ".llmgw-installed.json"]


@pytest.mark.parametrize("place", ["fetch-before-rename", "fetch-after-rename", "weights-after-blob",
                                   "weights-before-marker", "weights-after-marker"])
def test_a_kill_between_any_two_steps_of_a_weights_fetch_is_repaired(node, plane, tmp_path, place):
    path = tmp_path / "w.gguf"
    path.write_bytes(random.Random(3).randbytes(20 << 20))
    weights = weights_of(path, "w")
    plane.offer(weights=weights, path=path)
    plane.want([], [shard_of(weights)])
    node.start(LLMGW_FAILPOINT=f"{place}:kill")
    assert node.ended() == -9
    node.start()
    plane.wait(lambda observed: [item.phase for item in observed.weights] == [WeightsPhase.WHOLE])
    (link,) = (node.data / "models" / "w").glob("*/w.gguf")
    assert link.read_bytes() == path.read_bytes()
    assert len(plane.ranges) == len(set(plane.ranges)) == 3, "no chunk that was verified is fetched twice"


def lying(plane, archive, data):
    """Let the control plane send ``data`` for the archive."""
    plane.offer(archive=archive)
    plane.spoil = lambda name, whole: data


def test_an_archive_with_another_digest_is_refused_and_tried_again(node, plane, llama_archive):
    whole = pathlib.Path(llama_archive.path).read_bytes()
    lying(plane, llama_archive, whole[:-1] + bytes([whole[-1] ^ 1]))
    plane.want([engine_of(llama_archive)])
    node.start()
    seen = phase(plane)
    assert seen.phase is EnginePhase.FAILED and not seen.usable and "sha256 is" in seen.message
    assert "tried again in" in seen.message and not list((node.data / "blobs").glob("*/*"))
    plane.spoil = lambda name, data: data
    assert phase(plane, EnginePhase.INSTALLED).usable


def archive_of(tmp_path, members, name="llama-b10991-bin-ubuntu-x64.tar.gz"):
    path = tmp_path / name
    with tarfile.open(path, "w:gz") as tar:
        for member, data in members:
            info = tarfile.TarInfo(member)
            info.size, info.mode = len(data), 0o755
            tar.addfile(info, io.BytesIO(data))
    return types.SimpleNamespace(path=path, sha256=sha256_of(path))


SCRIPT = b"#!/bin/sh\necho 'version: 1.0 (build %s, commit x)' >&2\n"
BAD_ARCHIVES = {
    "climbs out": ([("../evil", b"x")], EnginePhase.FAILED, "climbs out of its folder"),
    "no program": ([("llama-b10991/README", b"x")], EnginePhase.FAILED, "holds no llama-server"),
    "another release": ([("llama-b10991/llama-server", SCRIPT % b"77")], EnginePhase.FAILED, "calls itself build 77"),
    "fails": ([("llama-b10991/llama-server", b"#!/bin/sh\necho broken >&2; exit 3\n")], EnginePhase.FAILED,
              "code 3: broken"),
    "says nothing": ([("llama-b10991/llama-server", b"#!/bin/sh\n")], EnginePhase.FAILED, "no version"),
    "no program at all": ([("llama-b10991/llama-server", b"\x7fELF garbage")], EnginePhase.FAILED, "cannot run"),
}


@pytest.mark.parametrize("shape", BAD_ARCHIVES, ids=str)
def test_an_archive_that_is_not_what_it_says_is_refused_in_words(node, plane, tmp_path, shape):
    members, expected, words = BAD_ARCHIVES[shape]
    archive = archive_of(tmp_path, members)
    plane.offer(archive=archive)
    plane.want([engine_of(archive)])
    node.start()
    seen = phase(plane)
    assert seen.phase is expected and words in seen.message and not seen.usable
    assert not (tmp_path / "evil").exists() and not (node.data / "engines" / "llama.cpp" / "b10991").exists()


def test_an_engine_without_a_list_says_why_in_the_words_of_the_control_plane(node, plane, llama_archive):
    plane.want([EngineWanted("llama.cpp", "b10991", (), "GitHub does not answer: import the archive")])
    node.start()
    assert phase(plane, EnginePhase.RESOLVING).message == "GitHub does not answer: import the archive"
    plane.offer(archive=llama_archive)
    plane.want([engine_of(llama_archive)])
    assert phase(plane, EnginePhase.INSTALLED).usable


def test_an_engine_of_another_kind_is_skipped_without_a_fault_where_there_is_no_gpu(node, plane):
    plane.want([EngineWanted("vllm", "0.30.0")])
    node.start()
    seen = phase(plane)
    assert (seen.phase, seen.message) == (EnginePhase.SKIPPED, "no GPU that it could use")


def test_an_installed_engine_whose_files_are_damaged_is_found_and_installed_anew(node, plane, llama_archive):
    plane.offer(archive=llama_archive)
    plane.want([engine_of(llama_archive)])
    node.start()
    phase(plane, EnginePhase.INSTALLED)
    node.kill9()
    (node.data / "engines" / "llama.cpp" / "b10991" / "llama-server").unlink()
    asked = len(plane.ranges)
    node.start()
    wait_for(lambda: len(plane.ranges) > asked, what="another download")
    wait_for((node.data / "engines" / "llama.cpp" / "b10991" / "llama-server").exists, what="the program")
    assert phase(plane, EnginePhase.INSTALLED).usable


def test_an_installed_engine_is_not_downloaded_again(node, plane, llama_archive):
    plane.offer(archive=llama_archive)
    plane.want([engine_of(llama_archive)])
    node.start()
    phase(plane, EnginePhase.INSTALLED)
    node.kill9()
    plane.observed = None
    asked = len(plane.ranges)
    node.start()
    assert phase(plane).phase is EnginePhase.INSTALLED and len(plane.ranges) == asked


def test_a_library_that_goes_is_told_at_the_next_check_and_the_engine_is_usable_again_when_it_is_back(
        node, plane, release_archive):
    plane.offer(archive=release_archive)
    plane.want([engine_of(release_archive)])
    node.start(LLMGW_REHEARSE_RECHECK_SECONDS="1")
    assert phase(plane, EnginePhase.INSTALLED).usable
    folder = node.data / "engines" / "llama.cpp" / "b10991"
    assert sorted(folder.glob("libggml-cpu-*.so")), "the shape of a release: backends that are loaded while it runs"
    (library,) = folder.glob("libllama.so.0.*")
    library.rename(library.with_suffix(".away"))
    seen = phase(plane, EnginePhase.MISSING)
    assert not seen.usable and seen.message.startswith("llama.cpp b10991: libllama.so.0 is missing")
    library.with_suffix(".away").rename(library)
    assert phase(plane, EnginePhase.INSTALLED).usable


def test_the_operators_own_program_is_used_and_named(node, plane, llama_server, tmp_path):
    config = tmp_path / "agent.yaml"
    config.write_text(f"engines:\n  llama.cpp: {{binary: {llama_server}}}\n")
    plane.want([EngineWanted("llama.cpp", "b10991")])
    node.start("--config", str(config))
    seen = phase(plane)
    assert seen.phase is EnginePhase.INSTALLED and seen.source == "operator" and str(llama_server) in seen.message
    assert plane.ranges == []


def test_a_disk_without_room_keeps_the_partial_download_and_is_told(node, plane, tmp_path):
    path = tmp_path / "w.gguf"
    path.write_bytes(b"x" * 1000)
    weights = weights_of(path, "w")
    huge = dataclasses.replace(weights, files=(dataclasses.replace(weights.files[0], size_bytes=1 << 50, chunks=()),))
    plane.want([], [shard_of(huge)])
    node.start()
    seen = plane.wait(lambda observed: [item.phase for item in observed.weights] == [WeightsPhase.FAILED]).weights[0]
    assert "are needed" in seen.message and "free some space" in seen.message


class StandInProcesses:
    """Answers for programs that this machine cannot have; proves only what is made of the answers."""

    def __init__(self, **answers):
        self.answers = answers

    def run(self, command, *, timeout, **unused):
        word = "ldd" if command.argv[0] == "ldd" else command.argv[1].strip("-")
        answer = self.answers[word]
        if isinstance(answer, Exception):
            raise answer
        return answer


VERSION = Outcome(0, "", "version: 1 (build 10991, commit x)\n")
NO_DEVICES = Outcome(0, "Available devices:\n  (none)\n", "")


def prove(tmp_path, cuda="", facts=NodeFacts(), allowed=False, **answers):
    (tmp_path / "llama-server").write_bytes(b"\x7fELF")
    (tmp_path / "libggml-cuda.so").write_bytes(b"\x7fELF")
    prover = Prover(StandInProcesses(**answers), str(tmp_path / "packages.log"), allowed, lambda: facts)
    installer = Installer(None, Layout(str(tmp_path)), prover, lambda: False)
    return installer.prove(str(tmp_path), Installed("llama.cpp", "b10991", "llama-server", "", cuda=cuda),
                           lambda *unused, **unused_too: None)


def test_stand_in_ldd_names_each_library_once_over_all_files(tmp_path):
    text = pathlib.Path(__file__).parent.parent.joinpath(
        "data", "ldd", "debian11-llama-server-built-on-debian12.txt").read_text() + "\tlibgomp.so.1 => not found\n"
    with pytest.raises(RequirementMissing) as caught:
        prove(tmp_path, ldd=Outcome(0, "", text))
    assert caught.value.message == ("llama.cpp b10991: libgomp.so.1 is missing; libc.so.6 is too old (needs "
                                    "GLIBC_2.34); libstdc++.so.6 is too old (needs GLIBCXX_3.4.30)")
    assert "newer system" in caught.value.hint


def test_stand_in_libraries_of_the_install_itself_and_of_the_driver_are_not_missed(tmp_path):
    text = "libggml-cuda.so => not found\n\tlibcuda.so.1 => not found\n"
    assert prove(tmp_path, ldd=Outcome(0, text, ""), version=VERSION,
                 **{"list-devices": NO_DEVICES}).says == "version: 1 (build 10991, commit x)"


def test_stand_in_a_cuda_build_that_finds_no_gpu_is_not_installed(tmp_path):
    with pytest.raises(EngineFailed, match="the CUDA build sees no device: --list-devices names none"):
        prove(tmp_path, "12.8", ldd=Outcome(0, "", ""), version=VERSION, **{"list-devices": NO_DEVICES})
    cuda = Outcome(0, "Available devices:\n  CUDA0: NVIDIA H200 (143771 MiB)\n", "")
    assert prove(tmp_path, "12.8", ldd=Outcome(0, "", ""), version=VERSION, **{"list-devices": cuda}).devices


def test_stand_in_a_missing_library_names_its_package_and_why_llmgw_does_not_install_it(tmp_path):
    debian = NodeFacts(os=OsRelease("debian", (), "12", "Debian GNU/Linux 12"))
    with pytest.raises(RequirementMissing) as caught:
        prove(tmp_path, facts=debian, ldd=Outcome(0, "\tlibgomp.so.1 => not found\n", ""))
    assert caught.value.message == ("llama.cpp b10991: libgomp.so.1 is missing: package libgomp1 brings it, and "
                                    "install_packages is false in agent.yaml")
    assert caught.value.hint.endswith("apt-get install -y libgomp1")


def test_stand_in_a_cuda_build_that_is_too_new_for_the_node_says_what_would_help(tmp_path):
    old = Outcome(0, "", "x: /lib/libc.so.6: version `GLIBC_2.38' not found (required by x)\n")
    with pytest.raises(RequirementMissing, match=r"libc\.so\.6 is too old \(needs GLIBC_2\.38\)") as caught:
        prove(tmp_path, "13.4", ldd=old)
    assert "the CPU build with cpu: true under engines:" in caught.value.hint


def test_stand_in_a_program_that_does_not_end_is_a_failure(tmp_path):
    with pytest.raises(CommandFailed, match="no end"):
        prove(tmp_path, ldd=Outcome(0, "", ""), version=CommandFailed("x: no end after 60 seconds, killed"))


def test_files_of_a_runtime_archive_end_beside_the_program(node, plane, tmp_path):
    from llmgw.agent.install import _gathered
    for number, name in (("0", "llama-b1/llama-server"), ("1", "cudart-llama-b1/libcudart.so.12")):
        file = tmp_path / "s" / number / name
        file.parent.mkdir(parents=True)
        file.write_bytes(b"x")
    built = _gathered(str(tmp_path / "s"), 2)
    assert sorted(os.listdir(built)) == ["libcudart.so.12", "llama-server"]


def test_the_asset_of_the_test_archive_is_what_a_release_would_name(llama_archive):
    asset = engine_of(llama_archive).assets[0]
    assert asset == Asset(pathlib.Path(llama_archive.path).name, os.path.getsize(llama_archive.path),
                          hashlib.sha256(pathlib.Path(llama_archive.path).read_bytes()).hexdigest())
