"""What Hugging Face says, and which files a source means."""
from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.domain.errors import LlmgwError, NotFound, ParseError
from llmgw.parse import hugging_face, weights_source
from llmgw.parse.hugging_face import HubFile

OID, SHA = "a" * 40, "b" * 64


def listed(*paths):
    return [HubFile(path, 10, sha256=SHA) for path in paths]


def chosen(source, *paths):
    files, form = hugging_face.choose(listed(*paths), weights_source.hub(source))
    return [file.path for file in files], form


def test_files_are_read_with_the_digest_of_their_kind():
    page = json.dumps([
        {"type": "directory", "path": "sub", "oid": OID, "size": 0},
        {"type": "file", "path": "sub/m.gguf", "size": 5, "oid": OID, "lfs": {"oid": SHA, "size": 5, "pointerSize": 1}},
        {"type": "file", "path": "config.json", "size": 3, "oid": OID},
        {"type": "file", "path": ".gitattributes", "size": 3, "oid": OID},
        {"type": "file", "path": "../evil", "size": 3, "oid": OID}]).encode()
    assert hugging_face.files(page, "o/r") == (HubFile("sub/m.gguf", 5, sha256=SHA),
                                               HubFile("config.json", 3, git_oid=OID))


@pytest.mark.parametrize("entry", [
    {"type": "file", "path": "a", "size": 1}, {"type": "file", "path": "a", "size": -1, "oid": OID},
    {"type": "file", "path": "a", "size": True, "oid": OID}, {"type": "file", "path": "a", "size": 1, "oid": "../x"},
    {"type": "file", "path": "a", "size": 1, "oid": OID, "lfs": {"oid": "x", "size": 1}},
    {"type": "file", "path": "a", "size": 1, "oid": OID, "lfs": {"size": 1}},
    {"type": "file", "path": "a", "size": 1, "oid": OID, "lfs": "x"}, "a", None], ids=str)
def test_a_lying_entry_is_refused(entry):
    with pytest.raises(ParseError):
        hugging_face.files(json.dumps([entry]).encode(), "o/r")


def test_a_commit_is_forty_digits():
    assert hugging_face.commit(json.dumps({"sha": OID}).encode(), "o/r") == OID
    for answer in ({"sha": "main"}, {"sha": None}, {}, []):
        with pytest.raises(ParseError, match="names no commit"):
            hugging_face.commit(json.dumps(answer).encode(), "o/r")


def test_the_next_page_is_read_from_the_link():
    assert hugging_face.next_page('<https://h/x?cursor=a>; rel="next"') == "https://h/x?cursor=a"
    assert hugging_face.next_page('<https://h/x>; rel="prev"') == hugging_face.next_page("") == ""


def test_the_named_file_is_taken():
    assert chosen("hf:o/r:sub/b.gguf", "a.gguf", "sub/b.gguf") == (["sub/b.gguf"], "gguf")


def test_the_only_gguf_needs_no_name():
    assert chosen("hf:o/r", "README.md", "a.gguf", "mmproj-a.gguf") == (["a.gguf"], "gguf")


def test_several_ggufs_are_listed_as_choices():
    with pytest.raises(NotFound, match=r"hf:o/r holds 2 GGUF files: a-Q4.gguf, a-Q8.gguf") as caught:
        chosen("hf:o/r", "a-Q8.gguf", "a-Q4.gguf")
    assert caught.value.hint == "name one: hf:o/r:a-Q4.gguf"


def test_a_wrong_name_is_answered_with_the_right_ones():
    with pytest.raises(NotFound, match="has no file 'b.gguf'; it has: a.gguf"):
        chosen("hf:o/r:b.gguf", "a.gguf", "config.json")


def test_a_split_model_is_taken_whole_and_in_order():
    parts = [f"q4/m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    assert chosen("hf:o/r", *reversed(parts)) == (parts, "gguf")
    assert chosen(f"hf:o/r:{parts[1]}", *parts, "other.gguf") == (parts, "gguf")
    with pytest.raises(NotFound, match="holds 2 of the 3 parts"):
        chosen("hf:o/r", *parts[:2])


def test_without_gguf_the_files_that_engines_load_are_taken():
    paths = ["config.json", "model.safetensors", "tokenizer.json", "README.md", "pytorch_model.bin", "onnx/x.json"]
    assert chosen("hf:o/r", *paths) == (["config.json", "model.safetensors", "tokenizer.json"], "safetensors")
    with pytest.raises(NotFound, match="holds no GGUF file"):
        chosen("hf:o/r", "pytorch_model.bin", "config.json")


@given(st.one_of(st.binary(max_size=200), st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from([OID, SHA, "a.gguf", "file"]) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
        st.sampled_from(["type", "path", "size", "oid", "lfs", "sha"]), inner, max_size=6),
    max_leaves=20).map(lambda value: json.dumps(value).encode())))
def test_any_bytes_give_files_or_our_error(data):
    for read in (hugging_face.files, hugging_face.commit):
        try:
            read(data, "o/r")
        except LlmgwError as error:
            assert len(error.message) <= 700


@given(st.text(max_size=60))
def test_any_text_is_a_source_or_our_error(text):
    for prefix in ("", "hf:", "hf:o/r", "hf:o/r:", "hf:o/r@", "mirror:", "file:"):
        try:
            weights_source.check(prefix + text)
        except ParseError:
            continue
        assert ".." not in (prefix + text).split("/") or prefix == "file:"
