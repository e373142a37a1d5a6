"""A new list of packages for a version that is installed already: its environment serves until the new one runs.

Packages are stand-ins of a few lines; uv, the Python and the environments are real.
"""
from __future__ import annotations

import dataclasses
import os
import pathlib
import signal

import pytest

from llmgw.agent.board import Board, Desired, Usable
from llmgw.agent.engine_user import EngineUser
from llmgw.agent.engines import EngineKeeper
from llmgw.agent.layout import Layout
from llmgw.agent.ports import Ports
from llmgw.agent.shard import ShardKeeper
from llmgw.domain.engine import EngineObserved, EnginePhase
from llmgw.domain.heartbeat import NodeDesired
from llmgw.domain.model import ModelSpec, Weights, WeightsFile, WeightsObserved, WeightsPhase
from llmgw.domain.node import Gpu, NodeIdentity
from llmgw.domain.replica import ShardState, ShardWanted
from llmgw.domain.secret import Secret
from llmgw.system.clock import Clock
from tests.agent.conftest import free_block, wait_for
from tests.fakes.package_index import PackageIndex
from tests.fakes.python_fleet import FACTS, Fleet, tiny_vllm

CARD = dataclasses.replace(FACTS, gpus=(Gpu("GPU-a", 0, "H100"),))
KEY = ("vllm", "0.30.1")
SHARD = ShardWanted("r1.0", "r1", 0, ModelSpec("m", "vllm", "mirror:m"), KEY[1], Weights("m", "f", ()), Secret("k"))


class Later(Clock):
    """A clock that can be put forward."""

    added = 0.0

    def monotonic(self):
        return super().monotonic() + self.added


class Node:
    """A keeper of engines, its board and its data folder."""

    def __init__(self, fleet, folder, index):
        self.fleet, self.folder, self.index, self.clock = fleet, folder, index, Later()
        self.board = Board(NodeIdentity("n1", "1", "boot", "127.0.0.1"))
        self.board.put_facts(CARD)
        self.python = fleet.installer(folder, {"UV_DEFAULT_INDEX": index.url, "UV_HTTP_RETRIES": "0"})
        self.restart()

    def restart(self):
        self.keeper = EngineKeeper(None, self.python, self.board, Layout(str(self.folder)), self.clock, ())
        self.keeper.recall()

    def turn(self, *shards):
        """Hear what the control plane wants now, and take a turn."""
        self.board.put_desired(Desired(1, 1, NodeDesired((self.fleet.wanted(),), shards)))
        self.clock.added += 1000                   # what failed is tried again, what is installed looked at
        self.keeper.turn()
        return self.board.engine(KEY)

    def folders(self):
        return sorted(path.name for path in (self.folder / "engines" / "vllm").iterdir())

    def kept(self):
        return sorted(path.name for path in (self.folder / "state" / "packages").iterdir())


@pytest.fixture
def node(tmp_path, uv_archive, python_archive):
    (tmp_path / "server").mkdir()
    fleet = Fleet(tmp_path / "server", uv_archive, python_archive)
    with PackageIndex() as index:
        tiny_vllm(index)
        made = Node(fleet, tmp_path / "n1", index)
        made.turn()
        yield made
    fleet.close()


def runs(node, usable):
    node.board.put_program(KEY, "r1.0", usable.program)


def test_stand_in_the_old_environment_serves_until_the_new_one_runs_and_nothing_runs_of_the_old(node):
    seen, old = node.board.engine(KEY)
    assert seen.phase is EnginePhase.INSTALLED and node.folders() == ["0.30.1"]
    node.fleet.locks.relock(node.fleet.wanted())
    node.index.gone.add("tinydep-1.1-py3-none-any.whl")
    node.index.add("tinydep", "1.1")
    seen, usable = node.turn(SHARD)
    assert usable == old and seen.phase is EnginePhase.INSTALLED and seen.usable
    assert seen.message.startswith("vllm 0.30.1; new packages: vllm 0.30.1: installing its packages failed: "
                                   "tinydep-1.1-py3-none-any.whl was withdrawn from the package index")
    assert "tried again in" in seen.message and "relock" in seen.hint and node.folders() == ["0.30.1"]

    node.index.gone.clear()
    seen, new = node.turn(SHARD)
    assert seen.message == "vllm 0.30.1" and new.program != old.program and new.former == (str(node.folder / "engines/vllm/0.30.1"),)
    (first, second) = node.folders()
    assert (first, second[:7]) == ("0.30.1", "0.30.1~"), "the shard was not looked at yet: it may run of the old"
    assert node.board.put_program(KEY, "r1.0", old.program) == "vllm 0.30.1 was installed again, of other packages"
    node.turn(SHARD)
    assert node.folders() == [first, second]

    node.restart()                                 # the newest is the one in force
    assert node.turn(SHARD)[1] == new and node.folders() == [first, second]
    assert node.board.take_engine(KEY, "r1.0") == new and node.board.put_program(KEY, "r1.0", new.program) == ""
    node.turn(SHARD)
    assert node.folders() == [second] and node.kept() == ["vllm-0.30.1.txt"]
    node.turn(SHARD)
    assert node.board.engine(KEY)[1].program == new.program and not (node.folder / "tools" / "uv-cache").exists()
    assert len([*node.folder.glob("tools/uv-*"), *node.folder.glob("tools/python-*")]) == 2
    node.board.put_desired(Desired(1, 2, NodeDesired((), ())))
    node.keeper.turn()                             # nobody wants it any more: only its lists are left
    assert node.folders() == [] and node.kept() == ["vllm-0.30.1.txt", f"vllm-{second}.txt"]
    assert [*node.folder.glob("tools/uv-*"), *node.folder.glob("tools/python-*")] == []


def test_stand_in_a_new_list_that_says_the_same_installs_nothing(node):
    _, old = node.board.engine(KEY)
    node.index.web.requests.clear()
    node.fleet.locks.relock(node.fleet.wanted())
    wanted = node.fleet.wanted()                   # as it is heard again before the server has the new list
    for _ in range(2):
        node.board.put_desired(Desired(1, 1, NodeDesired((wanted,), (SHARD,))))
        node.keeper.turn()
    assert node.board.engine(KEY)[1] == old and node.folders() == ["0.30.1"]
    asked = node.index.web.paths()
    assert sum(path.endswith("/vllm/") for path in asked) == 1 and not any(path.endswith(".whl") for path in asked)
    assert dict(node.fleet.wanted().locks).popitem()[1] == node.keeper._installed[KEY].packages


def test_stand_in_an_index_that_is_down_changes_nothing_but_the_sentence(node):
    _, old = node.board.engine(KEY)
    node.fleet.locks.relock(node.fleet.wanted())
    node.python._given["UV_DEFAULT_INDEX"] = "http://127.0.0.1:9/simple"
    seen, usable = node.turn(SHARD)
    assert usable == old and "the package index cannot be reached" in seen.message and node.folders() == ["0.30.1"]
    node.restart()
    seen, usable = node.turn(SHARD)
    assert usable == old and "the package index cannot be reached" in seen.message


def test_stand_in_a_shard_tells_that_it_runs_of_what_was_replaced_until_it_is_started_again(tmp_path):
    board, layout = Board(NodeIdentity("n1", "1", "boot", "127.0.0.1")), Layout(str(tmp_path))
    old, new = (pathlib.Path(layout.engines, "llama.cpp", name) for name in ("b1", "b1~0"))
    for folder in (old, new):
        folder.mkdir(parents=True)
        (folder / "llama-server").write_text("#!/bin/sh\nexec sleep 600\n")
        (folder / "llama-server").chmod(0o755)
    seen = EngineObserved("llama.cpp", "b1", EnginePhase.INSTALLED, usable=True)
    board.put_engine(seen, Usable(str(old / "llama-server")))
    board.put_weights(WeightsObserved("m", "f", WeightsPhase.WHOLE))
    wanted = dataclasses.replace(SHARD, model=ModelSpec("m", "llama.cpp", "mirror:m"), engine_version="b1",
                                 weights=Weights("m", "f", (WeightsFile("m.gguf", 1, "0" * 64),)))
    keeper = ShardKeeper(wanted, board, layout, Ports(free_block()), Clock(), EngineUser("root", layout, print))

    def turn():
        keeper.turn()
        return board.shards()[0]
    try:
        wait_for(lambda: turn().state is ShardState.STARTING, what="it is started")
        assert turn().outdated == "" and board.programs() == {"r1.0": str(old / "llama-server")}
        board.put_engine(seen, Usable(str(new / "llama-server"), former=(str(old),)))
        assert turn().outdated == "llama.cpp b1 was installed again, of other packages"
        another = ShardKeeper(wanted, board, layout, Ports(free_block()), Clock(), EngineUser("root", layout, print))
        another.adopt()                            # by the next agent too
        assert board.shards()[0].outdated and board.programs() == {"r1.0": str(old / "llama-server")}
        os.kill(board.shards()[0].pid, signal.SIGKILL)
        wait_for(lambda: turn().state is ShardState.BACKOFF, what="it has ended")
        assert board.shards()[0].outdated == "" and board.programs() == {"r1.0": ""}
    finally:
        keeper.end()
        wait_for(lambda: turn().state is ShardState.STOPPED, what="it is gone")
