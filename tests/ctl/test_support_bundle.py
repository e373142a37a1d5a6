"""`ctl support-bundle`: everything a helper needs in one file, and no secret in it."""
from __future__ import annotations

import json
import tarfile

from llmgw.ctl.support_bundle import packed, without_secrets

SECRET = "llmgw_infer_0a1b2c3d_" + "s" * 43
REPLICA = {"id": "m-1", "model": "m", "shards": [{"rank": 0, "observed": {"first_failure": {
    "message": "the engine ended", "command": f"llama-server --api-key {SECRET}", "log_tail": f"Authorization: Bearer {SECRET}"}}}]}


def read(path):
    with tarfile.open(path) as archive:
        return {member.name: archive.extractfile(member).read().decode() for member in archive}


def test_states_failures_and_logs_are_in_it_and_secrets_are_not(ctl, fake, tmp_path):
    api = fake({"GET /v1/nodes": {"items": [{"name": "n1", "key": "hidden-value"}]}, "GET /v1/models": {"items": []}, "GET /v1/replicas": {"items": [REPLICA]},
                "GET /v1/engines": {"items": []}, "GET /v1/mirror": {"models": []}, "GET /v1/events": {"items": [{"id": 1, "message": "Placed"}]},
                "GET /v1/replicas/m-1/log": {"request": "1", "text": f"started\nkey {SECRET}\n", "problem": ""}})
    done = ctl("support-bundle", str(tmp_path / "b.tar.gz"), server=api.url)
    assert done.returncode == 0, done.stderr
    found = read(tmp_path / "b.tar.gz")
    assert {name.partition("/")[2] for name in found} == {"about.json", "nodes.json", "models.json", "replicas.json", "engines.json",
                                                          "mirror.json", "events.json", "logs/m-1.log"}
    assert "the engine ended" in found["llmgw-support/replicas.json"] and "started" in found["llmgw-support/logs/m-1.log"]
    everything = "".join(found.values())
    assert SECRET not in everything and "s" * 43 not in everything and "hidden-value" not in everything
    assert (tmp_path / "b.tar.gz").stat().st_mode & 0o777 == 0o600


def test_what_cannot_be_had_is_named(ctl, fake, tmp_path):
    api = fake({"GET /v1/nodes": {"items": []}, "GET /v1/replicas": {"items": [REPLICA]}})
    done = ctl("support-bundle", str(tmp_path / "b.tar.gz"), server=api.url)
    assert done.returncode == 0 and "not in it: models" in done.stderr
    assert "log of m-1" in read(tmp_path / "b.tar.gz")["llmgw-support/missing.txt"]


def test_secrets_are_hidden_by_name_at_every_depth():
    assert without_secrets({"a": [{"Secret": "x", "key": "", "token": None, "n": {"password": "y"}}]}) == {
        "a": [{"Secret": "***", "key": "", "token": None, "n": {"password": "***"}}]}
    assert json.loads(json.dumps(without_secrets([1, "a", None]))) == [1, "a", None]
    assert packed({"a": "b"}, 0.0)[:2] == b"\x1f\x8b"
