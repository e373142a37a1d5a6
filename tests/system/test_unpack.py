"""The archive reader against hostile archives: nothing outside its folder changes, ever."""
from __future__ import annotations

import gzip
import hashlib
import io
import os
import pathlib
import random
import tarfile

import pytest

from llmgw.domain.errors import LlmgwError, UnsafeArchive
from llmgw.system.unpack import budget, unpack


def entry(name, data=b"", kind=tarfile.REGTYPE, link="", mode=0o644, **more):
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode, info.size = kind, link, mode, len(data)
    for key, value in more.items():
        setattr(info, key, value)
    return info, data


def archive(tmp_path, entries, format=tarfile.GNU_FORMAT):
    path = tmp_path / "a.tar.gz"
    with tarfile.open(path, "w:gz", format=format) as tar:
        for info, data in entries:
            tar.addfile(info, io.BytesIO(data))
    return str(path)


def symlink(name, target):
    return entry(name, kind=tarfile.SYMTYPE, link=target)


def hardlink(name, target):
    return entry(name, kind=tarfile.LNKTYPE, link=target)


def snapshot(folder):
    """A digest of everything below a folder: names, kinds, contents."""
    digest = hashlib.sha256()
    for at, folders, names in sorted(os.walk(folder)):
        for name in sorted(folders + names):
            path = os.path.join(at, name)
            digest.update(f"{path} {os.lstat(path).st_mode} ".encode())
            if os.path.islink(path):
                digest.update(os.readlink(path).encode())
            elif os.path.isfile(path):
                with open(path, "rb") as source:
                    digest.update(source.read())
    return digest.hexdigest()


@pytest.fixture
def outside(tmp_path):
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "victim").write_text("as it was")
    (folder / "inside").mkdir()
    return folder


HOSTILE = {
    "climbs": [entry("../victim", b"x")],
    "climbs behind a name": [entry("a/../../victim", b"x")],
    "absolute": [entry("/tmp/llmgw-test-victim", b"x")],
    "absolute link": [symlink("l", "/etc"), entry("l/x", b"x")],
    "climbing link": [symlink("l", "../outside"), entry("l/victim", b"x")],
    "link that is used as a folder": [symlink("l", "."), entry("l/x", b"x")],
    "file where a link is": [symlink("l", "x"), entry("l", b"x")],
    "link to a link that climbs": [entry("a/b/f", b""), symlink("a/b/up", "../.."), symlink("l", "a/b/up/../..")],
    "CVE-2025-4517 shape": [symlink("d/" + "x" * 200, ".."), symlink("l", "d/" + "x" * 200 + "/../../victim")],
    "hard link outside": [hardlink("l", "../victim")],
    "hard link to an absolute path": [hardlink("l", "/etc/passwd")],
    "hard link to what is not there": [hardlink("l", "later"), entry("later", b"x")],
    "hard link through a link": [symlink("l", "x"), hardlink("h", "l")],
    "device": [entry("d", kind=tarfile.CHRTYPE, devmajor=1, devminor=3)],
    "block device": [entry("d", kind=tarfile.BLKTYPE)],
    "pipe": [entry("p", kind=tarfile.FIFOTYPE)],
    "unknown kind": [entry("u", kind=b"Z")],
    "name twice": [entry("x", b"1"), entry("x", b"2")],
    "file as folder": [entry("x", b"1"), entry("x/y", b"2")],
    "folder of itself": [entry("./", b"1")],
    "holes": [entry("s", b"", kind=tarfile.GNUTYPE_SPARSE)],
}


@pytest.mark.parametrize("shape", HOSTILE, ids=str)
@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT], ids=["gnu", "pax"])
def test_a_hostile_archive_is_refused_and_nothing_outside_changes(tmp_path, outside, shape, format):
    path = archive(tmp_path, HOSTILE[shape], format)
    inside = outside / "inside"
    before = hashlib.sha256((outside / "victim").read_bytes()).hexdigest()
    with pytest.raises(UnsafeArchive) as caught:
        unpack(path, str(inside), max_bytes=1 << 20)
    assert len(caught.value.message) <= 500
    assert hashlib.sha256((outside / "victim").read_bytes()).hexdigest() == before
    assert sorted(os.listdir(outside)) == ["inside", "victim"]
    assert not os.path.exists("/tmp/llmgw-test-victim")


def test_a_release_with_its_library_links_comes_out_whole(tmp_path):
    path = archive(tmp_path, [
        entry("llama-b1", kind=tarfile.DIRTYPE, mode=0o755), symlink("llama-b1/libx.so", "libx.so.0"),
        symlink("llama-b1/libx.so.0", "libx.so.0.9"), entry("llama-b1/libx.so.0.9", b"library"),
        entry("./llama-b1/llama-server", b"program", mode=0o4755), hardlink("llama-b1/again", "llama-b1/llama-server"),
        entry("llama-b1/deep/er/LICENSE", b"text"), symlink("llama-b1/deep/er/lib", "../../libx.so.0.9")])
    unpack(path, str(tmp_path / "out"), max_bytes=1 << 20)
    top = tmp_path / "out" / "llama-b1"
    assert (top / "libx.so").read_bytes() == b"library" and (top / "deep/er/lib").read_bytes() == b"library"
    assert os.stat(top / "llama-server").st_mode & 0o7777 & ~0o777 == 0      # no setuid
    assert os.access(top / "llama-server", os.X_OK) and not os.access(top / "deep/er/LICENSE", os.X_OK)
    assert os.stat(top / "again").st_ino == os.stat(top / "llama-server").st_ino


def test_a_folder_that_holds_something_already_is_never_overwritten(tmp_path, outside):
    os.symlink(outside, tmp_path / "outside" / "inside" / "l")
    with pytest.raises((UnsafeArchive, LlmgwError)):
        unpack(archive(tmp_path, [entry("l/victim", b"x")]), str(outside / "inside"), max_bytes=1 << 20)
    assert (outside / "victim").read_text() == "as it was"


def test_a_bomb_ends_at_the_budget(tmp_path):
    path = archive(tmp_path, [entry("zeros", bytes(8 << 20))])
    assert os.stat(path).st_size < 100_000
    with pytest.raises(UnsafeArchive, match="unpacks to more than"):
        unpack(path, str(tmp_path / "out"), max_bytes=1 << 20)
    assert budget(10, 1 << 40) == 200 + (64 << 20) and budget(1 << 40, 1000) == 1000


def test_a_header_that_is_a_bomb_ends_early(tmp_path):
    path = archive(tmp_path, [entry("x", b"1", pax_headers={"comment": "A" * (4 << 20)})], tarfile.PAX_FORMAT)
    with pytest.raises(UnsafeArchive):
        unpack(path, str(tmp_path / "out"), max_bytes=1 << 30)


def test_a_million_members_are_refused(tmp_path):
    path = tmp_path / "a.tar.gz"
    block = entry("d", kind=tarfile.DIRTYPE)[0].tobuf()
    with gzip.open(path, "wb", compresslevel=1) as out:
        for _ in range(100):
            out.write(block * 1000)
    with pytest.raises(UnsafeArchive, match="more than 20000 members"):
        unpack(str(path), str(tmp_path / "out"), max_bytes=1 << 40)


@pytest.mark.parametrize("damage", ["cut", "garbage", "empty", "chain of headers"])
def test_what_is_no_whole_archive_is_refused_in_words(tmp_path, damage):
    path = archive(tmp_path, [entry("x", random.Random(1).randbytes(100_000)), entry("y", b"2")])
    data = pathlib.Path(path).read_bytes()
    if damage == "cut":
        data = data[:len(data) // 2]
    elif damage == "garbage":
        data = b"\x00" * 500
    elif damage == "empty":
        data = b""
    else:
        info = tarfile.TarInfo("x")
        info.type, info.size = tarfile.XHDTYPE, 0
        data = gzip.compress(info.tobuf() * 5000)
    pathlib.Path(path).write_bytes(data)
    with pytest.raises(UnsafeArchive, match="not a whole"):
        unpack(path, str(tmp_path / "out"), max_bytes=1 << 20)


def test_flipped_bytes_never_write_outside(tmp_path, outside):
    made = archive(tmp_path, [entry("top/x", b"1" * 3000), symlink("top/l", "x"), hardlink("top/h", "top/x")])
    raw = gzip.decompress(pathlib.Path(made).read_bytes())
    dice = random.Random(7)
    before = (outside / "victim").read_text()
    for number in range(150):
        data = bytearray(raw)
        for _ in range(dice.randint(1, 6)):
            data[dice.randrange(len(data))] = dice.randrange(256)
        path = tmp_path / "flipped.tar.gz"
        path.write_bytes(gzip.compress(bytes(data), 1))
        try:
            unpack(str(path), str(outside / "inside" / str(number)), max_bytes=1 << 20)
        except LlmgwError:
            pass
    assert (outside / "victim").read_text() == before
    assert sorted(os.listdir(outside)) == ["inside", "victim"]
