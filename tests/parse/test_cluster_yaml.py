"""server.yaml: every key read, every fault named with its line."""
from __future__ import annotations

import pathlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.domain.engine import DEFAULT_VERSIONS
from llmgw.domain.errors import ConfigError, StorageError
from llmgw.domain.model import Task
from llmgw.parse import cluster_yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESERVED = {"llama.cpp": frozenset({"--ctx-size", "-c", "--rpc-*"}), "vllm": frozenset({"--max-model-len"})}
FILES = {"qa.jinja": b"{{ x }}\n", "bad.jinja": b"\xff", "empty.jinja": b" \n"}


def read_file(path):
    if path not in FILES:
        raise StorageError(f"{path}: no such file")
    return FILES[path]


def decode(text):
    return cluster_yaml.decode(text.encode("utf-8"), "server.yaml", read_file, RESERVED)


def refusal(text):
    with pytest.raises(ConfigError) as caught:
        decode(text)
    return caught.value


def model(lines, engines=""):
    return engines + "models:\n  - name: m\n    engine: llama.cpp\n    weights: mirror:m\n" + "".join(
        f"    {line}\n" for line in lines)


def test_the_sample_is_read_without_a_warning_and_mentions_every_key():
    text = (ROOT / "server.yaml").read_text()
    config = decode(text)
    assert config.cluster == "home" and config.warnings == ()
    assert config.models[0].aliases == ("gemma", "small")
    for key in (*cluster_yaml.KEYS, *cluster_yaml.ENGINE_KEYS, *cluster_yaml.MODEL_KEYS,
                *cluster_yaml.PLACEMENT_KEYS):
        assert f"{key}:" in text, key


def test_the_page_about_configuration_explains_every_key():
    page = (ROOT / "docs" / "configuration.md").read_text()
    for key in (*cluster_yaml.KEYS, *cluster_yaml.ENGINE_KEYS, *cluster_yaml.MODEL_KEYS,
                *(f"placement.{inner}" for inner in cluster_yaml.PLACEMENT_KEYS),
                *(f"mirror.{inner}" for inner in cluster_yaml.MIRROR_KEYS)):
        assert f"| `{key}` |" in page, key


def test_an_empty_file_wants_the_default_engines_on_a_loopback_address():
    config = decode("")
    assert (config.cluster, config.host, config.port, config.models) == ("llmgw", "127.0.0.1", 7800, ())
    assert {engine.name: engine.version for engine in config.engines} == DEFAULT_VERSIONS


def test_the_mirrors_speed_is_in_megabytes():
    assert decode("mirror: {megabytes_per_second: 25}").mirror_bytes_per_second == 25_000_000
    assert decode("").mirror_bytes_per_second == decode("mirror: {}").mirror_bytes_per_second == 0


def test_an_empty_map_of_engines_wants_none():
    assert decode("engines: {}\n").engines == ()


def test_every_key_of_a_model_is_read():
    config = decode("""
cluster: c1
listen: '[::1]:0'
store: sqlite
engines:
  llama.cpp: {version: b11000, cpu: true, cuda: 12.8}
  vllm: {version: 0.30.0, launch_mode: mp}
models:
  - name: org/a:1
    aliases: [b, c]
    engine: vllm
    weights: hf:org/repo@v1.0
    replicas: 0
    task: embed
    context_length: 8192
    parallel: 4
    gpus: 2
    nodes: 1
    placement: {labels: {rack: a}, nodes: [n1, n2]}
    chat_template: qa.jinja
    args: [--enable-prefix-caching, --seed, "1"]
    trust_remote_code: true
    launch_mode: mp
""")
    assert (config.cluster, config.host, config.port) == ("c1", "::1", 0)
    assert config.engines[0].cpu and config.engines[0].version == "b11000" and config.engines[0].cuda == "12.8"
    found = config.models[0]
    assert (found.name, found.aliases, found.engine) == ("org/a:1", ("b", "c"), "vllm")
    assert found.weights == "hf:org/repo@v1.0"
    assert (found.replicas, found.task, found.context_length, found.parallel) == (0, Task.EMBED, 8192, 4)
    assert (found.gpus, found.labels, found.only_nodes) == (2, {"rack": "a"}, ("n1", "n2"))
    assert found.chat_template == "{{ x }}\n" and found.trust_remote_code
    assert found.args == ("--enable-prefix-caching", "--seed", "1")


def test_what_a_model_leaves_out_has_the_defaults_of_the_page():
    found = decode(model([])).models[0]
    assert (found.replicas, found.parallel, found.gpus, found.nodes, found.context_length) == (1, 1, None, 1, None)
    assert (found.task, found.args, found.trust_remote_code) == (Task.CHAT, (), False)


def test_engines_that_share_their_memory_among_requests_run_many_at_once():
    assert decode("models:\n- {name: m, engine: vllm, weights: 'mirror:m'}\n").models[0].parallel == 256


@pytest.mark.parametrize("name, version", [("llama.cpp", "b8000"), ("vllm", "0.21.9"), ("sglang", "0.5.9")])
def test_a_version_with_known_holes_is_taken_only_on_purpose_and_with_a_warning(name, version):
    assert "allow_insecure: true" in refusal(f"engines: {{{name}: {{version: {version}}}}}\n").hint
    config = decode(f"engines: {{{name}: {{version: {version}, allow_insecure: true}}}}\n")
    assert config.engines[0].allow_insecure and config.engines[0].version == version
    assert any(name in warning and "allow_insecure" in warning for warning in config.warnings)


def test_a_model_over_several_nodes_has_network_and_launch_mode_from_the_file_and_a_warning():
    config = decode("fabric: 10.1.0.0/16\nengines: {vllm: {version: 0.30.0, launch_mode: ray}}\nmodels:\n"
                    "  - {name: m, engine: vllm, weights: mirror:m, nodes: 2}\n"
                    "  - {name: n, engine: vllm, weights: mirror:m, nodes: 2, fabric: 10.2.0.0/16, launch_mode: mp}\n")
    assert [(spec.nodes, spec.fabric, spec.launch_mode) for spec in config.models] == [(2, "10.1.0.0/16", "ray"), (2, "10.2.0.0/16", "mp")]
    assert len(config.warnings) == 2 and all("not encrypted" in warning for warning in config.warnings)


def test_a_python_engine_may_name_its_date_and_tools():
    found = decode("engines: {vllm: {as_of: 2026-09-23, uv: 0.14.0}, sglang: {version: 0.5.23, python: 3.12.9+20260101}}\n").engines
    assert found[0].as_of == "2026-09-23T00:00:00Z"
    assert [(tool.name, tool.version) for engine in found for tool in engine.tools] == [
        ("uv", "0.14.0"), ("python", "3.12.9+20260101")]


REFUSED = [
    ("modls: []", "line 1: modls: unknown key, did you mean models", "known here: cluster, listen"),
    (model(["replica: 1"]), "line 5: models[0].replica: unknown key, did you mean replicas", "known here: name"),
    (model(["replicas: 1_000"]), "line 5: models[0].replicas: expected a whole number, got '1_000'", None),
    (model(["replicas: -1"]), "line 5: models[0].replicas: expected a number from 0", None),
    (model(["replicas: 1.5"]), "line 5: models[0].replicas: expected a whole number", None),
    (model(["replicas:"]), "line 5: models[0].replicas: has no value", None),
    (model(["gpus: no"]), "line 5: models[0].gpus: expected a whole number", None),
    (model(["trust_remote_code: yes"]), "line 5: models[0].trust_remote_code: expected true or false", None),
    (model(["task: chta"]), "line 5: models[0].task: unknown value 'chta', did you mean chat", "known: chat"),
    (model(["task: rerank"]), "line 5: models[0].task: task rerank is not supported yet", None),
    (model(["nodes: 2"]), "line 5: models[0].nodes: llama.cpp runs on one node", None),
    (model(["fabric: net"]), "line 5: models[0].fabric: not a network: 'net'", "10.1.0.0/16"),
    (model(["launch_mode: ray"]), "line 5: models[0].launch_mode: llama.cpp is not started by Ray", None),
    (model(["gpu_layers: 0"]), "line 5: models[0].gpu_layers: expected a number from 1", None),
    ("models:\n  - {name: m, engine: vllm, weights: mirror:m, gpu_layers: 3}\n", "line 2: models[0].gpu_layers: only llama.cpp", None),
    ("models:\n  - {name: m, engine: vllm, weights: mirror:m, nodes: 2}\n",
     "line 2: models[0].nodes: a replica over several nodes needs the network", "not encrypted"),
    (model(["placement: {label: {a: b}}"]), "line 5: models[0].placement.label: unknown key", None),
    (model(["placement: {labels: {-a: b}}"]), "line 5: models[0].placement.labels.-a: label '-a'", None),
    (model(["aliases: [a, a]"]), "line 5: models[0].aliases[1]: a stands here a second time", None),
    (model(["aliases: [m]"]), "line 5: models[0].aliases: m is the name of models[0] already", None),
    (model([]) + model([])[8:], "line 5: models[1].name: m is the name of models[0] already", None),
    (model(["chat_template: none.jinja"]), "line 5: models[0].chat_template: cannot read", "beside server.yaml"),
    (model(["chat_template: bad.jinja"]), "line 5: models[0].chat_template: 'bad.jinja' is not UTF-8", None),
    (model(["chat_template: empty.jinja"]), "line 5: models[0].chat_template: 'empty.jinja' has 2 bytes", None),
    ("models:\n  - name: -m\n", "line 2: models[0].name: name '-m' is not allowed", "use letters"),
    ("models:\n  - name: a/../b\n", "line 2: models[0].name: name", None),
    ("models:\n  - name: m\n", "line 2: models[0]: engine is missing", None),
    ("models:\n  - name: m\n    engine: vlm\n",
     "line 3: models[0].engine: unknown value 'vlm', did you mean vllm", None),
    ("models:\n  - name: m\n    engine: vllm\n", "line 2: models[0]: weights is missing", None),
    ("models:\n  - name: m\n    engine: sglang\n", "line 3: models[0].engine: sglang is not under engines:", None),
    ("models:\n", "line 1: models: expected a list, got nothing", "write []"),
    ("models: {}\n", "line 1: models: expected a list, got a map", None),
    ("engines:\n", "line 1: engines: expected a map, got nothing", "write {}"),
    ("engines: {ollama: {version: x}}\n", "line 1: engines.ollama: unknown key", "known here: llama.cpp, vllm"),
    ("engines: {llama.cpp: {version: v0.7.0}}\n", "line 1: engines.llama.cpp.version: not a build", "like b10991"),
    ("engines: {llama.cpp: {version: b8000}}\n", "line 1: engines.llama.cpp.version: b8000 has known holes", "b8146"),
    ("engines: {vllm: {version: ../x}}\n", "line 1: engines.vllm.version: not a version", None),
    ("engines: {vllm: {cuda: 12.8}}\n", "line 1: engines.vllm.cuda: only llama.cpp", None),
    ("engines: {llama.cpp: {cuda: 12}}\n", "line 1: engines.llama.cpp.cuda: not a version of CUDA", None),
    ("engines: {vllm: {version: v0.30.0}}\n", "line 1: engines.vllm.version: not a release of vllm: 'v0.30.0'", "write it like 0.22.0"),
    ("engines: {vllm: {version: 0.21.9}}\n", "line 1: engines.vllm.version: vllm 0.21.9 has known holes", "use 0.22.0 or newer"),
    ("engines: {sglang: {version: 0.5.9}}\n", "line 1: engines.sglang.version: sglang 0.5.9 has known holes", None),
    ("engines: {vllm: {as_of: yesterday}}\n", "line 1: engines.vllm.as_of: not a point in time", "write it in UTC"),
    ("engines: {vllm: {uv: 0.11.14}}\n", "line 1: engines.vllm.uv: uv 0.11.14 is too old", "use 0.11.15 or newer"),
    ("engines: {vllm: {uv: ../x}}\n", "line 1: engines.vllm.uv: not a version of uv", None),
    ("engines: {vllm: {python: 3.12}}\n", "line 1: engines.vllm.python: not a build of Python 3.12", "write patch and date"),
    ("engines: {llama.cpp: {as_of: 2026-09-23}}\n", "line 1: engines.llama.cpp.as_of: llama.cpp is not made of", None),
    ("engines: {vllm: {cpu: true}}\n", "line 1: engines.vllm.cpu: only llama.cpp", None),
    ("engines: {sglang: {version: 0.5.23, launch_mode: ray}}\n", "line 1: engines.sglang.launch_mode: sglang is not started by Ray", None),
    ("engines: {sglang: {}}\n", "line 1: engines.sglang: version is missing", None),
    ("store: {etcd: [http://a:1]}\n", "line 1: store.etcd: etcd is not supported yet", None),
    ("store: etcd\n", "line 1: store: etcd is not supported yet", None),
    ("store: postgres\n", "line 1: store: unknown value 'postgres'", None),
    ("listen: 7800\n", "line 1: listen: not an address to listen on", None),
    ("listen: h:70000\n", "line 1: listen: not an address to listen on", None),
    ("fabric: net\n", "line 1: fabric: not a network: 'net'", None),
    ("cluster: ''\n", "line 1: cluster: is empty", None),
    ("cluster: \"a\\nb\"\n", "line 1: cluster: a line break", None),
    ("- a\n", "line 1: expected a map, got a list", None),
]


@pytest.mark.parametrize("text, start, hint", REFUSED, ids=[start[:60] for _, start, _ in REFUSED])
def test_a_fault_is_named_with_its_line(text, start, hint):
    error = refusal(text)
    assert error.message.startswith(f"server.yaml: {start}")
    assert hint is None or (error.hint or "").count(hint)
    assert error.exit_code == 78


@pytest.mark.parametrize("weights", ["mirror:a/b:c", "hf:org/repo", "hf:org/repo@main", "hf:o/r@v1:f-Q4.gguf",
                                     "hf:o/r:sub/f.gguf", "file:/a b/c.gguf"])
def test_weights_come_from_three_places(weights):
    assert decode(f"models:\n- {{name: m, engine: llama.cpp, weights: '{weights}'}}\n").models[0].weights == weights


@pytest.mark.parametrize("weights", ["a", "mirror:", "mirror:-a", "mirror:../a", "hf:repo", "hf:o/r/x", "hf:../r",
                                     "hf:o/..", "hf:o/r:../f", "hf:o/r:/f", "hf:o/r@../x", "hf:o/r:", "hf:o/r@",
                                     "file:a", "file:", "http://x/y", "hf:evil:80/a/b"])
def test_other_sources_of_weights_are_refused(weights):
    error = refusal(f"models:\n- {{name: m, engine: llama.cpp, weights: '{weights}'}}\n")
    assert error.message.startswith("server.yaml: line 2: models[0].weights: ")


@pytest.mark.parametrize("flag", ["--host", "--host=0.0.0.0", "--port", "--api-key", "--api-key-file", "--ssl-key-file",
                                  "--rpc", "--slot-save-path", "-c", "--ctx-size", "--ctx_size=1", "--rpc-x"])
def test_a_flag_that_is_ours_or_opens_the_node_is_refused_with_its_line(flag):
    error = refusal(model([f"args: ['{flag}', x]"]))
    assert error.message.startswith("server.yaml: line 5: models[0].args[0]: -") and "set by llmgw" in error.message


def test_a_beginning_of_a_flag_is_refused_where_argparse_would_take_it():
    vllm = "models:\n- {name: m, engine: vllm, weights: 'mirror:m', args: [%s]}\n"
    assert "set by llmgw" in refusal(vllm % "--hos").message
    assert "set by llmgw" in refusal(vllm % "--trust-remote").message
    assert refusal(vllm % "--trust_remote_code").hint == "write trust_remote_code: true"
    assert decode(vllm % "--enforce-eager").models


def test_a_flag_with_its_value_in_one_item_is_refused():
    assert "two items" in refusal(model(["args: ['--host 0.0.0.0']"])).message


def test_values_and_short_numbers_pass_as_arguments():
    assert decode(model(["args: [--temp, '-1', 'a b', -fa]"])).models[0].args == ("--temp", "-1", "a b", "-fa")


def test_remote_code_for_llama_cpp_is_a_warning():
    assert "means nothing to llama.cpp" in decode(model(["trust_remote_code: true"])).warnings[0]


def test_ray_belongs_to_the_packages_where_an_engine_or_a_model_over_several_nodes_says_so():
    def with_ray(engine="", more=""):
        text = (f"fabric: 10.1.0.0/16\nengines:\n  llama.cpp: {{version: b10991}}\n  vllm: {{version: 0.30.0{engine}}}\nmodels:\n"
                f"  - {{name: m, engine: vllm, weights: mirror:m{more}}}\n")
        return {engine.name: engine.with_ray for engine in decode(text).engines}
    assert with_ray() == with_ray(more=", nodes: 2") == {"llama.cpp": False, "vllm": False}
    assert with_ray(engine=", launch_mode: ray") == with_ray(more=", nodes: 2, launch_mode: ray") == {
        "llama.cpp": False, "vllm": True}
    assert with_ray(more=", launch_mode: ray")["vllm"] is False, "on one node nothing is started with it"


WORDS = st.sampled_from([
    "models:", "engines:", "- ", "name: ", "engine: ", "llama.cpp", "vllm", "weights: ", "mirror:m", "\n", "\n  ",
    "\n    ", "args: ", "[", "]", "{", "}", ": ", "version", "b10991", "x", "-1", "listen: ", "placement: ", "labels",
    "replicas: ", "true", "", "store: ", "sqlite"])


@settings(max_examples=600, deadline=None)
@given(st.one_of(st.binary(max_size=200), st.lists(WORDS, max_size=30).map("".join).map(str.encode)))
def test_any_bytes_give_a_configuration_or_our_error(data):
    try:
        cluster_yaml.decode(data, "server.yaml", read_file, RESERVED)
    except ConfigError as error:
        assert error.message.startswith("server.yaml: ") and len(error.message) <= 500
