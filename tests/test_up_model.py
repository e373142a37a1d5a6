"""What `up` serves, and the server.yaml that it writes."""
from __future__ import annotations

import os
import pathlib

import pytest

from llmgw.domain.errors import LlmgwError
from llmgw.parse import cluster_yaml
from llmgw.up import _parser
from llmgw.up_model import FIRST_MODEL, choose


def wanted(tmp_path, *words):
    return choose(_parser().parse_args([*words, "--data-dir", str(tmp_path / "up")]))


def config(tmp_path, chosen, **more):
    folder = tmp_path / "up"
    folder.mkdir(exist_ok=True)
    path = chosen.write_config(str(folder), **more)
    return cluster_yaml.decode(pathlib.Path(path).read_bytes(), "server.yaml",
                               lambda name: (folder / name).read_bytes(), {})


@pytest.fixture
def gguf(tmp_path):
    path = tmp_path / "Tiny Model-Q4_K_M.gguf"
    path.write_bytes(b"GGUF")
    return path


def test_a_file_becomes_a_model_of_the_mirror_once_it_is_there(tmp_path, gguf):
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages }}")
    chosen = wanted(tmp_path, "--model", str(gguf), "--context-length", "512", "--chat-template", str(template))
    assert config(tmp_path, chosen).models == ()
    (model,) = config(tmp_path, chosen, with_model=True).models
    assert (model.name, model.weights, model.context_length, model.chat_template) == (
        "Tiny-Model-Q4_K_M", "mirror:Tiny-Model-Q4_K_M", 512, "{{ messages }}")
    assert chosen.has_template(model.name, str(tmp_path / "up"))


def test_a_second_start_does_not_take_the_model_away_and_give_it_back(tmp_path, gguf):
    chosen = wanted(tmp_path, "--model", str(gguf), "--name", "tiny")
    config(tmp_path, chosen, with_model=True)
    assert [model.name for model in config(tmp_path, chosen).models] == ["tiny"]


@pytest.mark.parametrize("address, name", [
    ("hf:ggml-org/gemma-3-270m-it-GGUF", "gemma-3-270m-it"), ("hf:a/b:sub/model-Q8_0.gguf", "model-Q8_0"),
    ("hf:a/b@main", "b"), (FIRST_MODEL, "gemma-3-270m-it-Q8_0")])
def test_an_address_on_hugging_face_goes_to_the_file_as_it_is(tmp_path, address, name):
    (model,) = config(tmp_path, wanted(tmp_path, "--model", address)).models
    assert (model.name, model.weights) == (name, address)


def test_without_a_word_it_is_the_first_model_and_after_that_what_the_file_says(tmp_path):
    first = wanted(tmp_path)
    assert first.hub == FIRST_MODEL and len(config(tmp_path, first).models) == 1
    second = wanted(tmp_path)
    assert (second.hub, second.path) == ("", "")
    assert len(config(tmp_path, second).models) == 1


def test_no_model_is_an_empty_list(tmp_path):
    assert config(tmp_path, wanted(tmp_path, "--no-model")).models == ()


def test_a_config_of_ones_own_is_never_written(tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text("cluster: mine\n")
    chosen = wanted(tmp_path, "--config", str(own))
    assert chosen.write_config(str(tmp_path)) == str(own) and own.read_text() == "cluster: mine\n"


@pytest.mark.parametrize("words, sentence", [
    (["--model", "/nowhere.gguf"], "there is no such file"), (["--model", "/tmp"], "not a file"),
    (["--model", "hf:../x"], "not a Hugging Face source"), (["--name", "x"], "--model names none"),
    (["--config", "/nowhere.yaml"], "there is no such file"), (["--model", __file__], "serves GGUF files"),
    (["--model", "hf:a/b", "--name", "../x"], "is not allowed"),
    (["--model", "hf:a/b", "--chat-template", "/nowhere"], "there is no such file"),
    (["--model", "hf:a/b", "--context-length", "-5"], "must be positive")])
def test_what_cannot_be_meant_is_refused_before_anything_starts(tmp_path, words, sentence):
    with pytest.raises(LlmgwError, match=sentence):
        wanted(tmp_path, *words)
    assert not os.path.exists(tmp_path / "up")


def test_all_parts_of_a_split_file_go_in_together(tmp_path):
    for at in (1, 2, 3):
        (tmp_path / f"big[1]-0000{at}-of-00003.gguf").write_bytes(b"GGUF")
    chosen = wanted(tmp_path, "--model", str(tmp_path / "big[1]-00001-of-00003.gguf"))
    assert chosen.name == "big-1" and len(chosen.files()) == 3
