"""launch_mode: ray with an environment that an operator brought: a Ray without tokens is refused, and named."""
from __future__ import annotations

import sys

import pytest

from llmgw.agent.board import Board, Desired
from llmgw.agent.engines import EngineKeeper
from llmgw.agent.layout import Layout
from llmgw.agent.python_engine import PythonInstaller
from llmgw.domain.cluster import OperatorEngine
from llmgw.domain.engine import EnginePhase, EngineWanted
from llmgw.domain.heartbeat import NodeDesired
from llmgw.domain.node import NodeIdentity
from llmgw.engines import recipes
from llmgw.system.clock import Clock
from llmgw.system.process import Processes
from tests.fakes.python_fleet import FACTS, MAIN


def brought(folder, ray):
    """A Python that holds a stand-in for vLLM 0.30.0, and Ray's name and version."""
    package = folder / "site" / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    for each in (package, package.parent, package.parent.parent):
        (each / "__init__.py").write_text("")
    (package / "main.py").write_text(MAIN)
    for name, version in (("vllm", "0.30.0+cpu"), ("ray", ray)):
        info = folder / "site" / f"{name}-{version}.dist-info"
        if version:
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    python = folder / "python"
    python.write_text(f"#!/bin/sh\nPYTHONPATH={folder}/site exec {sys.executable} \"$@\"\n")
    python.chmod(0o755)
    return str(python)


@pytest.mark.parametrize("with_ray, ray, words", [
    (True, "2.51.2", "it holds ray 2.51.2, launch_mode: ray needs Ray 2.52 or newer"),
    (True, "", "has no package ray, launch_mode: ray needs Ray 2.52 or newer"),
    (True, "2.52.0", ""), (True, "3.0.0.dev0", ""), (False, "2.9.0", "")])
def test_an_environment_with_a_stand_in_for_vllm_is_offered_for_ray_only_with_one_that_knows_tokens(tmp_path, with_ray, ray, words):
    board, layout = Board(NodeIdentity("n1", "1", "boot", "127.0.0.1", 0, {})), Layout(str(tmp_path / "data"))
    python = PythonInstaller(None, layout, Processes(), None, "n1", {}, lambda: FACTS, lambda: False, recipes.RECIPES)
    keeper = EngineKeeper(None, python, board, layout, Clock(), [OperatorEngine("vllm", brought(tmp_path, ray))])
    board.put_facts(FACTS)
    board.put_desired(Desired(1, 1, NodeDesired(engines=(EngineWanted("vllm", "0.30.0", with_ray=with_ray),))))
    keeper.turn()
    seen, usable = board.engine(("vllm", "0.30.0"))
    if words:
        assert words in seen.message and seen.phase is EnginePhase.MISSING and usable is None
        assert "ray[default]>=2.52" in seen.hint and "launch_mode: mp" in seen.hint
    else:
        assert seen.phase is EnginePhase.INSTALLED and usable is not None
