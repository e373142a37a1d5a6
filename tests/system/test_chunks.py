"""Files of known chunks from several sources: one wrong byte costs one chunk, a kill costs next to nothing."""
from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
import textwrap

import pytest

from llmgw.domain.errors import DigestMismatch, DiskFull, DownloadFailed, LlmgwError, Unreachable
from llmgw.domain.model import CHUNK_BYTES
from llmgw.system import chunk_file, chunks
from llmgw.system.chunks import Transfer
from llmgw.system.download import Stopped
from llmgw.system.http_client import HttpClient
from tests.fakes.control_plane import ControlPlane

COUNT = 6
DATA = random.Random(5).randbytes((COUNT - 1) * CHUNK_BYTES + 12345)
SHA = hashlib.sha256(DATA).hexdigest()
CHUNKS = tuple(hashlib.sha256(DATA[at:at + CHUNK_BYTES]).hexdigest() for at in range(0, len(DATA), CHUNK_BYTES))


class Served:
    """A supplier over a real connection."""

    def __init__(self, plane, name="the control plane", spare=False):
        self.plane, self.name, self.spare = plane, name, spare
        self._client = HttpClient(plane.url)

    def open(self, first, end):
        return self._client.stream("GET", f"/v1/blobs/{SHA}", headers={"Range": f"bytes={first}-{end - 1}"}, timeout=10)

    def look(self):
        return "1" * COUNT

    def dropped(self, lied):
        self.was_dropped, self.lied = True, lied


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("source") / "source"
    path.write_bytes(DATA)
    return path


@pytest.fixture
def plane(source):
    served = ControlPlane()
    served.blobs[SHA] = source
    yield served
    served.close()


@pytest.fixture
def other(source):
    served = ControlPlane()
    served.blobs[SHA] = source
    yield served
    served.close()


def bring(suppliers, folder, **more):
    return chunks.bring(lambda: suppliers, str(folder / "t"), **{"size": len(DATA), "chunks": CHUNKS,
                                                         "partial": str(folder / "t.part"), **more})


def spoil_once(at):
    times = []

    def spoil(name, data):
        times.append(1)
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1:] if len(times) == 1 else data
    return spoil


def asked_bytes(plane):
    """How much was asked for, as far as requests tell."""
    total = 0
    for one in plane.ranges:
        first, last = one.partition("bytes=")[2].split("-")
        total += int(last) - int(first) + 1
    return total


@pytest.mark.parametrize("streams", [1, 4])
def test_a_file_comes_whole_and_progress_ends_at_its_size(plane, tmp_path, streams):
    seen = []
    assert bring([Served(plane)], tmp_path, streams=streams, progress=seen.append) == chunks.Brought(
        by={"the control plane": len(DATA)})
    assert (tmp_path / "t").read_bytes() == DATA and not (tmp_path / "t.part").exists()
    assert max(seen) == len(DATA) and asked_bytes(plane) == len(DATA)
    assert len(plane.ranges) >= streams


def test_an_empty_file_is_a_file(plane, tmp_path):
    assert bring([Served(plane)], tmp_path, size=0, chunks=()) == chunks.Brought()
    assert (tmp_path / "t").read_bytes() == b"" and plane.ranges == []
    with pytest.raises(DownloadFailed, match="no file of"):
        bring([Served(plane)], tmp_path, size=5, chunks=())


def test_one_flipped_byte_costs_one_chunk(plane, tmp_path):
    plane.spoil = spoil_once(2 * CHUNK_BYTES + 77)
    (bad,) = bring([Served(plane)], tmp_path, streams=1).bad
    assert (tmp_path / "t").read_bytes() == DATA
    assert (bad.index, bad.supplier) == (2, "the control plane")
    again = [one for one in plane.ranges if one.partition("bytes=")[2].startswith(f"{2 * CHUNK_BYTES}-")]
    assert len(again) == 1 and len(plane.ranges) == 2       # from the bad chunk on: what came before was kept


def test_a_source_that_always_lies_is_refused(plane, tmp_path):
    plane.spoil = lambda name, data: data[:100] + bytes([data[100] ^ 1]) + data[101:]
    with pytest.raises(DigestMismatch, match=f"bytes 0 to {CHUNK_BYTES - 1}, fetched 3 times"):
        bring([Served(plane)], tmp_path)
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("fault", ["lies", "cuts", "absent", "no ranges"])
def test_a_peer_can_do_no_harm(plane, other, tmp_path, fault):
    peer = Served(other, "node-b", spare=True)
    if fault == "lies":
        other.spoil = lambda name, data: b"\0" * len(data)
    elif fault == "cuts":
        other.cut_after = 1 << 20
    elif fault == "absent":
        other.blobs.clear()
    else:
        other.ranged = False
    bad = bring([Served(plane), peer], tmp_path, streams=1).bad
    assert (tmp_path / "t").read_bytes() == DATA
    assert {one.supplier for one in bad} <= {"node-b"}


def test_a_peer_takes_its_share(plane, other, tmp_path):
    bring([Served(plane), Served(other, "node-b", spare=True)], tmp_path)
    assert (tmp_path / "t").read_bytes() == DATA
    assert plane.ranges and other.ranges and asked_bytes(plane) + asked_bytes(other) == len(DATA)


def test_a_peer_alone_is_enough(other, tmp_path):
    class Gone:
        name, spare = "the control plane", True

        def open(self, first, end):
            raise Unreachable("gone")

        def look(self):
            return "1" * COUNT

        def dropped(self, lied):
            pass
    bring([Gone(), Served(other, "node-b", spare=True)], tmp_path)
    assert (tmp_path / "t").read_bytes() == DATA
    with pytest.raises(DownloadFailed, match="nobody had the rest"):
        bring([Gone()], tmp_path / "x")


class Failing:
    """A source that has ended, until ``heals`` requests were made."""

    def __init__(self, plane, heals=1 << 30):
        self._source, self._heals, self.asked = Served(plane), heals, 0
        self.name, self.spare = self._source.name, False

    def open(self, first, end):
        self.asked += 1
        if self.asked <= self._heals:
            raise Unreachable("connection refused")
        return self._source.open(first, end)


def test_peers_that_have_the_file_go_on_without_the_source(plane, other, tmp_path, caplog):
    source = Failing(plane)
    brought = bring([source, Served(other, "node-b", spare=True)], tmp_path)
    assert (tmp_path / "t").read_bytes() == DATA and brought.by == {"node-b": len(DATA)}
    assert caplog.messages == ["nothing comes from the control plane, other nodes go on: connection refused"]


@pytest.mark.parametrize("said", ["010100", "000000", ""])
def test_what_peers_do_not_have_ends_with_the_failure_of_the_source_and_keeps_what_came(plane, other, tmp_path, said):
    peer = Served(other, "node-b", spare=True)
    peer.look = lambda: said
    with pytest.raises(Unreachable, match="^connection refused$"):
        bring([Failing(plane), peer], tmp_path)
    assert bring([Served(plane)], tmp_path).by == {"the control plane": len(DATA) - said.count("1") * CHUNK_BYTES}
    assert (tmp_path / "t").read_bytes() == DATA


def test_a_source_that_failed_is_asked_again_while_peers_go_on(plane, other, tmp_path):
    source, peer = Failing(plane, heals=3), Served(other, "node-b", spare=True)
    peer.look = lambda: "222222" if source.asked <= 3 else "011111"         # what it gets takes its time
    brought = bring([source, peer], tmp_path, rest_seconds=0.1)
    assert (tmp_path / "t").read_bytes() == DATA and sorted(brought.by) == ["node-b", "the control plane"]


def test_a_chunk_that_is_damaged_at_the_source_comes_from_a_peer(plane, other, tmp_path):
    plane.spoil = lambda name, data: b"\0" * len(data)
    brought = bring([Served(plane), Served(other, "node-b", spare=True)], tmp_path)
    assert (tmp_path / "t").read_bytes() == DATA and brought.by == {"node-b": len(DATA)}
    assert {one.supplier for one in brought.bad} == {"the control plane"} and len(brought.bad) < COUNT


@pytest.mark.parametrize("cut", [1, 300_000, CHUNK_BYTES - 1, CHUNK_BYTES + (1 << 20)])
def test_a_cut_transfer_goes_on_where_it_ended(plane, tmp_path, cut):
    plane.cut_after = cut
    with pytest.raises(LlmgwError):
        bring([Served(plane)], tmp_path, streams=1)
    before = len(plane.ranges)
    plane.cut_after = None
    bring([Served(plane)], tmp_path, streams=1)
    assert (tmp_path / "t").read_bytes() == DATA
    first = int(plane.ranges[before].partition("bytes=")[2].split("-")[0])
    assert first >= cut // CHUNK_BYTES * CHUNK_BYTES and first >= cut - 4096


def test_what_went_bad_in_a_partial_file_is_fetched_again_and_nothing_else(plane, tmp_path):
    spoiled = bytearray(DATA)
    spoiled[3 * CHUNK_BYTES + 5] ^= 1
    (tmp_path / "t.part").write_bytes(spoiled)
    bring([Served(plane)], tmp_path)
    assert (tmp_path / "t").read_bytes() == DATA and asked_bytes(plane) == CHUNK_BYTES


def test_holes_of_a_partial_file_are_not_taken_for_data(plane, tmp_path):
    with open(tmp_path / "t.part", "wb") as partial:
        partial.seek(4 * CHUNK_BYTES)
        partial.write(DATA[4 * CHUNK_BYTES:])
    bring([Served(plane)], tmp_path)
    assert (tmp_path / "t").read_bytes() == DATA and asked_bytes(plane) == 4 * CHUNK_BYTES


def test_a_repair_writes_one_chunk_in_place(plane, tmp_path):
    spoiled = bytearray(DATA)
    spoiled[CHUNK_BYTES + 5] ^= 1
    target = tmp_path / "t"
    target.write_bytes(spoiled)
    inode = target.stat().st_ino
    read = []
    bad = chunk_file.wrong(str(target), len(DATA), CHUNKS, pause=read.append)
    assert bad == [1] and sum(read) == len(DATA)
    Transfer(lambda: [Served(plane)], str(target), len(DATA), CHUNKS).run(only=bad)
    assert target.read_bytes() == DATA and target.stat().st_ino == inode and asked_bytes(plane) == CHUNK_BYTES
    assert chunk_file.wrong(str(target), len(DATA), CHUNKS) == []
    assert len(chunk_file.wrong(str(target), len(DATA) - 1, CHUNKS)) == COUNT == len(chunk_file.wrong("/nowhere", 1, CHUNKS))


def test_a_disk_without_room_is_said_before_anything_is_fetched(plane, tmp_path):
    with pytest.raises(DiskFull, match="are needed"):
        bring([Served(plane)], tmp_path, reserve_bytes=1 << 60)
    assert plane.ranges == []


def test_stopping_keeps_what_has_come(plane, tmp_path):
    seen = []
    with pytest.raises(Stopped):
        bring([Served(plane)], tmp_path, streams=1, progress=seen.append, stopping=lambda: len(seen) > 2)
    asked = len(plane.ranges)
    bring([Served(plane)], tmp_path)
    assert (tmp_path / "t").read_bytes() == DATA
    assert all(int(one.partition("bytes=")[2].split("-")[0]) >= 2 * CHUNK_BYTES for one in plane.ranges[asked:])


def test_a_link_in_place_of_a_partial_file_is_not_followed(plane, tmp_path):
    (tmp_path / "victim").write_bytes(b"x")
    (tmp_path / "t.part").symlink_to(tmp_path / "victim")
    with pytest.raises(LlmgwError, match="cannot open"):
        bring([Served(plane)], tmp_path)
    assert (tmp_path / "victim").read_bytes() == b"x"


@pytest.mark.parametrize("place, kept", [("fetch-in-the-middle:kill@3", 2), ("fetch-before-rename:kill", COUNT),
                                         ("fetch-after-rename:kill", COUNT)])
def test_a_kill_at_any_moment_is_repaired_by_the_next_fetch(plane, tmp_path, place, kept):
    script = textwrap.dedent(f"""
        from llmgw.system import chunks
        from llmgw.system.http_client import HttpClient
        client = HttpClient({plane.url!r})
        class Supplier:
            name, spare = "x", False
            def open(self, first, end):
                return client.stream("GET", "/v1/blobs/{SHA}", headers={{"Range": f"bytes={{first}}-{{end - 1}}"}})
        chunks.bring(lambda: [Supplier()], {str(tmp_path / 't')!r}, size={len(DATA)}, chunks={CHUNKS!r},
                     partial={str(tmp_path / 't.part')!r}, streams=1)
        """)
    done = subprocess.run([sys.executable, "-c", script], timeout=120, check=False,
                          env={**os.environ, "LLMGW_FAILPOINT": place})
    assert done.returncode == -9
    if not (tmp_path / "t").exists():
        asked = len(plane.ranges)
        bring([Served(plane)], tmp_path, streams=1)
        firsts = [int(one.partition("bytes=")[2].split("-")[0]) for one in plane.ranges[asked:]]
        assert all(first >= min(kept * CHUNK_BYTES, len(DATA)) for first in firsts)
    assert (tmp_path / "t").read_bytes() == DATA
