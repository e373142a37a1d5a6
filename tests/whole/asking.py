"""Requests of the real openai client in threads of their own, and a load of them that notices everything."""
from __future__ import annotations

import itertools
import threading
import time

import openai

from tests.whole.cluster import MODEL, until

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "Paris"
TIMEOUT = 240.0                   # of one request: a hung engine may hold it for two minutes


class Asked:
    """One request in a thread of its own. ``outcome`` is how it ended:

    whole · error event (a stream that said so) · cut (a stream that just ended) · status N · unreachable
    """

    def __init__(self, fire, stream, model, session=None, **more):
        self.over, self.outcome, self.pieces, self.text, self.said = threading.Event(), "", 0, "", ""
        self.is_stream, self.begun_at, self.spoke_at = stream, time.monotonic(), 0.0
        self._fire, self._left = fire, threading.Event()
        self._words = {"model": model, "messages": QUESTION, "temperature": 0, "stream": stream, **more}
        if session is not None:
            self._words["extra_headers"] = {"X-Session-Id": session}
        threading.Thread(target=self._run, daemon=True).start()

    def __repr__(self):
        kind = "stream" if self.is_stream else "plain"
        return f"<{kind} {self.outcome or 'running'} after {self.pieces} pieces {self.text[:40]!r} {self.said[:300]}>"

    def leave(self):
        """Want it no more, as a client that closes its connection does."""
        self._left.set()
        self.wait()

    def wait(self, seconds=TIMEOUT):
        assert self.over.wait(seconds), self
        return self

    @property
    def is_right(self):
        return self.outcome == "whole" and (self.is_stream or ANSWER in self.text)

    def _run(self):
        try:
            with self._fire.client() as client:
                self._take(client.chat.completions.create(**self._words))
        except openai.APIStatusError as error:
            self.outcome, self.said = f"status {error.status_code}", str(error)
        except openai.APIConnectionError as error:
            self.outcome, self.said = "cut" if self.pieces else "unreachable", str(error)
        except openai.APIError as error:              # an event of a stream that has begun
            self.outcome, self.said = "error event", f"{error.code}: {error.message}"
        except Exception as error:                    # of the HTTP library below; it differs between clients
            self.outcome, self.said = "cut", repr(error)
        finally:
            self.ended_at = time.monotonic()
            if self.outcome == "whole" and self.pieces > 8:
                self._fire.rate = self.pieces / (self.ended_at - self.spoke_at)
            self.over.set()

    def _take(self, answer):
        if not self.is_stream:
            self.text, self.outcome = answer.choices[0].message.content, "whole"
            return
        reason = None
        for piece in answer:
            if self._left.is_set():
                answer.close()
                self.outcome = "left"
                return
            for choice in piece.choices:
                self.spoke_at = self.spoke_at or time.monotonic()
                self.pieces += 1
                self.text += choice.delta.content or ""
                reason = choice.finish_reason or reason
        self.outcome = "whole" if reason else "ended without a reason"


class Load:
    """So many plain requests and streams at a time, one after the other, until it is left."""

    def __init__(self, fire, plain=1, streams=1, model=MODEL):
        self._fire, self._model = fire, model
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.ended = []
        self._threads = [threading.Thread(target=self._loop, args=(kind, number), daemon=True)
                         for kind, count in ((False, plain), (True, streams)) for number in range(count)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *unused):
        self._stop.set()
        for thread in self._threads:
            thread.join(TIMEOUT)

    def _loop(self, is_stream, number):
        for turn in itertools.count():
            if self._stop.is_set():
                return
            session = f"{is_stream}-{number}-{turn}"
            asked = (self._fire.stream(self._model, session, tokens=40) if is_stream
                     else self._fire.ask(self._model, session)).wait()
            with self._lock:
                self.ended.append(asked)

    def begun(self):
        """Wait until the router has all of it at once."""
        until("the load has begun", lambda: sum(self._fire.in_flight(self._model).values()) >= len(self._threads), 60)

    def more(self, count=6, seconds=120.0):
        """Wait until so many more requests have ended that began from now on."""
        now = time.monotonic()
        until(f"{count} more requests", lambda: sum(asked.begun_at >= now for asked in list(self.ended)) >= count, seconds)

    @property
    def failed(self):
        """What did not end right; a stream that had begun and says so is told apart by ``broken``."""
        return [asked for asked in self.ended if not asked.is_right and asked not in self.broken]

    @property
    def broken(self):
        return [asked for asked in self.ended if asked.outcome == "error event" and asked.pieces]
