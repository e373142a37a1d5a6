"""An archive is unpacked while it comes, and nothing is kept of one that does not come whole."""
from __future__ import annotations

import io
import os
import random
import tarfile

import pytest

from llmgw.agent.unpacking import Unpacking
from llmgw.domain.engine import Asset
from llmgw.domain.errors import EngineFailed, UnsafeArchive
from tests.agent.conftest import wait_for

FIRST, SECOND = (random.Random(seed).randbytes(1 << 20) for seed in (1, 2))


@pytest.fixture(scope="module")
def archive():
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as tar:
        for name, content in (("top/first", FIRST), ("top/second", SECOND)):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return data.getvalue()


@pytest.fixture
def unpacking(archive, tmp_path):
    made = Unpacking(Asset("a.tar.gz", len(archive), "0" * 64), str(tmp_path / "scratch" / "0"))
    made.begin(str(tmp_path / "partial"))
    yield made
    made.give_up()


def write(tmp_path, data):
    with open(tmp_path / "partial", "ab") as out:
        out.write(data)
    return os.path.getsize(tmp_path / "partial")


def test_what_has_come_is_unpacked_before_the_rest_is_here(unpacking, archive, tmp_path):
    folder = tmp_path / "scratch" / "0" / "top"
    unpacking.reaches(write(tmp_path, archive[:len(archive) * 3 // 5]))
    wait_for(lambda: (folder / "second").exists(), what="the first file, and the second begun")
    assert (folder / "first").read_bytes() == FIRST
    unpacking.reaches(write(tmp_path, archive[len(archive) * 3 // 5:]))
    os.rename(tmp_path / "partial", tmp_path / "blob")          # as the download does before it says that all is there
    unpacking.is_whole()
    unpacking.finish()
    assert (folder / "second").read_bytes() == SECOND


def test_a_download_that_ends_early_ends_it(unpacking, archive, tmp_path):
    unpacking.reaches(write(tmp_path, archive[:len(archive) // 2]))
    unpacking.give_up()
    with pytest.raises(EngineFailed, match="its download ended"):
        unpacking.finish()


def test_what_is_no_archive_is_told_at_the_end(unpacking, tmp_path):
    unpacking.reaches(write(tmp_path, b"no archive at all" * 100))
    unpacking.is_whole()
    with pytest.raises(UnsafeArchive, match="not a whole .tar.gz archive") as caught:
        unpacking.finish()
    assert "import-engine" in caught.value.hint
