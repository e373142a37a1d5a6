"""A disk that fills up in the middle of a write: the kernel writes a part and reports no error for it."""
import hashlib
import os
import subprocess
import sys

import pytest

# The limit on a file's size does the same as a full disk: a part is written, and the next write fails.
BRINGS = """
import hashlib, io, resource, sys, tarfile
from types import SimpleNamespace
from llmgw.domain.errors import LlmgwError
from llmgw.system import chunks, download, unpack

folder, way, data = sys.argv[1], sys.argv[2], bytes(200_000)
digest = hashlib.sha256(data).hexdigest()
tar = io.BytesIO()
with tarfile.open(fileobj=tar, mode="w:gz") as archive:
    member = tarfile.TarInfo("file")
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))
open(folder + "/a.tar.gz", "wb").write(tar.getvalue())


def answer(first=0, end=0):
    body = io.BytesIO(data[first:])
    return SimpleNamespace(status=200, headers={}, read=body.read, read_into=body.readinto, close=lambda: None)


resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), -1))
try:
    if way == "download":
        download.fetch(answer, folder + "/file", sha256=digest, size=len(data))
    elif way == "chunks":
        source = SimpleNamespace(name="it", spare=False, open=answer)
        chunks.bring(lambda: [source], folder + "/file", size=len(data), chunks=[digest], partial=folder + "/partial")
    else:
        unpack.unpack(folder + "/a.tar.gz", folder + "/unpacked", max_bytes=1 << 20)
except LlmgwError as error:
    sys.exit(error.message)
"""


@pytest.mark.parametrize("way", ("download", "chunks", "unpack"))
@pytest.mark.parametrize("room", (199_999, 200_000))
def test_a_file_that_is_not_wholly_written_never_counts_as_here(tmp_path, way, room):
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "PATH": os.environ["PATH"]}
    done = subprocess.run([sys.executable, "-c", BRINGS, str(tmp_path), way, str(room)], env=environment,
                          capture_output=True, text=True, timeout=60)
    path = tmp_path / ("unpacked/file" if way == "unpack" else "file")
    if room == 200_000:
        assert done.returncode == 0, done.stderr
        assert hashlib.sha256(path.read_bytes()).hexdigest() == hashlib.sha256(bytes(200_000)).hexdigest()
    else:
        assert done.returncode == 1 and done.stderr.startswith("cannot ") and "too large" in done.stderr
        assert "Traceback" not in done.stderr
        assert way == "unpack" or not path.exists()
