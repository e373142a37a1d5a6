"""The console's screen as lines: a state and a size in, exactly that many lines out."""
from __future__ import annotations

from dataclasses import dataclass
from typing import List, Sequence, Tuple

from llmgw.ctl import output
from llmgw.ctl.console.state import DETAIL, HELP, OLLAMA, VIEWS, Job, State
from llmgw.ctl.output import Row

PLAIN, BAR, BOLD, CHOSEN, DIM, BAD = "plain", "bar", "bold", "chosen", "dim", "bad"
FRAME = 4                     # lines that are not the body: title, table head, message, keys
_HELP = (
    "Up Down PageUp PageDown Home End   move",
    "Left Right Tab 1 2                 another view",
    "Enter                              all that is known of the chosen line",
    "Esc                                back",
    "?                                  this help",
    "q                                  leave",
    "",
    "What is shown is asked again every two seconds. Nothing that happens here is lost",
    "when you leave, but an import: the next one of the same model goes on where it stopped.",
    "",
    "Views and their own keys:")


@dataclass(frozen=True)
class Line:
    """One line of the screen, without anything that could move a cursor."""

    text: str
    style: str = PLAIN


def draw(state: State, width: int, height: int) -> List[Line]:
    """Return ``height`` lines of at most ``width`` columns."""
    body = max(0, height - FRAME)
    head, lines = _body(state, width, body)
    lines = [*lines[:body], *[Line("")] * (body - len(lines))]
    frame = [_title(state, width), head, *lines, _message(state, width), _keys(state, width)]
    return [Line(_fitted(line.text, width), line.style) for line in frame[:height]]


def _fitted(text: str, width: int) -> str:
    return output.cut(text, width) if width > 0 else ""


def _title(state: State, width: int) -> Line:
    tabs = "  ".join(f"[{at + 1} {view.name}]" if at == state.view else f" {at + 1} {view.name} "
                     for at, view in enumerate(VIEWS))
    left = f" llmgw  {tabs}"
    right = output.clean(state.url) + " "
    room = width - output.columns(left) - output.columns(right)
    return Line(f"{left}{' ' * room}{right}" if room > 0 else left + " " * max(0, width - output.columns(left)), BAR)


def _body(state: State, width: int, room: int) -> Tuple[Line, List[Line]]:
    if state.mode == HELP:
        return Line("help", BOLD), _text(_help_lines(), state.scroll, width, room)
    data = state.data.get(state.shown.name)
    if state.mode == OLLAMA:
        return _ollama(state, width, room)
    if data is None:
        return Line(""), [Line("" if state.problem else "asking ...", DIM)]
    if state.mode == DETAIL and state.count:
        return Line(state.shown.name, BOLD), _text(state.shown.detail(data, state.cursor), state.scroll, width, room)
    rows = state.shown.rows(data)
    if not rows:
        return Line(""), [Line(state.shown.empty, DIM)]
    return _table(state.shown.titles, rows, state.cursor, width, room)


def _help_lines() -> List[str]:
    lines = list(_HELP)
    for view in VIEWS:
        lines += [f"  {view.name}: {key}  {what}" for key, what in view.keys] or [f"  {view.name}"]
    return lines


def _text(lines: Sequence[str], scroll: int, width: int, room: int) -> List[Line]:
    """Return a window of a text whose lines are wrapped."""
    wrapped = [piece for line in lines for piece in output.wrapped(line, width)]
    first = max(0, min(scroll, len(wrapped) - room))
    return [Line(piece) for piece in wrapped[first:first + room]]


def _table(titles: Sequence[str], rows: Sequence[Row], cursor: int, width: int, room: int) -> Tuple[Line, List[Line]]:
    """Return the head and the rows around the cursor."""
    first = max(0, min(cursor - room // 2, len(rows) - room))
    short = [Row((output.cut(output.clean(row.cells[0]), max(8, width // 2)), *row.cells[1:]))
             for row in rows[first:first + room]]
    lines = output.table(titles, short, width=max(width, 1))
    if len(lines) != len(short) + 1:             # too narrow for columns
        lines = [titles[0], *(output.clean(" ".join(row.cells)) for row in short)]
    shown = []
    for at, text in enumerate(lines[1:], first):
        text = _fitted(text, width)
        padded = text + " " * max(0, width - output.columns(text))
        shown.append(Line(padded, CHOSEN) if at == cursor else Line(text, _style(rows[at])))
    return Line(lines[0], BOLD), shown


def _style(row: Row) -> str:
    return BAD if {"lost", "unreachable", "damaged"} & set(row.cells) else PLAIN


def _ollama(state: State, width: int, room: int) -> Tuple[Line, List[Line]]:
    if state.ollama_problem:
        return Line("models of Ollama", BOLD), _text([state.ollama_problem], 0, width, room)
    if state.ollama is None:
        return Line("models of Ollama", BOLD), [Line("looking ...", DIM)]
    if not state.ollama:
        return Line("models of Ollama", BOLD), [Line("Ollama has no models here", DIM)]
    rows = [Row((str(entry.name), output.size(entry.size_bytes) if not entry.problem else "-",
                 "yes" if entry.vision else "no", kept or "-",
                 "cannot be taken" if entry.problem else "Enter imports it"))
            for entry, kept in state.ollama]
    return _table(("MODEL OF OLLAMA", "SIZE", "VISION", "IN THE MIRROR", ""), rows, state.ollama_cursor, width, room)


def _message(state: State, width: int) -> Line:
    if state.job is not None and (not state.job.ended or state.mode == OLLAMA):
        return Line(bar(state.job, width), BAD if state.job.problem else PLAIN)
    if state.mode == OLLAMA and state.ollama and state.ollama[state.ollama_cursor][0].problem:
        return Line(output.clean(state.ollama[state.ollama_cursor][0].problem))
    if state.problem:
        return Line(f"what is shown may be old: {output.clean(state.problem)}", BAD)
    if state.said:
        return Line(output.clean(state.said), DIM)
    data = state.data.get(state.shown.name)
    return Line(output.clean(state.shown.summary(data)) if data is not None else "", DIM)


def bar(job: Job, width: int) -> str:
    """Return an import's progress in one line."""
    name = output.clean(job.name)
    if job.problem:
        return f"{name}: {output.clean(job.problem)}"
    if job.ended:
        return f"{name}: in the mirror"
    if not job.total_bytes:
        return f"{name}: {output.clean(job.what) or 'begins ...'}"
    percent = min(100, 100 * job.done_bytes // job.total_bytes)
    tail = f" {percent:3d} % of {output.size(job.total_bytes)}"
    what = output.cut(output.clean(job.what), max(10, width - len(tail) - 24))
    cells = max(5, min(30, width - output.columns(what) - len(tail) - 4))
    return f"{what} [{'#' * (cells * percent // 100):<{cells}}]{tail}"


def _keys(state: State, width: int) -> Line:
    keys = {HELP: "Esc back", DETAIL: "Up Down move  Esc back",
            OLLAMA: "Up Down choose  Enter import  Esc back"}.get(state.mode, "")
    if not keys:
        own = "".join(f"  {key} {what}" for key, what in state.shown.keys)
        keys = f"Up Down move  Enter more  Tab view{own}"
    return Line(f" {keys}  ? help  q leave".ljust(max(0, width)), BAR)
