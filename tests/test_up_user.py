"""Whom the engines of ``up`` run as: root's first try works in any folder, and says what it gives up."""
from __future__ import annotations

import os
import pathlib
import stat
import tempfile

import pytest

from llmgw.system import accounts
from llmgw.up_user import engine_user


@pytest.fixture(autouse=True)
def unnamed(monkeypatch):
    monkeypatch.delenv("LLMGW_ENGINE_USER", raising=False)


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: needs root")
def test_root_gives_up_the_user_only_where_it_may_not_enter_and_says_so(tmp_path):
    said = []
    closed = tmp_path / "closed" / "up"
    closed.mkdir(parents=True)
    (tmp_path / "closed").chmod(0o700)
    assert engine_user(str(closed), said.append) == "root"
    assert said[0].startswith("engines run as root: the user llmgw-engine may not enter /")
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        up = pathlib.Path(folder) / "up"
        up.mkdir(mode=0o700)
        told = engine_user(str(up), said.append)
        if accounts.sees_others():
            assert told == "" and len(said) == 1
            assert stat.S_IMODE(up.stat().st_mode) == 0o711, "to pass through, not to look into"


def test_what_the_environment_names_is_left_to_the_agent(monkeypatch, tmp_path):
    monkeypatch.setenv("LLMGW_ENGINE_USER", "somebody")
    assert engine_user(str(tmp_path), pytest.fail) == ""


@pytest.mark.skipif(os.geteuid() == 0, reason="NOT TESTED: needs to be no root")
def test_nobody_but_root_asks(tmp_path):
    assert engine_user(str(tmp_path), pytest.fail) == ""
