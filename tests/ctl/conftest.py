"""What the tests of ctl share."""
from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from tests.fakes.control_api import FakeControlApi

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def ctl(tmp_path):
    """Run one ctl command as a process; ``server`` is its --server, ``env`` comes on top."""
    token = tmp_path / "token"
    token.write_text("llmgw_admin_00000000_secret\n")

    def run(*words, server="", env=None, timeout=60):
        given = ["--server", server, "--token-file", str(token)] if server else []
        clean = {name: value for name, value in os.environ.items()
                 if not name.startswith("LLMGW_") and name not in ("COLUMNS", "NO_COLOR")}
        return subprocess.run(
            [sys.executable, "-W", "error", "-m", "llmgw", "ctl", *words, *given], stdin=subprocess.DEVNULL,
            env={**clean, "PYTHONPATH": str(ROOT / "src"), "LLMGW_DATA_DIR": str(tmp_path / "data"), **(env or {})},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=timeout, check=False)

    return run


@pytest.fixture
def fake():
    """Make stand-ins for a control plane that answer what they were given."""
    made = []

    def make(answers):
        made.append(FakeControlApi(answers))
        return made[-1]

    yield make
    for each in made:
        each.close()
