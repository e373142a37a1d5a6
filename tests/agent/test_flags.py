"""An engine whose flags are gone is not offered, and says which."""
from __future__ import annotations

import json
import stat
import subprocess

import pytest

from llmgw.agent.flags import FlagCheck, sentence
from llmgw.agent.layout import Layout
from llmgw.domain.engine import EnginePhase, EngineWanted
from llmgw.system.process import Processes


@pytest.fixture
def renamed(llama_server, tmp_path):
    """The real llama-server behind a script that shows a help in which one flag has another name."""
    text = subprocess.run([llama_server, "--help"], stdout=subprocess.PIPE, text=True, timeout=60, check=True).stdout
    (tmp_path / "help.txt").write_text(text.replace("\n--metrics ", "\n--metrics-page ", 1))
    (tmp_path / "asked").write_text("")
    path = tmp_path / "llama-server"
    path.write_text(f'#!/bin/sh\n[ "$1" = --help ] && {{ echo x >> {tmp_path}/asked; exec cat {tmp_path}/help.txt; }}\n'
                    f'exec {llama_server} "$@"\n')
    path.chmod(0o755)
    tmp_path.chmod(0o755)
    return path


def test_it_is_asked_once_and_the_answer_is_kept_until_the_program_changes(renamed, tmp_path):
    (tmp_path / "asked").chmod(0o666)
    layout = Layout(str(tmp_path / "data"))
    (tmp_path / "data" / "state").mkdir(parents=True)
    gone = ("llama-server has no --metrics",)
    for _ in range(2):                        # a new agent reads what the last one knew
        check = FlagCheck(Processes(), layout, lambda: False)
        assert check.faults("llama.cpp", str(renamed), "b1") == gone
    assert (tmp_path / "asked").read_text() == "x\n"
    (tmp_path / "data" / "state" / "flags.json").write_text("not json")
    assert FlagCheck(Processes(), layout, lambda: False).faults("llama.cpp", str(renamed), "b1") == gone
    renamed.write_text(renamed.read_text() + "\n")
    FlagCheck(Processes(), layout, lambda: False).faults("llama.cpp", str(renamed), "b1")
    assert (tmp_path / "asked").read_text() == "x\nx\nx\n"
    assert len(json.loads((tmp_path / "data" / "state" / "flags.json").read_text())) == 2
    assert renamed.stat().st_mode & stat.S_IXUSR


def test_a_program_that_cannot_be_asked_loses_nothing(tmp_path):
    assert FlagCheck(Processes(), Layout(str(tmp_path)), lambda: False).faults("vllm", "/no/such/python", "0") == ()


def test_a_sentence_names_the_first_few():
    assert sentence("vllm 1", ("a", "b")) == "vllm 1 runs, and is not used: a; b"
    assert sentence("vllm 1", tuple("abcdefg")).endswith("a; b; c; d; e and 2 more")


def test_an_agent_does_not_offer_an_engine_whose_flag_is_gone(node, plane, renamed, tmp_path):
    config = tmp_path / "agent.yaml"
    config.write_text(f"engines:\n  llama.cpp: {{binary: {renamed}}}\n")
    (tmp_path / "asked").chmod(0o666)
    plane.want([EngineWanted("llama.cpp", "b10991")])
    node.start("--config", str(config))
    seen = plane.wait(lambda observed: observed.engines and observed.engines[0].phase in (
        EnginePhase.INSTALLED, EnginePhase.FAILED, EnginePhase.MISSING)).engines[0]
    assert seen.phase is EnginePhase.FAILED and not seen.usable
    assert "llama-server has no --metrics" in seen.message and seen.source == "operator"
    assert "newer llmgw" in seen.hint
