"""server.yaml is broken while the server runs: the old one stays in force, the fault is told once with line and key."""
from __future__ import annotations

import json
import os

import pytest

from tests.whole.bad_day import NOWHERE, log_lines
from tests.whole.cluster import Cluster, until

pytestmark = pytest.mark.slow
GOOD = """\
listen: 127.0.0.1:0
engines:
  llama.cpp: {version: b10991}
models:
  - name: one
    engine: llama.cpp
    weights: mirror:one
"""


@pytest.fixture(scope="module")
def place(pyz, qa_template, tmp_path_factory):
    made = Cluster(pyz, tmp_path_factory.mktemp("edit"), qa_template)
    made.env["LLMGW_GITHUB_API"] = NOWHERE
    made.config.write_text(GOOD)
    try:
        made.start_server()
        yield made
    finally:
        made.close()


def write(place, data):
    """As an editor does it: a new file takes the old one's place."""
    scratch = place.folder / "server.yaml.new"
    scratch.write_bytes(data if isinstance(data, bytes) else data.encode())
    os.replace(scratch, place.config)


def state(place):
    return json.loads(place.ctl("models", "--json"))


def told(place):
    return [event for event in place.items("events") if event["subject"] == "config"]


@pytest.mark.parametrize("data, says, advice", [
    (GOOD.replace("    engine", "\tengine"), "line 6: a tab", "indent with spaces"),
    (GOOD + "engines: {}\n", "line 8: engines: this key stands here a second time", "keep one of them"),
    (GOOD + "    replcas: 2\n", "line 8: models[0].replcas: unknown key, did you mean replicas", "known here: name"),
    (GOOD.replace("name: one", "name: -one"), "line 5: models[0].name: name '-one' is not allowed", "not starting"),
    (GOOD + "    args: [--port, 1]\n", "line 8: models[0].args[0]: --port is set by llmgw", "remove it"),
    (GOOD + "#" * 10_000_000, "server.yaml: larger than 1048576 bytes", "check that this is the right file"),
    (GOOD.encode("utf-16"), "line 1: not UTF-8", "save the file as UTF-8"),
    (GOOD[:90], "line", ""),
], ids=["a tab", "a key twice", "an unknown key", "a name with a dash", "a flag of ours", "10 MB", "utf-16", "cut off"])
def test_a_bad_edit_changes_nothing_and_is_told_once_with_line_and_key(place, data, says, advice):
    before, lines = len(told(place)), len(log_lines(place, "server"))
    write(place, data)
    problem = until("the edit is refused", lambda: state(place)["config_problem"])
    assert problem.startswith(f"{place.config}: ") and says in problem
    shown = place.ctl("models", ok=False)
    assert f"server.yaml is not used as it is now: {problem}" in shown.stderr and "one" in shown.stdout
    assert [model["name"] for model in state(place)["items"]] == ["one"]
    event, = told(place)[before:]
    assert event["reason"] == "InvalidConfig" and problem in event["message"] and advice in event["message"]
    assert [level for level, text in log_lines(place, "server")[lines:] if problem in text] == ["ERROR"]
    write(place, GOOD)
    until("it is repaired", lambda: not state(place)["config_problem"])
    assert [event["reason"] for event in told(place)[before:]] == ["InvalidConfig", "Repaired"]


@pytest.mark.parametrize("change", [lambda text: "\ufeff" + text, lambda text: text.replace("\n", "\r\n")],
                         ids=["a BOM", "CRLF"])
def test_an_edit_by_another_systems_editor_is_taken(place, change):
    write(place, change(GOOD.replace("name: one", "name: other")))
    until("the edit is in force", lambda: [model["name"] for model in state(place)["items"]] == ["other"])
    write(place, GOOD)
    until("it is back", lambda: [model["name"] for model in state(place)["items"]] == ["one"])


def test_a_file_that_is_gone_or_a_folder_changes_nothing(place):
    for make, undo, says in ((lambda: None, lambda: None, "no such file"),
                             (place.config.mkdir, place.config.rmdir, "Is a directory")):
        if place.config.exists():
            place.config.unlink()
        make()
        until(says, lambda says=says: says in state(place)["config_problem"])
        assert [model["name"] for model in state(place)["items"]] == ["one"]
        undo()
    write(place, GOOD)
    until("it is repaired", lambda: not state(place)["config_problem"])


def test_a_restart_with_a_broken_file_is_refused_and_loses_nothing(place):
    write(place, GOOD + "    replcas: 2\n")
    until("the edit is refused", lambda: state(place)["config_problem"])
    assert place.stop("server") == 0
    place.start("server", "server", "--config", place.config, "--data-dir", place.dir("server"))
    assert place.children.pop("server").wait(30) == 78
    assert place.log("server").read_text().splitlines()[-2].startswith(f"llmgw: {place.config}: line 8: models[0].replcas")
    write(place, GOOD)
    place.start_server()
    assert [model["name"] for model in state(place)["items"]] == ["one"]
    assert "Traceback" not in place.log("server").read_text()
