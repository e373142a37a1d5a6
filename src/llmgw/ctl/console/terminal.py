"""The one module that knows curses: keys in, lines out."""
from __future__ import annotations

import contextlib
import curses
import locale
import os
from typing import TYPE_CHECKING, Any, Dict

from llmgw.ctl.console import screen, state
from llmgw.ctl.console.feed import Feed, Told
from llmgw.ctl.console.state import State
from llmgw.domain.errors import UsageError

if TYPE_CHECKING:
    from _curses import window as Window
else:
    Window = Any

WAIT_MILLISECONDS = 100           # for a key, before looking whether something new has come
ESCAPE_MILLISECONDS = 50          # after which a lone Esc is one, and no arrow's beginning
_KEYS = {curses.KEY_UP: state.UP, curses.KEY_DOWN: state.DOWN, curses.KEY_LEFT: state.LEFT,
         curses.KEY_RIGHT: state.RIGHT, curses.KEY_PPAGE: state.PAGE_UP, curses.KEY_NPAGE: state.PAGE_DOWN,
         curses.KEY_HOME: state.HOME, curses.KEY_END: state.END, curses.KEY_ENTER: state.ENTER, 10: state.ENTER,
         13: state.ENTER, 27: state.ESCAPE, curses.KEY_BACKSPACE: state.ESCAPE, 127: state.ESCAPE, 9: state.TAB}


def run(feed: Feed, first: State) -> None:
    """Show the console until ``q``; the terminal is left as it was found."""
    locale.setlocale(locale.LC_ALL, "")
    os.environ.setdefault("ESCDELAY", str(ESCAPE_MILLISECONDS))
    # ncurses takes these for the size, and then never hears of a resize
    for name in ("LINES", "COLUMNS"):
        os.environ.pop(name, None)
    with contextlib.redirect_stderr(Told(feed.said)):
        try:
            curses.wrapper(_loop, feed, first)
        except curses.error as error:
            raise UsageError(f"this terminal cannot show the console: {error}",
                             hint="set TERM to what it is, or use llmgw.pyz ctl nodes") from None


def _loop(window: Window, feed: Feed, now: State) -> None:
    styles = _styles()
    window.timeout(WAIT_MILLISECONDS)
    with contextlib.suppress(curses.error):
        curses.curs_set(0)
    shown, size = None, (0, 0)
    while True:
        for change in feed.taken():
            now = change(now)
        if now != shown or window.getmaxyx() != size:
            shown, size = now, window.getmaxyx()
            _draw(window, now, styles)
        code = window.getch()
        if code == -1 or code == curses.KEY_RESIZE:
            continue
        now, wish = state.press(now, _KEYS.get(code, chr(code) if 32 <= code < 127 else ""))
        if wish == state.QUIT:
            return
        _do(feed, now, wish)


def _do(feed: Feed, now: State, wish: str) -> None:
    if wish == state.ASK_OLLAMA:
        feed.ask_ollama()
    elif wish == state.IMPORT and now.ollama:
        feed.bring(now.ollama[now.ollama_cursor][0])


def _styles() -> Dict[str, int]:
    """Return what each style is on this terminal; without colour it is told by other means."""
    bad = curses.A_BOLD
    with contextlib.suppress(curses.error):
        if curses.has_colors() and not os.environ.get("NO_COLOR"):
            curses.start_color()
            curses.use_default_colors()
            curses.init_pair(1, curses.COLOR_RED, -1)
            bad = curses.color_pair(1)
    return {screen.PLAIN: curses.A_NORMAL, screen.BAR: curses.A_REVERSE, screen.BOLD: curses.A_BOLD,
            screen.CHOSEN: curses.A_REVERSE, screen.DIM: curses.A_NORMAL, screen.BAD: bad}


def _draw(window: Window, now: State, styles: Dict[str, int]) -> None:
    height, width = window.getmaxyx()
    window.erase()
    for at, line in enumerate(screen.draw(now, width, height)):
        with contextlib.suppress(curses.error):      # the last cell of the screen cannot be passed
            window.addstr(at, 0, line.text, styles[line.style])
    window.refresh()
