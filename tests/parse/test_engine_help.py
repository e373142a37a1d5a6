"""Which flags a help text has: whole words at the head of an entry, in every shape that engines print."""
from __future__ import annotations

import pathlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.parse.engine_help import read

DATA = pathlib.Path(__file__).resolve().parent.parent / "data"
LLAMA = (DATA / "llamacpp" / "help-b10991.txt").read_text()
VLLM = (DATA / "vllm" / "serve-help-all-0.30.0.txt").read_text()
VLLM_SHORT = (DATA / "vllm" / "serve-help-0.30.0.txt").read_text()
RAY = (DATA / "vllm" / "ray-start-help-2.60.0.txt").read_text()
SGLANG = (DATA / "sglang" / "launch-server-help-0.5.23.txt").read_text()
LAST_OF_LLAMA = ("example-specific params",)


def names(text):
    return set(read(text).entries)


@pytest.mark.parametrize("flag", ["--model", "--host", "--port", "--metrics", "--alias", "--parallel", "--n-gpu-layers",
                                  "-ngl", "-m", "--load-mode", "--no-models-autoload", "--api-key-file", "--mmproj"])
def test_flags_seen_accepted_by_llama_server_are_found(flag):
    assert read(LLAMA).find(flag) is not None


@pytest.mark.parametrize("flag", ["--host", "--port", "--tensor-parallel-size", "-tp", "--served-model-name",
                                  "--distributed-executor-backend", "--nnodes", "--node-rank", "--master-addr",
                                  "--master-port", "--headless", "--no-enable-log-requests", "--api-server-count", "-asc"])
def test_flags_seen_accepted_by_vllm_are_found(flag):
    assert read(VLLM).find(flag) is not None


@pytest.mark.parametrize("flag", ["--head", "--address", "--port", "--node-ip-address", "--include-dashboard", "--block",
                                  "--disable-usage-stats", "-v", "--verbose"])
def test_flags_of_ray_are_found(flag):
    assert read(RAY).find(flag) is not None


@pytest.mark.parametrize("flag", ["--model-path", "--nnodes", "--dist-init-addr", "--tensor-parallel-size", "--enable-metrics"])
def test_flags_of_sglang_are_found(flag):
    assert read(SGLANG).find(flag) is not None


@pytest.mark.parametrize("text, flag", [(LLAMA, "--no-mmap"), (LLAMA, "--mod"), (LLAMA, "--metric"), (VLLM, "--tensor"),
                                        (SGLANG, "--metrics"), (VLLM, "--port-range"), (RAY, "--address-of")])
def test_a_flag_is_found_in_whole_words_only(text, flag):
    assert read(text).find(flag) is None


def test_a_flag_is_not_satisfied_by_one_that_begins_like_it():
    said = read("usage: x\n  --port-range A  ports\n  --metrics-port N  a port\n  -portable  not long\n")
    assert said.find("--port") is None and said.find("--metrics") is None and said.find("-p") is None


def test_words_of_a_description_are_no_flags():
    said = read("usage: x\n  --threads N           like --cores,\n                        --speed and\n    --all of it\n")
    assert "--cores" not in said.entries and "--speed" not in said.entries


def test_a_removed_flag_that_is_still_named_counts_as_gone():
    assert "--draft-max" in names(LLAMA) and read(LLAMA).find("--draft-max") is None


@pytest.mark.parametrize("line, expected", [
    ("  --flag, --no-flag", {"--flag", "--no-flag"}),
    ("  --[no-]flag            on or off", {"--flag", "--no-flag"}),
    ("  --x / --no-x           on or off", {"--x", "--no-x"}),
    ("  -t, --tensor_parallel_size, --tp_size INTEGER  how many", {"-t", "--tensor_parallel_size", "--tp_size"}),
    ("  --api-server-count COUNT, -asc COUNT", {"--api-server-count", "-asc"}),
    ("-fa,   --flash-attn [on|off|auto]       set Flash Attention", {"-fa", "--flash-attn"}),
    ("  --mode={a,b}           a mode", {"--mode"}),
    ("\x1b[1m  --bold\x1b[0m \x1b[33mTEXT\x1b[0m   coloured", {"--bold"}),
    ("\x1b]8;;x\x07  --link\x1b]8;;\x07  TEXT", {"--link"}),
    ("\u2502 --boxed     TEXT   in a panel        \u2502", {"--boxed"}),
    ("  --choices {a,\n     b}  x", {"--choices"}),
    ("  --long-name LONG_NAME,\n  -ln LONG_NAME\n       what", {"--long-name", "-ln"}),
    ("\t--tabbed\tvalue", {"--tabbed"}),
    ("  - none: no flag", set()), ("  -1 or 'auto'", set()), ("                        --deep    in a description", set())])
def test_every_shape_of_an_entry_is_read(line, expected):
    assert {name for name in names(line) if not name[1:2].isdigit()} == expected


@pytest.mark.parametrize("text, flag, choices", [
    (VLLM, "--distributed-executor-backend", ("external_launcher", "mp", "ray", "uni")),
    (VLLM, "--model-impl", ("auto", "terratorch", "transformers", "vllm")), (VLLM, "--tool-call-parser", ()),
    (LLAMA, "--poll-batch", ("0", "1")), (LLAMA, "--flash-attn", ("on", "off", "auto")), (LLAMA, "--rope-scaling", ("none", "linear", "yarn")),
    (RAY, "--log-style", ("auto", "record", "pretty")), (RAY, "--port", ()),
    ("  --wrapped {one,\n        two,three}", "--wrapped", ("one", "two", "three"))])
def test_choices_are_read_where_no_other_value_may_be(text, flag, choices):
    assert read(text).find(flag).choices == choices


def test_a_flag_without_value_and_one_with_are_told_apart():
    said = read(VLLM)
    assert not said.find("--headless").takes_value and said.find("--nnodes").takes_value


def test_a_key_of_a_flag_and_a_value_glued_to_it_are_that_flag():
    said = read(VLLM)
    assert said.find("--compilation-config.mode").names[0] == "--compilation-config"
    assert said.find("-tp4") is said.find("-tp") and said.find("--nnodes2") is None


@pytest.mark.parametrize("text, sections", [(LLAMA, LAST_OF_LLAMA), (VLLM, ()), (RAY, ()), (SGLANG, ())])
def test_whole_helps_do_not_look_truncated(text, sections):
    assert read(text, sections).truncated == ""


@pytest.mark.parametrize("text, sections, words", [
    ("", (), "empty"), ("\n \n", (), "empty"), (VLLM_SHORT, (), "short"), ("usage: x\n  --a  b\n", (), "short"),
    ("\n".join(LLAMA.splitlines()[:400]), LAST_OF_LLAMA, "does not come to 'example-specific params'"),
    (VLLM.replace("usage:", ""), (), "how the program is used"),
    ("\n".join(VLLM.splitlines()[:60]) + "\n  --cut {a,b", (), "in the middle"),
    (VLLM[:VLLM.index("(default: Qwen/Qwen3-0.6B)") + 5], (), "in the middle")])
def test_a_cut_help_looks_truncated(text, sections, words):
    assert words in read(text, sections).truncated


@given(st.binary(max_size=400) | st.text(alphabet="-ab{}[]<>|=, \n\x1b()./'\u2502", max_size=300).map(str.encode))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_read_without_a_fault_and_every_flag_begins_with_a_dash(data):
    said = read(data.decode("utf-8", "replace"), LAST_OF_LLAMA)
    assert all(name.startswith("-") and " " not in name for name in said.entries)
    for name, entry in said.entries.items():
        assert name in entry.names


def test_a_hostile_help_is_read_in_a_bearable_time():
    read("  --a {" * 2000 + "\n" + ("  --b " + "(" * 5000 + "\n") * 20)
