"""Transfers that are cut, spoiled, stalled and killed: what ends under the final name is whole."""
from __future__ import annotations

import hashlib
import os
import pathlib
import random
import subprocess
import sys
import textwrap

import pytest

from llmgw.domain.errors import DigestMismatch, DiskFull, DownloadFailed, Unreachable
from llmgw.domain.model import CHUNK_BYTES
from llmgw.system import download
from llmgw.system.http_client import HttpClient
from tests.fakes.control_plane import ControlPlane

DATA = random.Random(5).randbytes(3 * CHUNK_BYTES + 12345)
SHA = hashlib.sha256(DATA).hexdigest()
CHUNKS = tuple(hashlib.sha256(DATA[at:at + CHUNK_BYTES]).hexdigest() for at in range(0, len(DATA), CHUNK_BYTES))


@pytest.fixture
def plane(tmp_path):
    path = tmp_path / "source"
    path.write_bytes(DATA)
    served = ControlPlane()
    served.blobs[SHA] = path
    yield served
    served.close()


def opener(plane):
    client = HttpClient(plane.url)
    return lambda offset: client.stream("GET", f"/v1/blobs/{SHA}", headers={"Range": f"bytes={offset}-"}, timeout=5)


def fetch(plane, target, chunks=CHUNKS, **more):
    download.fetch(opener(plane), str(target), **{"sha256": SHA, "size": len(DATA), "chunks": chunks, **more})


@pytest.mark.parametrize("chunks", [CHUNKS, ()], ids=["chunks", "no chunks"])
def test_a_file_comes_whole_and_progress_ends_at_its_size(plane, tmp_path, chunks):
    seen = []
    fetch(plane, tmp_path / "t", chunks, progress=seen.append)
    assert (tmp_path / "t").read_bytes() == DATA and not (tmp_path / "t.part").exists()
    assert seen == sorted(seen) and seen[-1] == len(DATA)


def test_an_empty_file_is_a_file(plane, tmp_path):
    fetch(plane, tmp_path / "t", (), sha256=hashlib.sha256(b"").hexdigest(), size=0)
    assert (tmp_path / "t").read_bytes() == b""


@pytest.mark.parametrize("chunks", [CHUNKS, ()], ids=["chunks", "no chunks"])
def test_a_cut_transfer_goes_on_where_it_ended(plane, tmp_path, chunks):
    plane.cut_after = CHUNK_BYTES + (1 << 20)
    with pytest.raises(Unreachable, match="early"):
        fetch(plane, tmp_path / "t", chunks)
    assert not (tmp_path / "t").exists()
    have = os.path.getsize(tmp_path / "t.part")
    assert have == plane.cut_after
    plane.cut_after = None
    fetch(plane, tmp_path / "t", chunks)
    assert (tmp_path / "t").read_bytes() == DATA
    assert plane.ranges[-1].endswith(f"bytes={have}-")


def test_only_a_chunk_that_went_bad_on_disk_is_fetched_again(plane, tmp_path):
    spoiled = bytearray(DATA[:-10])
    spoiled[CHUNK_BYTES + 5] ^= 1
    (tmp_path / "t.part").write_bytes(spoiled)
    fetch(plane, tmp_path / "t")
    assert (tmp_path / "t").read_bytes() == DATA
    assert sorted(plane.ranges) == sorted([f"{SHA} bytes={CHUNK_BYTES}-", f"{SHA} bytes={len(DATA) - 10}-"])


def test_a_chunk_spoiled_once_on_the_way_is_fetched_again(plane, tmp_path):
    times = []

    def spoil(name, data):
        times.append(1)
        return data[:100] + b"!" + data[101:] if len(times) == 1 else data
    plane.spoil = spoil
    fetch(plane, tmp_path / "t")
    assert (tmp_path / "t").read_bytes() == DATA
    assert len(times) == 3 and f"{SHA} bytes=0-" in plane.ranges[1:]     # the rest, from where it was left


def test_a_source_that_always_lies_is_refused_early_when_chunks_are_known(plane, tmp_path):
    plane.spoil = lambda name, data: data[:100] + b"!" + data[101:]
    with pytest.raises(DigestMismatch, match="bytes 0 to"):
        fetch(plane, tmp_path / "t")
    assert not (tmp_path / "t").exists() and len(plane.ranges) == download.CHUNK_TRIES


def test_a_source_that_lies_is_refused_at_the_end_without_chunks_and_nothing_is_kept(plane, tmp_path):
    plane.spoil = lambda name, data: data[:-1] + bytes([data[-1] ^ 1])
    with pytest.raises(DigestMismatch):
        fetch(plane, tmp_path / "t", ())
    assert os.listdir(tmp_path) == ["source"]


def test_good_chunks_of_another_file_do_not_make_it_this_one(plane, tmp_path):
    with pytest.raises(DigestMismatch):
        fetch(plane, tmp_path / "t", sha256="0" * 64)
    assert not (tmp_path / "t").exists()


def test_a_server_without_ranges_starts_over_and_still_brings_it(plane, tmp_path):
    plane.ranged = False
    (tmp_path / "t.part").write_bytes(DATA[:CHUNK_BYTES * 2 + 7])
    fetch(plane, tmp_path / "t")
    assert (tmp_path / "t").read_bytes() == DATA


class Answer:
    def __init__(self, status, headers, body=b""):
        self.status, self.headers, self.body = status, headers, body

    def read(self, size):
        piece, self.body = self.body[:size], self.body[size:]
        return piece

    def close(self):
        pass


@pytest.mark.parametrize("answer", [
    Answer(206, {"content-range": f"bytes 5-{len(DATA) - 1}/{len(DATA)}"}),
    Answer(206, {"content-range": f"bytes 0-{len(DATA) - 1}/{len(DATA) + 1}"}),
    Answer(206, {"content-range": "bytes 0-0/*"}), Answer(206, {}), Answer(416, {}), Answer(204, {}),
], ids=["other start", "other size", "unknown size", "none", "416", "204"])
def test_a_range_that_was_not_asked_for_is_refused(tmp_path, answer):
    with pytest.raises(DownloadFailed):
        download.fetch(lambda offset: answer, str(tmp_path / "t"), sha256=SHA, size=len(DATA))


def test_a_dripping_source_is_given_up(tmp_path):
    class Drip(Answer):
        def read(self, size):
            return b"x"
    with pytest.raises(Unreachable, match="stalled"):
        download.fetch(lambda offset: Drip(206, {"content-range": f"bytes 0-{1 << 30 - 1}/{1 << 30}"}),
                       str(tmp_path / "t"), sha256=SHA, size=1 << 30, stalled_seconds=0.2)


def test_a_disk_without_room_is_said_before_anything_is_fetched(plane, tmp_path):
    with pytest.raises(DiskFull, match="are needed"):
        fetch(plane, tmp_path / "t", reserve_bytes=1 << 60)
    assert plane.ranges == []


def test_stopping_keeps_what_has_come(plane, tmp_path):
    pieces = []
    with pytest.raises(download.Stopped):
        fetch(plane, tmp_path / "t", progress=pieces.append, stopping=lambda: len(pieces) > 3)
    assert os.path.getsize(tmp_path / "t.part") > 0
    fetch(plane, tmp_path / "t")
    assert (tmp_path / "t").read_bytes() == DATA


@pytest.mark.parametrize("place", ["fetch-before-rename", "fetch-after-rename", "in the middle"])
def test_a_kill_at_any_moment_is_repaired_by_the_next_fetch(plane, tmp_path, place):
    script = textwrap.dedent(f"""
        import os, signal
        from llmgw.system import download
        from llmgw.system.http_client import HttpClient
        client = HttpClient({plane.url!r})
        def progress(done):
            if {place!r} == "in the middle" and done > {CHUNK_BYTES + 300000}:
                os.kill(os.getpid(), signal.SIGKILL)
        download.fetch(lambda at: client.stream("GET", "/v1/blobs/{SHA}", headers={{"Range": f"bytes={{at}}-"}}),
                       {str(tmp_path / 't')!r}, sha256={SHA!r}, size={len(DATA)}, chunks={CHUNKS!r},
                       progress=progress)
        """)
    done = subprocess.run([sys.executable, "-c", script], timeout=60, check=False,
                          env={**os.environ, "LLMGW_FAILPOINT": f"{place}:kill"})
    assert done.returncode == -9
    target = pathlib.Path(tmp_path / "t")
    assert target.exists() is (place == "fetch-after-rename")
    if target.exists():
        assert target.read_bytes() == DATA
    else:
        fetch(plane, target)
        assert target.read_bytes() == DATA
        assert plane.ranges[1:] in ([], [plane.ranges[-1]])     # at most the missing rest came again


def test_damage_is_told_in_words(tmp_path):
    path = tmp_path / "t"
    assert "is gone" in download.damage(str(path), 3, (), SHA)
    path.write_bytes(b"abc")
    assert download.damage(str(path), 3, (), hashlib.sha256(b"abc").hexdigest()) == ""
    assert "has 3 bytes, not 4" in download.damage(str(path), 4, (), SHA)
    assert "has changed" in download.damage(str(path), 3, (), SHA)
