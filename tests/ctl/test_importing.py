"""What goes into the mirror, what is refused, and how an upload goes on after a fault."""
from __future__ import annotations

import hashlib
import zipfile

import pytest

from llmgw.api import paths
from llmgw.api.client import ControlClient
from llmgw.ctl import file_checks, importing
from llmgw.ctl.importing import Source
from llmgw.domain.errors import ApiError, DigestMismatch, LlmgwError, Unreachable
from llmgw.domain.secret import Secret
from tests.fakes import gguf_file, safetensors_file

PIECE = paths.PIECE_BYTES


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(importing, "FIRST_WAIT_SECONDS", 0.01)


class Uploads:
    """A stand-in that takes pieces as the real server does, and fails where it is told to."""

    def __init__(self, fake, data, faults=(), kept=b""):
        self.kept, self.faults, self.finished = kept, list(faults), []
        self.digest = hashlib.sha256(data).hexdigest()
        where = f"/v1/mirror/uploads/{self.digest}"
        self.api = fake({f"GET {where}": lambda path, body: {"received_bytes": len(self.kept), "complete": False},
                         f"PUT {where}": self._put, f"POST {where}/finish": lambda path, body: {"complete": True},
                         "PUT /v1/mirror/engines/llama.cpp/b10991/llama-b10991-bin-ubuntu-x64.tar.gz": {},
                         "PUT /v1/mirror/engines/python/3.12.1%2B20240107/cpython-3.12.1%2B20240107-x86_64-unknown-"
                         "linux-gnu-install_only.tar.gz": {}})
        self.client = ControlClient([self.api.url], Secret("t"))

    def _put(self, path, body):
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "hang up":
            return None
        offset = int(path.partition("offset=")[2])
        if fault == "conflict" or offset != len(self.kept):
            return 409, {"reason": "Conflict", "message": f"expected offset {len(self.kept)}"}
        self.kept += body
        if fault == "kept, then hang up":
            return None
        return {"received_bytes": len(self.kept)}


@pytest.fixture
def big(tmp_path):
    path = tmp_path / "big.bin"
    path.write_bytes(bytes(range(256)) * ((2 * PIECE + 1024) // 256))
    return path


@pytest.mark.parametrize("faults, kept", [
    ([], 0), ([], PIECE), ([], 2 * PIECE + 10), (["hang up", "hang up"], 0), (["", "kept, then hang up"], 0),
    (["conflict"], 0)], ids=["from the start", "after one piece", "inside the last", "hung up on twice",
                             "an answer is lost", "a conflict"])
def test_stand_in_an_upload_goes_on_where_it_stopped(fake, big, faults, kept):
    data = big.read_bytes()
    uploads = Uploads(fake, data, faults, data[:kept])
    importing.upload(uploads.client, Source(str(big), big.name), uploads.digest, len(data))
    assert uploads.kept == data
    assert uploads.api.requests[-1][1].endswith("/finish")


def test_stand_in_an_upload_that_never_gets_through_says_that_it_can_go_on(fake, big):
    uploads = Uploads(fake, big.read_bytes(), ["hang up"] * 100)
    with pytest.raises(Unreachable) as caught:
        importing.upload(uploads.client, Source(str(big), big.name), uploads.digest, big.stat().st_size)
    assert "run the same command again" in caught.value.hint


def test_stand_in_a_refusal_is_not_tried_again(fake, big):
    uploads = Uploads(fake, big.read_bytes())
    where = f"PUT /v1/mirror/uploads/{uploads.digest}"
    uploads.api.answers[where] = (413, {"reason": "TooLarge", "message": "too large"})
    with pytest.raises(ApiError, match="too large"):
        importing.upload(uploads.client, Source(str(big), big.name), uploads.digest, big.stat().st_size)
    assert sum(method == "PUT" for method, *_ in uploads.api.requests) == 1


def test_stand_in_a_file_that_shrinks_meanwhile_is_refused(fake, big):
    uploads = Uploads(fake, b"other")
    with pytest.raises(LlmgwError, match="became shorter"):
        importing.upload(uploads.client, Source(str(big), big.name), uploads.digest, big.stat().st_size + 5)


def test_stand_in_an_archive_is_registered_under_the_version_of_its_name(fake, tmp_path):
    archive = tmp_path / "llama-b10991-bin-ubuntu-x64.tar.gz"
    archive.write_bytes(b"archive")
    uploads = Uploads(fake, b"archive")
    version = importing.import_engine(uploads.client, str(archive), f"sha256:{uploads.digest}", "llama.cpp", "")
    assert version == "b10991"
    with pytest.raises(DigestMismatch):
        importing.import_engine(uploads.client, str(archive), "0" * 64, "llama.cpp", "")
    with pytest.raises(LlmgwError, match="not a sha256"):
        importing.import_engine(uploads.client, str(archive), "123", "llama.cpp", "")


@pytest.mark.parametrize("name, engine", [("archive.tar.gz", "llama.cpp"), ("llama-b10991-bin-x.tar.gz", "vllm"),
                                          ("x", "ollama")])
def test_a_file_name_without_a_version_is_refused(name, engine):
    with pytest.raises(LlmgwError, match="does not tell the version|unknown engine"):
        importing.version_of(name, engine)


def test_pickles_are_refused_by_content_and_by_name(tmp_path):
    with zipfile.ZipFile(tmp_path / "innocent.safetensors", "w") as torch_file:
        torch_file.writestr("archive/data.pkl", b"\x80\x02.")
    (tmp_path / "plain.gguf").write_bytes(b"\x80\x04\x95")
    for name in ("pytorch_model-00001-of-00002.bin", "model.PT", "x.ckpt", "y.pkl"):
        (tmp_path / name).write_bytes(b"whatever")
    for path in tmp_path.iterdir():
        with pytest.raises(LlmgwError, match="pickle"):
            file_checks.refuse_pickle(str(path))


def test_a_file_that_is_no_gguf_says_what_it_starts_with(tmp_path):
    page = tmp_path / "model.gguf"
    page.write_bytes(b"<!DOCTYPE html>")
    with pytest.raises(LlmgwError, match="not a GGUF file: it starts with b'<!DO'") as caught:
        file_checks.format_of([(str(page), page.name)])
    assert "Git LFS" in caught.value.hint


def test_a_truncated_model_is_refused_before_a_byte_is_sent(gemma, tmp_path):
    cut = tmp_path / "cut.gguf"
    with open(gemma, "rb") as whole:
        cut.write_bytes(whole.read(20 << 20))
    with pytest.raises(LlmgwError, match="the file has 20971520"):
        file_checks.format_of([(str(cut), cut.name)])
    assert file_checks.format_of([(str(gemma), "gemma.gguf")]) == "gguf"


def named(sources):
    return [(source.path, source.name) for source in sources]


def test_a_folder_stands_for_its_files_and_tells_the_format(tmp_path):
    for name in ("config.json", ".gitattributes"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "model-00001-of-00001.safetensors").write_bytes(safetensors_file.model())
    (tmp_path / "sub").mkdir()
    sources = importing.gather([str(tmp_path)])
    assert [source.name for source in sources] == ["config.json", "model-00001-of-00001.safetensors"]
    assert file_checks.format_of(named(sources)) == "safetensors"
    assert file_checks.format_of(named(sources[:1])) == "raw"
    with pytest.raises(LlmgwError, match="without their config.json"):
        file_checks.format_of(named(sources[1:]))
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00002-of-00002.safetensors"}}')
    with pytest.raises(LlmgwError, match="names model-00002-of-00002.safetensors, which is not there"):
        file_checks.format_of(named(importing.gather([str(tmp_path)])))
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(LlmgwError, match="not an index"):
        file_checks.format_of(named(importing.gather([str(tmp_path)])))
    (tmp_path / "model-00001-of-00001.safetensors").write_bytes(safetensors_file.model()[:-1])
    with pytest.raises(LlmgwError, match="end at byte"):
        file_checks.format_of(named(importing.gather([str(tmp_path)])))


def split(part, count):
    return gguf_file.build(gguf_file.llama(gguf_file.u32("split.no", part), gguf_file.u32("split.count", count)))


def test_parts_and_a_projector_are_told_apart_by_their_headers(tmp_path):
    projector = gguf_file.build([gguf_file.string("general.architecture", "clip")])
    for name, data in (("a-00001-of-00002.gguf", split(0, 2)), ("a-00002-of-00002.gguf", split(1, 2)),
                       ("mmproj.gguf", projector)):
        (tmp_path / name).write_bytes(data)
    sources = named(importing.gather([str(tmp_path)]))
    assert file_checks.format_of(sources) == "gguf"
    with pytest.raises(LlmgwError, match="one of 2 parts, and 1 GGUF files"):
        file_checks.format_of(sources[1:])
    with pytest.raises(LlmgwError, match="a projector, and no model beside it"):
        file_checks.format_of(sources[2:])
    (tmp_path / "other.gguf").write_bytes(gguf_file.small_model())
    with pytest.raises(LlmgwError, match="3 GGUF files are named"):
        file_checks.format_of(named(importing.gather([str(tmp_path)])))


def test_other_files_want_raw_and_pickles_a_word_of_their_own(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(LlmgwError, match="no GGUF or safetensors file among notes.txt") as caught:
        importing.import_model(None, [str(tmp_path / "notes.txt")], "n")
    assert "--raw" in caught.value.hint
    (tmp_path / "model.pt").write_text("x")
    with pytest.raises(LlmgwError, match="pickle") as caught:
        importing.import_model(None, [str(tmp_path / "model.pt")], "n", raw=True)
    assert "--allow-pickle" in caught.value.hint


@pytest.mark.parametrize("path, name", [("/x/Llama 3.gguf", "Llama-3"), ("/x/a-00001-of-00003.gguf", "a"),
                                        ("/x/folder/", "folder"), ("/x/...", "model"), ("/x/m.safetensors", "m")])
def test_a_model_is_called_like_its_file_when_nobody_says_otherwise(path, name):
    assert importing.name_of(path) == name


@pytest.mark.parametrize("make, sentence", [
    (lambda folder: ["/nowhere/x.gguf"], "there is no file"), (lambda folder: ["/dev/null"], "not a file"),
    (lambda folder: [str(folder / "empty")], "the file is empty"),
    (lambda folder: [str(folder / "a"), str(folder / "a")], "the same name"),
    (lambda folder: [str(folder / "none")], "no files in"),
    (lambda folder: [str(folder / "big-00001-of-00002.gguf")], "big-00002-of-00002.gguf is not named"),
    (lambda folder: [str(folder / "...")], "not allowed")])
def test_what_cannot_be_imported_is_refused_first(tmp_path, make, sentence):
    for name in ("a", "big-00001-of-00002.gguf", "..."):
        (tmp_path / name).write_text("x")
    (tmp_path / "empty").write_text("")
    (tmp_path / "none").mkdir()
    with pytest.raises(LlmgwError, match=sentence):
        importing.gather(make(tmp_path))


def test_an_unusual_file_name_becomes_a_plain_one(tmp_path):
    (tmp_path / "My Model (1).gguf").write_text("x")
    assert [source.name for source in importing.gather([str(tmp_path / "My Model (1).gguf")])] == ["My-Model-1-.gguf"]


@pytest.mark.parametrize("name, engine, version", [
    ("cpython-3.12.16+20261110-x86_64-unknown-linux-gnu-install_only_stripped.tar.gz", "python", "3.12.16+20261110"),
    ("cudart-llama-b11434-bin-ubuntu-cuda-12.8-x64.tar.gz", "llama.cpp", "b11434"),
    ("uv-x86_64-unknown-linux-musl.tar.gz", "uv", None), ("whatever.tar.gz", "llama.cpp", None)])
def test_what_an_archive_is_of_is_told_by_its_name(name, engine, version):
    assert importing.engine_of(f"/x/{name}") == engine
    if version:
        assert importing.version_of(name, engine) == version
    else:
        with pytest.raises(LlmgwError, match="does not tell the version"):
            importing.version_of(name, engine)


def test_stand_in_a_build_of_python_keeps_the_name_of_its_release(fake, tmp_path):
    archive = tmp_path / "cpython-3.12.1+20240107-x86_64-unknown-linux-gnu-install_only.tar.gz"
    archive.write_bytes(b"archive")
    uploads = Uploads(fake, b"archive")
    assert importing.import_engine(uploads.client, str(archive), uploads.digest, "python", "") == "3.12.1+20240107"
