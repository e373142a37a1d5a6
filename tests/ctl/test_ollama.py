"""Models of Ollama: the recorded folder, and hostile copies of it."""
from __future__ import annotations

import json
import os
import pathlib
import shutil

import pytest

from llmgw.ctl import ollama
from llmgw.domain.errors import DigestMismatch, LlmgwError, NotFound
from llmgw.parse import ollama_manifest

RECORDED = pathlib.Path(__file__).resolve().parent.parent / "data" / "ollama"
MODEL = "2da12cda17979913bdfb6d541b72e48a66d00276aea7986829ee01c61288d90f"


@pytest.fixture
def tree(tmp_path):
    return pathlib.Path(shutil.copytree(RECORDED, tmp_path / "models"))


def entry(tree, text):
    return next(found for found in ollama.entries(str(tree)) if str(found.name) == text)


def test_every_model_is_listed_with_its_size_or_the_reason_against_it(tree):
    found = {str(one.name): one for one in ollama.entries(str(tree))}
    assert len(found) == 8
    good = {name: (one.size_bytes, one.vision) for name, one in found.items() if not one.problem}
    assert good == {"hf.co/someuser/Tiny-GGUF:Q4_K_M": (108, False), "tiny:latest": (143, False),
                    "tiny:1b-q4_0": (143, False), "tiny-vision:latest": (249, True)}
    for name, words in (("tiny-cloud:120b-cloud", "cloud model"), ("tiny-lora:latest", "adapter"),
                        ("tiny-tensors:latest", "single tensors"), ("someuser/tiny-split:latest", "split model")):
        assert words in found[name].problem
    assert ollama.partial_downloads(str(tree)) == 1


def test_a_blob_that_is_not_whole_is_named(tree):
    blob = tree / "blobs" / f"sha256-{MODEL}"
    data = blob.read_bytes()
    blob.write_bytes(data[:-1])
    assert "has 142 bytes, its manifest says 143" in entry(tree, "tiny:latest").problem
    blob.write_bytes(b"<htm" + data[4:])
    assert "its model is no GGUF file" in entry(tree, "tiny:latest").problem
    blob.unlink()
    assert "is not there" in entry(tree, "tiny:latest").problem
    (tree / "blobs" / f"sha256-{MODEL}-partial").write_bytes(data[:10])
    assert "its download has not ended" in entry(tree, "tiny:latest").problem
    os.mkfifo(blob)
    assert "not a file" in entry(tree, "tiny:latest").problem


def test_a_manifest_of_nonsense_is_one_models_problem(tree):
    folder = tree / "manifests" / "registry.ollama.ai" / "library" / "bad"
    folder.mkdir()
    (folder / "one").write_bytes(b"[" * 100_000)
    (folder / "-strange name").write_text("{}")
    (folder / "two").write_text(json.dumps({"config": {"mediaType": "x", "digest": "sha256:../../x", "size": 1}}))
    os.mkfifo(folder / "pipe")
    (folder / "deeper").mkdir()
    (tree / "manifests" / "stray").write_text("{}")
    os.symlink("/", tree / "manifests" / "registry.ollama.ai" / "root")
    assert "nested deeper" in entry(tree, "bad:one").problem
    assert "not a sha256 digest" in entry(tree, "bad:two").problem
    assert "not a file" in entry(tree, "bad:pipe").problem
    assert len(ollama.entries(str(tree))) == 8 + 3


def test_the_folder_is_found_where_ollama_would_look(tree, tmp_path):
    home = tmp_path / "home"
    (home / ".ollama" / "models").mkdir(parents=True)
    service = tmp_path / "service"
    for place in (str(service), "/nowhere"):
        with pytest.raises(NotFound, match="keeps no models"):
            ollama.find("", {"HOME": str(home)}, place)
    shutil.copytree(tree, service / ".ollama" / "models")
    assert ollama.find("", {"HOME": str(home)}, str(service)) == str(service / ".ollama" / "models")
    shutil.copytree(tree, home / ".ollama" / "models", dirs_exist_ok=True)
    assert ollama.find("", {"HOME": str(home)}, str(service)) == str(home / ".ollama" / "models")
    assert ollama.find("", {"HOME": str(home), "OLLAMA_MODELS": str(tree)}, str(service)) == str(tree)
    assert ollama.find(str(tree), {}, "/nowhere") == str(tree)
    with pytest.raises(NotFound, match="there is no folder"):
        ollama.find(str(tmp_path), {}, "/nowhere")


@pytest.mark.parametrize("text, name", [("tiny", "tiny"), ("tiny:1b-q4_0", "tiny-1b-q4_0"),
                                        ("hf.co/someuser/Tiny-GGUF:Q4_K_M", "Tiny-GGUF-Q4_K_M")])
def test_a_model_keeps_its_short_name(text, name):
    assert ollama.default_name(ollama_manifest.name(text)) == name


def test_stand_in_a_blob_with_other_content_of_the_same_size_is_refused_before_a_byte_is_sent(tree):
    blob = tree / "blobs" / f"sha256-{MODEL}"
    blob.write_bytes(blob.read_bytes()[:-1] + b"?")
    with pytest.raises(DigestMismatch):
        ollama.bring(None, str(tree), ollama_manifest.name("tiny"))       # no client: it never gets so far


def test_a_note_with_other_content_is_refused(tree):
    chosen = ollama._chosen(str(tree), ollama_manifest.name("tiny"))
    assert ollama._notes(str(tree), chosen)["template"] == "{{ .Prompt }}"
    (tree / "blobs" / f"sha256-{chosen.notes[0].sha256}").write_bytes(b"{{ .Evil }}  ")
    with pytest.raises(LlmgwError, match="sha256 is"):
        ollama._notes(str(tree), chosen)
