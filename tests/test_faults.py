"""docs/faults.md: every row has its tests, and each of them exists."""
from __future__ import annotations

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
ROWS = [[cell.strip() for cell in line.strip("|").split("|")]
        for line in (ROOT / "docs" / "faults.md").read_text(encoding="utf-8").splitlines()
        if re.match(r"\| [KFR][0-9]", line)]
NUMBERS = [f"K{at}" for at in range(1, 14)] + [f"F{at}" for at in range(1, 46)] \
    + [f"R{at}" for at in range(1, 30)] + ["R30a", "R30b", "R30c", "R30d"]


def test_no_row_is_missing_or_doubled():
    assert [row[0] for row in ROWS] == NUMBERS


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_row_names_tests_that_exist(row):
    number, happens, follows, tests = row
    named = re.findall(r"`(tests/[^`]*)`", tests)
    assert happens and follows and (named or re.fullmatch("later: [a-z ]+", tests))
    for name in named:
        path, _, function = name.partition("::")
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, name
