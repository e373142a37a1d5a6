"""What the console shows and what a key does to it: values in, values out."""
from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Mapping, Optional, Tuple

from llmgw.ctl.console import mirror, nodes
from llmgw.ctl.console.view import View
from llmgw.ctl.ollama import Entry

VIEWS: Tuple[View, ...] = (nodes.VIEW, mirror.VIEW)

LIST, DETAIL, HELP, OLLAMA = "list", "detail", "help", "ollama"
UP, DOWN, LEFT, RIGHT, PAGE_UP, PAGE_DOWN, HOME, END, ENTER, ESCAPE, TAB = (
    "up", "down", "left", "right", "page up", "page down", "home", "end", "enter", "escape", "tab")
QUIT, ASK_OLLAMA, IMPORT = "quit", "ask ollama", "import"      # what a key asks of the world
PAGE = 10
_STEPS = {UP: -1, DOWN: 1, "k": -1, "j": 1, PAGE_UP: -PAGE, PAGE_DOWN: PAGE, HOME: -(1 << 30), END: 1 << 30}


@dataclass(frozen=True)
class Job:
    """An import under way, or the one that ended last."""

    name: str
    what: str = ""
    done_bytes: int = 0
    total_bytes: int = 0
    ended: bool = False
    problem: str = ""


@dataclass(frozen=True)
class State:
    """Everything that is on the screen."""

    url: str = ""
    view: int = 0
    mode: str = LIST
    before_help: str = LIST
    cursors: Mapping[str, int] = field(default_factory=dict)      # by view
    scroll: int = 0                                               # of details and help
    data: Mapping[str, Any] = field(default_factory=dict)         # by view; absent: not asked yet
    problem: str = ""                                             # why what is shown may be old
    ollama: Optional[Tuple[Tuple[Entry, str], ...]] = None        # (model, its name in the mirror); None: asking
    ollama_problem: str = ""
    ollama_cursor: int = 0
    job: Optional[Job] = None
    said: str = ""                                                # what an import told last

    @property
    def shown(self) -> View:
        return VIEWS[self.view]

    @property
    def count(self) -> int:
        """How many rows the view has."""
        data = self.data.get(self.shown.name)
        return len(self.shown.rows(data)) if data is not None else 0

    @property
    def cursor(self) -> int:
        return max(0, min(self.cursors.get(self.shown.name, 0), self.count - 1))


Pressed = Tuple[State, str]


def press(state: State, key: str) -> Pressed:
    """Return the state after ``key``, and what it asks of the world (mostly nothing)."""
    if key in ("q", "Q"):
        return state, QUIT
    if key == "?":
        if state.mode == HELP:
            return replace(state, mode=state.before_help, scroll=0), ""
        return replace(state, mode=HELP, before_help=state.mode, scroll=0), ""
    return {LIST: _in_list, DETAIL: _in_text, HELP: _in_text, OLLAMA: _in_ollama}[state.mode](state, key)


def _in_list(state: State, key: str) -> Pressed:
    if key in (TAB, RIGHT):
        return replace(state, view=(state.view + 1) % len(VIEWS)), ""
    if key == LEFT:
        return replace(state, view=(state.view - 1) % len(VIEWS)), ""
    if key.isdigit() and 1 <= int(key) <= len(VIEWS):
        return replace(state, view=int(key) - 1), ""
    if key == ENTER:
        return (replace(state, mode=DETAIL, scroll=0), "") if state.count else (state, "")
    if key in ("i", "I") and state.shown is mirror.VIEW:
        return replace(state, mode=OLLAMA, ollama=None, ollama_problem="", ollama_cursor=0), ASK_OLLAMA
    moved = _moved(state.cursor, key, state.count)
    return replace(state, cursors={**state.cursors, state.shown.name: moved}), ""


def _in_text(state: State, key: str) -> Pressed:
    if key in (ESCAPE, ENTER, LEFT):
        return replace(state, mode=state.before_help if state.mode == HELP else LIST, scroll=0), ""
    return replace(state, scroll=_moved(state.scroll, key, 1 << 20)), ""


def _in_ollama(state: State, key: str) -> Pressed:
    listed = state.ollama or ()
    if key in (ESCAPE, LEFT):
        return replace(state, mode=LIST), ""
    if key == ENTER and listed and not listed[state.ollama_cursor][0].problem:
        if state.job is not None and not state.job.ended:
            return replace(state, said="one import at a time"), ""
        name = str(listed[state.ollama_cursor][0].name)
        return replace(state, job=Job(name), said=""), IMPORT
    return replace(state, ollama_cursor=_moved(state.ollama_cursor, key, len(listed))), ""


def _moved(at: int, key: str, count: int) -> int:
    return max(0, min(at + _STEPS.get(key, 0), count - 1))
