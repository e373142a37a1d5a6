"""The console's views: a state and a size in, lines out. No terminal is needed."""
from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.ctl.console import screen, state
from llmgw.ctl.console.screen import BAD, CHOSEN
from llmgw.ctl.console.state import DETAIL, HELP, LIST, OLLAMA, VIEWS, Job, State, press
from llmgw.ctl.ollama import Entry
from llmgw.ctl.output import columns
from llmgw.domain.engine import Asset
from llmgw.domain.model import Weights, WeightsFile
from llmgw.domain.view import EngineArchive, MirrorView, WeightsUse
from llmgw.parse import ollama_manifest
from tests.fakes import example_cluster

EVIL = "evil\x1b[2J\u202e\r\n\x07" + "long" * 60 + "模型"
MODELS = tuple(Weights(f"m{number}", "f" * 64, (WeightsFile(f"m{number}.gguf", 10 ** 9 + number, f"{number:064d}"),),
                       source="file:/x", projector="p.gguf" if number == 1 else "") for number in range(40))
MIRROR = MirrorView(MODELS, (EngineArchive("llama.cpp", "b10991", Asset("llama.tar.gz", 5, "e" * 64)),), ("pulling x: 3 %",),
                    10 ** 11, (WeightsUse("m0", ("chat",), ("r1",), ("anna", "bert")), WeightsUse("m2", damaged=("m2.gguf",))))
FULL = State(url="http://127.0.0.1:7800", data={"Nodes": example_cluster.THREE, "Mirror": MIRROR})
HOSTILE = replace(FULL, url=EVIL, problem=EVIL, said=EVIL, job=Job(EVIL, EVIL, 5, 10), data={
    "Nodes": (replace(example_cluster.GOOD, name=EVIL, state=EVIL, message=EVIL, warnings=(EVIL,)),),
    "Mirror": replace(MIRROR, models=(replace(MODELS[0], name=EVIL, source=EVIL),), activity=(EVIL,))})
LISTED = ((Entry(ollama_manifest.name("tiny"), 143, "a" * 64), "tiny"),
          (Entry(ollama_manifest.name("tiny-cloud"), problem="a cloud model"), ""))


def text(now, width=80, height=24):
    return "\n".join(line.text for line in screen.draw(now, width, height))


def keys(now, *pressed):
    wish = ""
    for key in pressed:
        now, wish = press(now, key)
    return now, wish


@pytest.mark.parametrize("now", [State(), FULL, HOSTILE, replace(FULL, mode=DETAIL), replace(FULL, view=1, mode=DETAIL),
                                 replace(HOSTILE, mode=DETAIL), replace(HOSTILE, view=1), replace(FULL, mode=HELP),
                                 replace(FULL, mode=OLLAMA), replace(FULL, mode=OLLAMA, ollama=LISTED),
                                 replace(HOSTILE, mode=OLLAMA, ollama_problem=EVIL, ollama=())])
@pytest.mark.parametrize("width, height", [(80, 24), (200, 60), (20, 6), (1, 1), (0, 0), (80, 3)])
def test_every_state_fills_every_size_exactly_and_obeys_nobody(now, width, height):
    lines = screen.draw(now, width, height)
    assert len(lines) == height
    for line in lines:
        assert columns(line.text) <= width
        assert line.text.isprintable() or line.text == ""


def test_nodes_are_shown_with_the_chosen_one_marked():
    shown = text(FULL)
    assert "[1 Nodes]" in shown and "anna" in shown and "bert" in shown and "3 nodes, 3 ready" in shown
    marked = [line for line in screen.draw(keys(FULL, "down")[0], 80, 24) if line.style == CHOSEN]
    assert len(marked) == 1 and marked[0].text.startswith("bert")


def test_enter_tells_all_of_a_node_and_escape_goes_back():
    now, _ = keys(FULL, "enter")
    shown = text(now, 100, 40)
    assert now.mode == DETAIL and "AMD EPYC 7763" in shown and "gemma-3-270m: whole" in shown
    assert keys(now, "escape")[0].mode == LIST
    scrolled = text(keys(now, "down", "down")[0], 80, 10)
    assert scrolled != text(now, 80, 10)


def test_the_mirror_shows_who_uses_what_and_what_is_damaged():
    now, _ = keys(FULL, "tab")
    lines = screen.draw(now, 110, 24)
    shown = "\n".join(line.text for line in lines)
    assert "chat" in shown and "anna, bert" in shown and "40 models" in shown and "pulling x: 3 %" in shown
    assert [line.style for line in lines if line.text.startswith("m2 ")] == [BAD]
    assert "vision" in text(keys(now, "down", "enter")[0]) and "p.gguf" in text(keys(now, "down", "enter")[0])


def test_a_long_list_follows_the_cursor_to_its_end():
    now, _ = keys(FULL, "tab", "end")
    assert now.cursor == 40 and "llama.cpp b10991" in text(now) and "llama.tar.gz" in text(keys(now, "enter")[0])
    assert keys(now, "down", "page down")[0].cursor == 40 and keys(now, "home", "up")[0].cursor == 0


def test_a_list_that_became_shorter_keeps_a_cursor_that_exists():
    now, _ = keys(FULL, "tab", "end")
    shrunk = replace(now, data={**now.data, "Mirror": replace(MIRROR, models=MODELS[:2])})
    assert shrunk.cursor == 2 and "[2 Mirror]" in text(shrunk)
    empty = replace(now, data={**now.data, "Mirror": MirrorView()})
    assert "press I to import from Ollama" in text(empty) and keys(empty, "enter")[0].mode == LIST


def test_a_lost_connection_keeps_what_was_known_and_says_so():
    now = replace(FULL, problem="http://x: connection refused")
    assert "anna" in text(now) and "what is shown may be old: http://x: connection refused" in text(now)


def test_capital_i_in_the_mirror_asks_for_ollamas_models_and_nowhere_else():
    assert keys(FULL, "I") == (FULL, "") or keys(FULL, "I")[1] == ""
    now, wish = keys(FULL, "tab", "I")
    assert (now.mode, wish) == (OLLAMA, state.ASK_OLLAMA) and "looking ..." in text(now)
    now = replace(now, ollama=LISTED)
    assert "tiny:latest" in text(now) and "cannot be taken" in text(now)
    assert "a cloud model" in text(keys(now, "down")[0])
    chosen, wish = keys(now, "enter")
    assert wish == state.IMPORT and chosen.job == Job("tiny:latest")
    assert keys(now, "down", "enter")[1] == ""                       # a cloud model cannot be imported
    again, wish = keys(chosen, "enter")
    assert wish == "" and again.said == "one import at a time"
    assert "no models here" in text(replace(now, ollama=())) and keys(now, "escape")[0].mode == LIST


@pytest.mark.parametrize("job, words", [
    (Job("m"), "m: begins ..."), (Job("m", "sending m.gguf", 30, 120), " 25 % of 120 B"), (Job("m", ended=True), "m: in the mirror"),
    (Job("m", ended=True, problem="no space left"), "m: no space left"), (Job("m", "x", 5, 3), "100 %")])
def test_an_import_has_a_bar(job, words):
    assert words in screen.bar(job, 80) and columns(screen.bar(job, 80)) <= 80
    if job.total_bytes == 120:
        assert "[#######" in screen.bar(job, 80)


def test_help_names_the_keys_of_every_view_and_returns_to_where_it_was_asked():
    now, _ = keys(FULL, "tab", "enter", "?")
    assert now.mode == HELP and "Mirror: I  import from Ollama" in text(now, 80, 30)
    assert keys(now, "?")[0].mode == DETAIL and keys(now, "escape")[0].mode == DETAIL
    for mode in (LIST, DETAIL, HELP, OLLAMA):
        assert press(replace(FULL, mode=mode), "q")[1] == state.QUIT


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["up", "down", "left", "right", "enter", "escape", "tab", "page up", "page down", "home",
                                 "end", "?", "I", "1", "2", "9", "x", ""]), max_size=30), st.integers(0, 120), st.integers(0, 40))
def test_no_row_of_keys_breaks_it(pressed, width, height):
    now = replace(FULL, ollama=LISTED)
    for key in pressed:
        now, wish = press(now, key)
        now = replace(now, ollama=LISTED) if wish == state.ASK_OLLAMA else now
        assert 0 <= now.view < len(VIEWS) and len(screen.draw(now, width, height)) == height


def test_the_keys_of_every_view_fit_eighty_columns():
    for at in range(len(VIEWS)):
        assert text(replace(FULL, view=at)).splitlines()[-1].rstrip().endswith("? help  q leave")
