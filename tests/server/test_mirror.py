"""The mirror: only verified bytes under a digest's name, whatever is interrupted."""
from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from llmgw.domain.errors import Conflict, DigestMismatch, NotFound, ParseError, StorageError
from llmgw.domain.model import CHUNK_BYTES, Weights, WeightsFile
from llmgw.server import linking
from llmgw.server.mirror import Mirror
from llmgw.server.mirror_care import Care, Leftover
from llmgw.server.store_sqlite import SqliteStore
from llmgw.system.clock import Clock
from tests.fakes import gguf_file

DATA = bytes(range(256)) * 40
DIGEST = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def store(tmp_path):
    store = SqliteStore(str(tmp_path))
    yield store
    store.close()


@pytest.fixture
def mirror(tmp_path, store):
    return Mirror(str(tmp_path / "mirror"), store, Clock())


def again(mirror, store):
    return Mirror(mirror.folder, store, Clock())


def bring(mirror, data=DATA):
    digest = hashlib.sha256(data).hexdigest()
    mirror.append(digest, mirror.received(digest)[0], data)
    mirror.finish(digest, len(data))
    return digest


def manifest(name, *files):
    return Weights(name, "", tuple(WeightsFile(file, len(data), hashlib.sha256(data).hexdigest())
                                   for file, data in files))


def test_an_upload_in_pieces_ends_as_a_blob_of_its_owner_only(mirror):
    assert mirror.received(DIGEST) == (0, False)
    assert mirror.append(DIGEST, 0, DATA[:1000]) == 1000
    assert mirror.append(DIGEST, 1000, DATA[1000:]) == len(DATA)
    assert not mirror.has(DIGEST)
    mirror.finish(DIGEST, len(DATA))
    assert mirror.received(DIGEST) == (len(DATA), True)
    with mirror.open(DIGEST) as blob:
        assert blob.read() == DATA
    for folder, _, names in os.walk(mirror.folder):
        assert os.stat(folder).st_mode & 0o077 == 0
        assert all(os.stat(os.path.join(folder, name)).st_mode & 0o077 == 0 for name in names)
    mirror.finish(DIGEST, len(DATA))                 # once more changes nothing
    with pytest.raises(Conflict, match="complete already"):
        mirror.append(DIGEST, 0, b"x")


def test_a_piece_out_of_place_is_refused_and_told_where_to_go_on(mirror):
    mirror.append(DIGEST, 0, DATA[:10])
    for offset in (0, 5, 11, 1 << 40):
        with pytest.raises(Conflict) as caught:
            mirror.append(DIGEST, offset, b"x")
        assert caught.value.hint == "go on at offset 10"
    with pytest.raises(Conflict, match=f"10 of {len(DATA)} bytes"):
        mirror.finish(DIGEST, len(DATA))


def test_an_upload_goes_on_after_a_restart(mirror, store):
    mirror.append(DIGEST, 0, DATA[:3000])
    other = again(mirror, store)
    assert other.received(DIGEST) == (3000, False)
    other.append(DIGEST, 3000, DATA[3000:])
    other.finish(DIGEST, len(DATA))
    assert other.has(DIGEST)


def test_wrong_bytes_are_thrown_away_and_never_get_the_name(mirror):
    mirror.append(DIGEST, 0, b"x" * len(DATA))
    with pytest.raises(DigestMismatch):
        mirror.finish(DIGEST, len(DATA))
    assert mirror.received(DIGEST) == (0, False)
    bring(mirror)
    assert mirror.has(DIGEST)


def test_an_upload_that_was_swept_away_is_not_counted_in_the_next_one(mirror):
    """The old beginning was right and the new one is not: a hash that went on from the old one was the blob's."""
    half = len(DATA) // 2
    mirror.append(DIGEST, 0, DATA[:half])
    Care(mirror).remove([Leftover(f"uploads/{DIGEST}.part", half, "upload")])
    mirror.append(DIGEST, 0, b"x" * half)
    mirror.append(DIGEST, half, DATA[half:])
    with pytest.raises(DigestMismatch):
        mirror.finish(DIGEST, len(DATA))
    assert not mirror.has(DIGEST)
    bring(mirror)


def test_uploads_of_one_digest_at_once_write_one_after_the_other(mirror):
    """Each thread begins at byte 0 with what is not the blob: a file longer than one piece had two writers."""
    wrong, sizes = b"x" * 1000, []

    def upload():
        for _ in range(100):
            try:
                sizes.append(mirror.append(DIGEST, 0, wrong))
                mirror.finish(DIGEST, len(wrong))
            except Conflict as refused:
                sizes.extend(int(text) for text in re.findall("([0-9]+) (?:bytes|of [0-9]+ bytes) are here", str(refused)))
            except DigestMismatch:
                pass

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(upload) for _ in range(8)]:
            done.result()
    assert set(sizes) <= {0, len(wrong)}
    if mirror.received(DIGEST)[0]:
        with pytest.raises(DigestMismatch):
            mirror.finish(DIGEST, len(wrong))
    bring(mirror)
    assert mirror.has(DIGEST)


def test_an_empty_file_is_a_blob_too(mirror):
    empty = hashlib.sha256(b"").hexdigest()
    mirror.finish(empty, 0)
    assert mirror.received(empty) == (0, True)


@pytest.mark.parametrize("digest", ["", "x", "../" + "0" * 61, "0" * 65, "A" * 64, "sha256:" + "0" * 63, "0" * 63 + "\n"])
def test_only_digests_become_paths(mirror, digest):
    for call in (mirror.received, mirror.open, lambda text: mirror.append(text, 0, b"x"),
                 lambda text: mirror.finish(text, 1)):
        with pytest.raises(ParseError):
            call(digest)


CHILD = """
import sys
from llmgw.server.mirror import Mirror
from llmgw.server.store_sqlite import SqliteStore
from llmgw.system.clock import Clock
store = SqliteStore(sys.argv[1])
mirror = Mirror(sys.argv[1] + "/mirror", store, Clock())
data = bytes(range(256)) * 40
at = mirror.received(sys.argv[2])[0]
while at < len(data):
    at = mirror.append(sys.argv[2], at, data[at:at + 4000])
mirror.finish(sys.argv[2], len(data))
"""


@pytest.mark.parametrize("place", ["upload-after-write:kill@1", "upload-after-write:kill@2", "blob-before-rename:kill@1"])
def test_a_kill_anywhere_leaves_an_upload_that_goes_on(tmp_path, place):
    killed = subprocess.run([sys.executable, "-c", CHILD, str(tmp_path), DIGEST], timeout=60,
                            env={**os.environ, "LLMGW_FAILPOINT": place})
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "mirror" / "blobs" / "sha256" / DIGEST).exists()
    assert subprocess.run([sys.executable, "-c", CHILD, str(tmp_path), DIGEST], timeout=60).returncode == 0
    assert (tmp_path / "mirror" / "blobs" / "sha256" / DIGEST).read_bytes() == DATA


def test_a_full_disk_keeps_what_was_there_and_goes_on_later(tmp_path):
    code = CHILD.replace("while at", "try:\n    mirror.append(sys.argv[2], 0, data[:4000]); at = 4000\n"
                         "    mirror.append(sys.argv[2], at, data[at:at + 100])\nexcept Exception as error:\n"
                         "    print(type(error).__name__, mirror.received(sys.argv[2])[0])\nwhile at")
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path), DIGEST], timeout=60, stdout=subprocess.PIPE,
                          text=True, env={**os.environ, "LLMGW_FAILPOINT": "upload-after-write:enospc@2"})
    assert (done.returncode, done.stdout.split()) == (0, ["DiskFull", "4000"])
    assert (tmp_path / "mirror" / "blobs" / "sha256" / DIGEST).read_bytes() == DATA


@pytest.mark.parametrize("short", (1, 100, 5000))
def test_a_piece_of_which_only_a_part_fits_leaves_nothing_of_it(tmp_path, short):
    code = CHILD.replace("while at", (
        "import resource\n"
        "at = mirror.append(sys.argv[2], at, data[:1000])\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, (len(data) - {short}, resource.RLIM_INFINITY))\n"
        "try:\n    mirror.append(sys.argv[2], at, data[at:])\nexcept Exception as error:\n"
        "    print(type(error).__name__, mirror.received(sys.argv[2])[0])\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\nwhile at"))
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path), DIGEST], timeout=60, stdout=subprocess.PIPE,
                          text=True)
    assert (done.returncode, done.stdout.split()) == (0, ["StorageError", "1000"])
    assert (tmp_path / "mirror" / "blobs" / "sha256" / DIGEST).read_bytes() == DATA


def test_a_manifest_is_kept_with_what_the_server_itself_read(mirror):
    bring(mirror)
    given = manifest("m", ("a.bin", DATA))
    given = replace(given, fingerprint="lies", files=(replace(given.files[0], chunks=("0" * 64,)),))
    made = mirror.register_model(given)
    assert len(made.fingerprint) == 64
    assert made.files[0].chunks == (hashlib.sha256(DATA).hexdigest(),)
    assert mirror.model("m") == made and mirror.models() == [made]
    assert mirror.register_model(manifest("m2", ("a.bin", DATA))).fingerprint == made.fingerprint
    assert mirror.register_model(manifest("m3", ("b.bin", DATA))).fingerprint != made.fingerprint


def test_chunks_are_eight_mebibytes(mirror):
    data = os.urandom(CHUNK_BYTES + 5)
    bring(mirror, data[:5])
    digest = hashlib.sha256(data).hexdigest()
    mirror.append(digest, 0, data[:CHUNK_BYTES])
    mirror.append(digest, CHUNK_BYTES, data[CHUNK_BYTES:])
    mirror.finish(digest, len(data))
    chunks = mirror.register_model(manifest("big", ("a.bin", data))).files[0].chunks
    assert chunks == (hashlib.sha256(data[:CHUNK_BYTES]).hexdigest(), hashlib.sha256(data[CHUNK_BYTES:]).hexdigest())


@pytest.mark.parametrize("name, files, error", [
    ("m", (), ParseError), ("-m", (("a", DATA),), ParseError), ("m", (("../a", DATA),), ParseError),
    ("m", (("d/a", DATA),), ParseError), ("m", (("-a", DATA),), ParseError), ("m", (("a", DATA), ("a", DATA)), ParseError),
    ("m", (("a", b"not uploaded"),), Conflict)])
def test_a_manifest_that_cannot_be_right_is_refused(mirror, name, files, error):
    bring(mirror)
    with pytest.raises(error):
        mirror.register_model(manifest(name, *files))
    assert mirror.models() == []


def test_a_manifest_with_a_wrong_size_is_refused(mirror):
    bring(mirror)
    given = manifest("m", ("a", DATA))
    with pytest.raises(ParseError, match="but the blob has"):
        mirror.register_model(replace(given, files=(replace(given.files[0], size_bytes=5),)))


def test_removing_a_model_removes_only_blobs_that_nobody_else_needs(mirror):
    mine, shared = bring(mirror, b"mine"), bring(mirror)
    used = mirror.register_model(manifest("a", ("x", DATA), ("y", b"mine")))
    mirror.register_model(manifest("b", ("x", DATA)))
    mirror.remove_model("a", [used])
    assert mirror.has(mine) and mirror.has(shared) and mirror.model("a") is None
    mirror.register_model(used)
    mirror.remove_model("a", [])
    assert not mirror.has(mine) and mirror.has(shared)
    with pytest.raises(NotFound):
        mirror.remove_model("a", [])


def test_an_archive_is_registered_under_its_release(mirror):
    digest = bring(mirror)
    made = mirror.register_archive("llama.cpp", "b10991", "llama.tar.gz", f"sha256:{digest}", len(DATA))
    assert made.asset.sha256 == digest and mirror.archives() == [made]
    for engine, version, name, size in (("nothing", "1", "a", len(DATA)), ("llama.cpp", "../x", "a", len(DATA)),
                                        ("llama.cpp", "b1", "x/../y", len(DATA)), ("llama.cpp", "b1", "a", 3)):
        with pytest.raises(ParseError):
            mirror.register_archive(engine, version, name, digest, size)
    with pytest.raises(Conflict):
        mirror.register_archive("llama.cpp", "b1", "a", "0" * 64, 1)
    mirror.remove_archive("llama.cpp", "b10991", "llama.tar.gz")
    assert not mirror.has(digest)


def test_a_file_of_this_machine_is_copied_in_and_a_truncated_gguf_is_refused(mirror, tmp_path):
    source = tmp_path / "model.bin"
    source.write_bytes(DATA)
    made = mirror.import_file(str(source), "m", f"file:{source}")
    assert made.files[0].name == "model.bin" and mirror.has(made.files[0].sha256) and source.exists()
    whole = gguf_file.small_model()
    (tmp_path / "cut.gguf").write_bytes(whole[:len(whole) // 2])
    with pytest.raises(ParseError):
        mirror.import_file(str(tmp_path / "cut.gguf"), "m", "file:cut")


def test_a_file_is_linked_instead_of_copied_and_only_when_it_is_what_it_should_be(mirror, tmp_path):
    source = tmp_path / "model.bin"
    source.write_bytes(DATA)
    assert linking.link(mirror, str(source), DIGEST) == len(DATA) == linking.link(mirror, str(source), DIGEST)
    with mirror.open(DIGEST) as blob:
        assert blob.read() == DATA
    assert source.read_bytes() == DATA
    with pytest.raises(DigestMismatch):
        linking.link(mirror, str(source), "0" * 64)
    for path, error in (("model.bin", ParseError), (str(tmp_path), ParseError), (str(tmp_path / "none"), NotFound)):
        with pytest.raises(error):
            linking.link(mirror, path, "1" * 64)
    assert os.listdir(os.path.join(mirror.folder, "uploads")) == []


def test_a_model_whose_blob_goes_while_it_is_read_is_not_kept(mirror, store):
    bring(mirror)
    mirror.register_model(manifest("old", ("a", DATA)))
    complete = mirror.complete

    def read_while_another_is_removed(given):
        made = complete(given)
        mirror.remove_model("old", ())
        return made

    mirror.complete = read_while_another_is_removed
    with pytest.raises(Conflict, match="not in the mirror any more"):
        mirror.register_model(manifest("new", ("a", DATA)))
    assert mirror.models() == []


def test_a_link_that_a_killed_server_left_is_never_written_to(mirror, tmp_path):
    source = tmp_path / "model.bin"
    source.write_bytes(DATA)
    left = []
    with pytest.raises(KeyboardInterrupt):
        mirror.take(DIGEST, lambda scratch: left.append(scratch) or interrupted(), str(source))
    os.link(source, left[0])              # as if it had been killed while it read the link
    made = mirror.import_file(str(source), "m", f"file:{source}")
    assert source.read_bytes() == DATA and source.stat().st_nlink == 1
    with mirror.open(made.files[0].sha256) as blob:
        assert blob.read() == DATA


def interrupted():
    raise KeyboardInterrupt


def test_one_file_brought_in_from_two_places_at_once_is_brought_in_once(mirror, tmp_path):
    source, copy = tmp_path / "model.bin", tmp_path / "copy.bin"
    source.write_bytes(DATA)
    copy.write_bytes(DATA)
    laying, go, laid = threading.Event(), threading.Event(), []

    def lay(scratch):
        laid.append(scratch)
        laying.set()
        assert go.wait(30)
        os.link(source, scratch)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(mirror.take, DIGEST, lay, str(source))
        assert laying.wait(30)
        second = pool.submit(mirror.import_file, str(copy), "m", "file:copy")
        assert not second.done()
        go.set()
        assert first.result(30) == len(DATA) and second.result(30).files[0].sha256 == DIGEST
    assert source.read_bytes() == DATA and os.path.samefile(source, mirror.path(DIGEST)) and len(laid) == 1


@pytest.mark.skipif(not os.path.isdir("/dev/shm") or os.stat("/dev/shm").st_dev == os.stat("/tmp").st_dev,
                    reason="needs two filesystems")
def test_a_file_of_another_filesystem_is_not_linked(mirror):
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as source:
        source.write(DATA)
        source.flush()
        with pytest.raises(StorageError, match="another filesystem") as caught:
            linking.link(mirror, source.name, DIGEST)
    assert "leave --link out" in caught.value.hint and not mirror.has(DIGEST)


def test_a_damaged_blob_that_is_somebodys_file_is_let_go_and_never_cut(mirror, tmp_path):
    source = tmp_path / "model.bin"
    data = os.urandom(CHUNK_BYTES + 5)
    source.write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    os.link(source, mirror.path(digest))
    mirror.register_model(manifest("m", ("model.bin", data)))
    with open(source, "r+b") as file:
        file.seek(CHUNK_BYTES + 1)
        file.write(bytes([data[CHUNK_BYTES + 1] ^ 1]))
    assert "sha256 is" in Care(mirror).verify(digest, [])
    assert source.stat().st_size == len(data) and not mirror.has(digest)
