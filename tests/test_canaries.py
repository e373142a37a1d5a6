"""The search for secrets that every run of the tests ends with."""
from __future__ import annotations

import json

import pytest

from tests import canaries

TOKEN = "llmgw_node_CANARY01_" + "t" * 43
REPLICA_KEY = "k" * 20 + "-" + "K" * 22


@pytest.fixture
def folder(tmp_path):
    """A folder as clusters leave it: secrets where they belong, and a log."""
    (tmp_path / "server" / "tokens").mkdir(parents=True)
    (tmp_path / "server" / "tokens" / "node").write_text(TOKEN + "\n")
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "desired.json").write_text(json.dumps({"shards": [{"key": REPLICA_KEY, "model": "m"}]}))
    (tmp_path / "server.log").write_text(
        f"started token=llmgw_node_CANARY01_*** sha256={'a' * 64} name={'n' * 43} llmgw1.***\n")
    yield tmp_path
    for path in [*tmp_path.rglob("*.log*"), *tmp_path.rglob("command"), *tmp_path.rglob("*.argv")]:
        path.unlink()                             # this run ends with the search, too


def test_secrets_where_they_belong_and_hashes_in_logs_are_no_fault(folder):
    assert canaries.search(folder) == []


@pytest.mark.parametrize("name", ["server.log", "server.log.1", "shards/m-1.0/engine.log", "command", "words.argv"])
@pytest.mark.parametrize("secret", [
    TOKEN, TOKEN[-43:], REPLICA_KEY, f"http://x/?api_key={REPLICA_KEY}&a=b", "llmgw_infer_00000000_" + "u" * 43,
    "llmgw1." + "p" * 43 + ".CANARY02." + "j" * 51], ids=lambda value: value[:24])
def test_one_where_none_may_be_is_found(folder, name, secret):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"some words\nand {secret} in the middle\n")
    fault, = canaries.search(folder)
    assert fault.startswith(f"{path}: ") and secret not in fault, "the report is a log, too"
