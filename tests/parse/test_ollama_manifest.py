"""Ollama's manifests: the recorded ones, hostile ones, cut ones."""
from __future__ import annotations

import json
import pathlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.domain.errors import ParseError
from llmgw.parse import ollama_manifest as om

TREE = pathlib.Path(__file__).resolve().parent.parent / "data" / "ollama"
GOOD = (TREE / "manifests/registry.ollama.ai/library/tiny-vision/latest").read_bytes()
DIGEST = "sha256:" + "ab" * 32


def layer(kind="model", digest=DIGEST, size=5, **more):
    return {"mediaType": f"application/vnd.ollama.image.{kind}", "digest": digest, "size": size, **more}


def made(*layers, config=None):
    return json.dumps({"schemaVersion": 2, "config": config or layer("x"), "layers": list(layers)}).encode()


def refusal(data):
    with pytest.raises(ParseError) as caught:
        om.manifest(data, "m")
    assert caught.value.message.startswith("m: ") and len(caught.value.message) <= 500
    return caught.value.message


def test_the_recorded_vision_model_is_read():
    found = om.manifest(GOOD, "m")
    assert [layer.kind for layer in found.layers] == ["model", "projector", "template", "license", "params"]
    chosen = om.choose(found, b"{}", "tiny-vision")
    assert (chosen.model.size_bytes, chosen.projector.size_bytes) == (143, 106)
    assert [note.kind for note in chosen.notes] == ["template", "params", "license"]


@pytest.mark.parametrize("text, parts", [
    ("tiny", ("registry.ollama.ai", "library", "tiny", "latest")),
    ("tiny:1b-q4_0", ("registry.ollama.ai", "library", "tiny", "1b-q4_0")),
    ("someuser/tiny", ("registry.ollama.ai", "someuser", "tiny", "latest")),
    ("hf.co/someuser/Tiny-GGUF:Q4_K_M", ("hf.co", "someuser", "Tiny-GGUF", "Q4_K_M")),
    ("box.lan:5000/a/b:c", ("box.lan:5000", "a", "b", "c"))])
def test_names_are_read_as_ollama_reads_them(text, parts):
    found = om.name(text)
    assert (found.host, found.namespace, found.model, found.tag) == parts
    assert om.name(str(found)) == found


@pytest.mark.parametrize("text", ["", ":", "a:", ":a", "a/b/c/d", "../a", "a/../b", "..", "a:..", "/a", "a//b", "a b", "a:b:c",
                                  "-a", "a\n", "a\x00", "h:99999999/a/b", "a" * 81, "é"])
def test_no_name_can_climb_out_of_a_folder(text):
    with pytest.raises(ParseError, match="not a name"):
        om.name(text)


BAD_DIGESTS = ["", "sha256:", "sha256:../../../../etc/ld.so.preload", "sha256:" + "a" * 63, "sha256:" + "A" * 64,
               "sha256:" + "a" * 65, "md5:" + "a" * 64, "sha256:" + "a" * 64 + "\n", "sha512:" + "a" * 64, None, 7, ["a"]]


@pytest.mark.parametrize("digest", BAD_DIGESTS)
@pytest.mark.parametrize("place", ["layer", "config"])
def test_only_sha256_and_64_hex_digits_are_a_digest(digest, place):
    bad = layer(digest=digest)
    assert "not a sha256 digest" in refusal(made(bad) if place == "layer" else made(config=bad))


def test_both_spellings_of_a_digest_mean_the_same():
    assert om.manifest(made(layer(digest="sha256-" + "ab" * 32)), "m") == om.manifest(made(layer()), "m")


@pytest.mark.parametrize("data, words", [
    (b"", "not JSON"), (b"[]", "not an Ollama"), (b"{}", "no object"), (b'{"config": 3}', "no object"), (b"\xff", "not JSON"),
    (made(layer(size=-1)), "the size -1"), (made(layer(size=1.5)), "the size"), (made(layer(size=1 << 63)), "the size"),
    (made(layer(size=True)), "the size"), (made(layer(size="5")), "the size"), (made({**layer(), "mediaType": 5}), "media type"),
    (made(3), "no object"), (json.dumps({"config": layer(), "layers": {}}).encode(), "list of layers"),
    (b'{"a":' + b"[" * 100 + b"]" * 100 + b"}", "nested deeper"), (b"[" * 1_000_000, "nested deeper"),
    (b" " * (om.MAX_BYTES + 1), "at most"), (json.dumps({"config": layer(), "layers": [0] * 20_000}).encode(), "layers")])
def test_a_hostile_manifest_is_refused_with_a_sentence(data, words):
    assert words in refusal(data)


@pytest.mark.parametrize("layers, config, words", [
    ([], {"remote_host": "https://ollama.com:443", "remote_model": "x"}, "a cloud model: its weights are at https://ollama.com"),
    ([layer("tensor")], {}, "single tensors"), ([layer()], {"model_format": "safetensors"}, "single tensors"),
    ([layer(), layer("adapter")], {}, "an adapter"), ([layer("template")], {}, "has no weights"), ([], {}, "has no weights"),
    ([layer(), layer()], {}, "split model of 2 parts"), ([layer(), layer("projector"), layer("projector")], {}, "2 projectors"),
    ([], [1], "has no weights")])
def test_what_cannot_be_taken_is_said_in_words(layers, config, words):
    with pytest.raises(ParseError) as caught:
        om.choose(om.manifest(made(*layers), "m"), json.dumps(config).encode(), "m")
    assert words in caught.value.message


def test_every_cut_of_a_manifest_is_refused():
    for length in range(len(GOOD)):
        refusal(GOOD[:length])


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_give_a_manifest_or_our_error(data):
    check(data)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(0, 255), st.integers(1, 8))
def test_a_good_manifest_with_changed_bytes_gives_one_or_our_error(at, value, count):
    data = bytearray(GOOD)
    at %= len(data) - 8
    data[at:at + count] = bytes([value]) * count
    check(bytes(data))


def check(data):
    try:
        found = om.manifest(data, "m")
        om.choose(found, b"{}", "m")
    except ParseError as error:
        assert len(error.message) <= 500
        return
    assert all(len(layer.sha256) == 64 for layer in found.layers)
