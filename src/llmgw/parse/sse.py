"""What a stream of server-sent events says, read from a copy while its bytes pass by.

Bounded: an event larger than the cap ends the reading, never the stream.
"""
from __future__ import annotations

import json
from typing import Any, List, Optional, Tuple

MAX_EVENT_BYTES = 1 << 20

# Searched in every event, so plain substrings: an event without any of them needs no JSON.
_MARKS = (b"[DONE]", b'"error"', b'"usage":{', b'"usage": {', b'"finish_reason":"', b'"finish_reason": "')


class SseScanner:
    """``feed`` it the payload in pieces cut anywhere, then ``end``; the attributes say what was seen."""

    __slots__ = ("done", "failed", "finish_reason", "usage", "events", "blind", "_pieces", "_size")

    def __init__(self) -> None:
        self.done = False                         # [DONE] was there
        self.failed = False                       # an event carried an error, or was named so
        self.finish_reason: Optional[str] = None
        self.usage: Optional[Tuple[int, int]] = None   # tokens of the prompt, of the answer
        self.events = 0
        self.blind = False                        # gave up reading
        self._pieces: List[bytes] = []            # the beginning of an event
        self._size = 0

    @property
    def between_events(self) -> bool:
        """Whether the next byte begins an event, as far as is known."""
        return not self._pieces and not self.blind

    def feed(self, payload: bytes) -> None:
        if not self._pieces and payload.endswith((b"\n\n", b"\r\n\r\n")) and not self.blind:
            self.events += payload.count(b"\n\n") or 1
            for mark in _MARKS:
                if mark in payload:
                    self._read(_lines(payload))
                    break
            return
        self._gather(payload)

    def end(self) -> None:
        """Read what came last, though no blank line followed it."""
        if self._pieces:
            self._read(_lines(b"".join(self._pieces)))

    def _gather(self, payload: bytes) -> None:
        if self.blind or not payload:
            return
        self._pieces.append(payload)
        self._size += len(payload)
        if b"\n" in payload or b"\r" in payload:
            self._take_whole_events()
        if self._size > MAX_EVENT_BYTES:
            self.blind = True
            self._pieces = []

    def _take_whole_events(self) -> None:
        text = b"".join(self._pieces)
        held = text.endswith(b"\r")               # LF may follow
        whole, blank, tail = _lines(text[:-1] if held else text).rpartition(b"\n\n")
        if blank:
            self.events += whole.count(b"\n\n") + 1
            self._read(whole)
        else:
            tail = whole + tail
        tail += b"\r" if held else b""
        self._pieces = [tail] if tail else []
        self._size = len(tail)

    def _read(self, text: bytes) -> None:
        for event in text.split(b"\n\n"):
            data = []
            for line in event.split(b"\n"):
                name, _, value = line.partition(b":")
                value = value[1:] if value.startswith(b" ") else value
                if name == b"data":
                    data.append(value)
                elif name == b"error" or (name == b"event" and value == b"error"):
                    self.failed = True            # llama.cpp has written "error: {...}"
            if data:
                self._take(b"\n".join(data))

    def _take(self, data: bytes) -> None:
        if data.strip() == b"[DONE]":
            self.done = True
            return
        if not any(mark in data for mark in _MARKS):
            return
        try:
            value = json.loads(data.decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            return
        if isinstance(value, dict):
            if value.get("error"):
                self.failed = True
            self.usage = usage_of(value) or self.usage
            self.finish_reason = _finish_reason(value) or self.finish_reason


def usage_of(answer: Any) -> Optional[Tuple[int, int]]:
    """Return (prompt, completion) tokens of an answer or event, None when it does not say."""
    usage = answer.get("usage") if isinstance(answer, dict) else None
    if not isinstance(usage, dict):
        return None
    counts = [usage.get(name, 0) for name in ("prompt_tokens", "completion_tokens")]
    if not all(type(count) is int and 0 <= count < 1 << 40 for count in counts):
        return None
    return counts[0], counts[1]


def _finish_reason(value: Any) -> Optional[str]:
    choices = value.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict) and isinstance(choice.get("finish_reason"), str):
            return str(choice["finish_reason"])
    return None


def _lines(text: bytes) -> bytes:
    if b"\r" not in text:
        return text
    return text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
