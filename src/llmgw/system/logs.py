"""One way to log: stderr, one line, no secrets."""
from __future__ import annotations

import logging
import re
import sys
import threading
import time
from typing import Dict

_SECRETS = re.compile(r"(llmgw_[a-z]+_[A-Za-z0-9]{8}_|Bearer |api_key=)[A-Za-z0-9._~+/=-]{8,}"
                      r"|(llmgw1\.)[A-Za-z0-9._-]{8,}")


def redact(line: str) -> str:
    """Return ``line`` with everything that looks like a token replaced."""
    return _SECRETS.sub(lambda found: (found.group(1) or found.group(2)) + "***", line)


_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")


class Said:
    """What was last said of each thing: a fault that lasts is told when it begins, not at every try."""

    def __init__(self) -> None:
        self._last: Dict[str, str] = {}
        self._lock = threading.Lock()

    def is_new(self, thing: str, sentence: str) -> bool:
        """Whether to say it: other words than last time. Numbers alone are no news ("1.2 GB are left")."""
        words = _NUMBER.sub("#", sentence)
        with self._lock:
            before, self._last[thing] = self._last.get(thing), words
        return before != words

    def is_over(self, thing: str) -> bool:
        """Forget the thing's fault; whether there was one."""
        with self._lock:
            return self._last.pop(thing, None) is not None


class _Format(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        head = f"{stamp}.{int(record.msecs):03d}Z {record.levelname} {record.name.replace('llmgw.', '', 1)}: "
        text = record.getMessage().replace("\n", "\\n").replace("\x1b", "\\x1b")
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return head + redact(text)


def configure(debug: bool = False) -> None:
    """Send this process's log to stderr, INFO and up, or everything with ``debug``."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Format())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG if debug else logging.INFO)
