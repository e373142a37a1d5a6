"""agent.yaml: every key read, every fault named with its line."""
from __future__ import annotations

import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.domain.cluster import AgentConfig, OperatorEngine
from llmgw.domain.errors import ConfigError
from llmgw.parse import agent_yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]


def decode(text):
    return agent_yaml.decode(text.encode("utf-8"), "agent.yaml")


def test_an_empty_file_is_all_defaults():
    assert decode("") == AgentConfig()


def test_every_key_is_read():
    found = decode("""
server: [http://10.0.0.1:7800, "https://[fd00::1]:7800/"]
token_file: /etc/llmgw/token
node: n1
data_dir: /srv/llmgw
address: 10.0.0.5
fabric_address: fd00::5
gate_port: 8000
engine_ports: 9000
labels: {rack: a}
gpus: {exclude: [3, 1]}
install_packages: false
http_proxy: http://proxy:3128
engines:
  llama.cpp: {binary: /opt/llama-server}
  vllm: {python: /opt/v/bin/python}
""")
    assert found == AgentConfig(
        servers=("http://10.0.0.1:7800", "https://[fd00::1]:7800"), node="n1", data_dir="/srv/llmgw",
        address="10.0.0.5", fabric_address="fd00::5", gate_port=8000, engine_ports=9000, labels={"rack": "a"},
        exclude_gpus=(3, 1), install_packages=False, http_proxy="http://proxy:3128", token_file="/etc/llmgw/token",
        operator_engines=(OperatorEngine("llama.cpp", "/opt/llama-server"),
                          OperatorEngine("vllm", "/opt/v/bin/python")))


def test_one_server_may_stand_without_a_list():
    assert decode("server: http://a:1\n").servers == ("http://a:1",)


def test_the_page_about_configuration_explains_every_key():
    page = (ROOT / "docs" / "configuration.md").read_text()
    for key in (*agent_yaml.KEYS, *(f"gpus.{inner}" for inner in agent_yaml.GPU_KEYS)):
        assert f"| `{key}` |" in page, key


def test_a_node_may_take_the_cpu_build_on_purpose():
    config = decode("engines: {llama.cpp: {cpu: true}, vllm: {python: /x}}")
    assert config.cpu_engines == ("llama.cpp",) and [item.name for item in config.operator_engines] == ["vllm"]
    assert decode("engines: {llama.cpp: {cpu: false}}").cpu_engines == ()


REFUSED = [
    ("servers: []", "line 1: servers: unknown key, did you mean server"),
    ("server: []", "line 1: server: names no control plane"),
    ("server: [a:1]", "line 1: server[0]: not a server address"),
    ("server: http://a:1/path", "line 1: server: not a server address"),
    ("server: http://u:p@a:1", "line 1: server: not a server address"),
    ("server: [http://a:1, http://a:1]", "line 1: server[1]: http://a:1 stands here a second time"),
    ("node: -x", "line 1: node: name '-x' is not allowed"),
    ("data_dir: x", "line 1: data_dir: expected an absolute path"),
    ("address: a b", "line 1: address: not a host name"),
    ("gate_port: 0", "line 1: gate_port: expected a number from 1"),
    ("gpus: [3]", "line 1: gpus: expected a map"),
    ("gpus: {exclude: [a]}", "line 1: gpus.exclude[0]: expected a whole number"),
    ("install_packages: no", "line 1: install_packages: expected true or false"),
    ("engines: {llama.cpp: {python: /x}}", "line 1: engines.llama.cpp.python: unknown key"),
    ("engines: {vllm: {python: x}}", "line 1: engines.vllm.python: expected an absolute path"),
    ("engines: {vllm: {python: /x, cpu: true}}", "line 1: engines.vllm.cpu: unknown key"),
    ("engines: {llama.cpp: {binary: /x, cpu: true}}", "line 1: engines.llama.cpp.cpu: names a build of the release"),
    ("package_index: /simple", "line 1: package_index: expected the address of a package index"),
    ("engines: {vllm: {}}", "line 1: engines.vllm: python is missing"),
]


@pytest.mark.parametrize("text, start", REFUSED)
def test_a_fault_is_named_with_its_line(text, start):
    with pytest.raises(ConfigError) as caught:
        decode(text)
    assert caught.value.message.startswith(f"agent.yaml: {start}")


@given(st.binary(max_size=200))
def test_any_bytes_give_a_configuration_or_our_error(data):
    try:
        agent_yaml.decode(data, "agent.yaml")
    except ConfigError as error:
        assert error.message.startswith("agent.yaml: ")
