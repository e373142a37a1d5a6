"""Everything the console asks of the world, in threads of its own: the API, Ollama's folder, an import."""
from __future__ import annotations

import io
import os
import queue
import threading
from dataclasses import replace
from typing import Callable, List

from llmgw.api.client import ControlClient
from llmgw.ctl import mirror_care, ollama
from llmgw.ctl.console.state import VIEWS, Job, State
from llmgw.ctl.ollama import Entry
from llmgw.ctl.progress import Progress
from llmgw.domain.errors import LlmgwError

EVERY_SECONDS = 2.0
TIMEOUT_SECONDS = 5.0
Change = Callable[[State], State]


class Feed:
    """Puts changes of the state into a queue; the terminal's thread applies them."""

    def __init__(self, client: ControlClient, ollama_dir: str = "") -> None:
        self._client, self._dir = client, ollama_dir
        self._changes: "queue.Queue[Change]" = queue.Queue()
        self._stop, self._poke = threading.Event(), threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._poll, name="console-poll", daemon=True).start()

    def close(self) -> None:
        self._stop.set()
        self._poke.set()

    def taken(self) -> List[Change]:
        """Return what has come since the last time."""
        found = []
        while not self._changes.empty():
            found.append(self._changes.get())
        return found

    def _poll(self) -> None:
        while not self._stop.is_set():
            for view in VIEWS:
                self._ask(view.name, view.path, view.decode)
            self._poke.wait(EVERY_SECONDS)
            self._poke.clear()

    def _ask(self, name: str, path: str, decode: Callable[[object], object]) -> None:
        try:
            data = decode(self._client.json("GET", path, timeout=TIMEOUT_SECONDS))
        except LlmgwError as error:
            said = error.message
            self._changes.put(lambda state: replace(state, problem=said))
            return
        self._changes.put(lambda state: replace(state, data={**state.data, name: data}, problem=""))

    def ask_ollama(self) -> None:
        """Look into Ollama's folder, and which of it the mirror has."""
        threading.Thread(target=self._list_ollama, name="console-ollama", daemon=True).start()

    def _list_ollama(self) -> None:
        try:
            folder = ollama.find(self._dir, os.environ)
            found = tuple(ollama.listed(folder, mirror_care.view(self._client)))
        except LlmgwError as error:
            said = error.message + (f" (try: {error.hint})" if error.hint else "")
            self._changes.put(lambda state: replace(state, ollama=(), ollama_problem=said))
            return
        self._changes.put(lambda state: replace(state, ollama=found))

    def bring(self, entry: Entry) -> None:
        """Import a model of Ollama's in the background."""
        threading.Thread(target=self._bring, args=(entry,), name="console-import", daemon=True).start()

    def _bring(self, entry: Entry) -> None:
        name, problem = str(entry.name), ""
        try:
            ollama.bring(self._client, ollama.find(self._dir, os.environ), entry.name,
                         progress_of=lambda what, total: _Shown(self._put_job, name, what, total))
        except LlmgwError as error:
            problem = error.message + (f" (try: {error.hint})" if error.hint else "")
        self._put_job(Job(name, ended=True, problem=problem))
        self._list_ollama()
        self._poke.set()

    def _put_job(self, job: Job) -> None:
        self._changes.put(lambda state: replace(state, job=job))

    def said(self, text: str) -> None:
        """Show what some part of the program wanted to tell on stderr."""
        if text.strip():
            self._changes.put(lambda state: replace(state, said=text.strip()))


class _Shown(Progress):
    """Progress that becomes a bar of the console."""

    def __init__(self, put: Callable[[Job], None], name: str, what: str, total_bytes: int) -> None:
        super().__init__(what, total_bytes, io.StringIO())
        self._put, self._name, self._words, self._all = put, name, what, total_bytes

    def at(self, done_bytes: int) -> None:
        super().at(done_bytes)
        self._put(Job(self._name, self._words, done_bytes, self._all))


class Told(io.TextIOBase):
    """A stderr whose lines go to the console: nothing may write over its screen."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell

    def write(self, text: str) -> int:
        self._tell(text)
        return len(text)
