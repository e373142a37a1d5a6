"""Read what lies here again, slowly and in the background: a disk may lose bytes without saying so."""
from __future__ import annotations

import json
import logging
import os
import threading
import time
from typing import Callable, Dict, List, Optional, Sequence, Tuple

from llmgw.agent.fetch import Fetcher
from llmgw.agent.layout import Layout
from llmgw.domain.errors import LlmgwError
from llmgw.domain.model import Weights, WeightsFile
from llmgw.system import files

log = logging.getLogger(__name__)

TURN_SECONDS = 600.0
AGAIN_SECONDS = 7 * 24 * 3600.0       # between two readings of one blob
BYTES_PER_SECOND = 32 << 20           # of reading: an engine that loads a model next to it must not notice


class _Stopped(Exception):
    pass


class Scrub:
    """One thread; only reads. What it finds it hands to ``report``, whose thread repairs."""

    def __init__(self, layout: Layout, held: Callable[[], Sequence[Weights]], fetcher: Fetcher,
                 report: Callable[[str, Sequence[int]], None], stop: threading.Event, *,
                 again_seconds: float = AGAIN_SECONDS, bytes_per_second: int = BYTES_PER_SECOND) -> None:
        self._held, self._fetcher, self._report, self._stop = held, fetcher, report, stop
        self._path = os.path.join(layout.root, "state", "scrub.json")
        self._again, self._rate = again_seconds, bytes_per_second
        self._read: Dict[str, float] = self._recall()       # sha256 -> wall clock of its last reading

    def turn(self) -> Optional[float]:
        """Read the blob that was read longest ago, when it is time; return when to look again."""
        due = self._due()
        if due is None:
            return None
        file, name = due
        try:
            bad = self._fetcher.damage(file, self._pause)
        except _Stopped:
            return None
        if bad:
            log.warning("a reading in the background found damage name=%s file=%s chunks=%d", name, file.name, len(bad))
            self._report(file.sha256, bad)
        self._note(file.sha256)
        return 1.0

    def _due(self) -> Optional[Tuple[WeightsFile, str]]:
        now = time.time()
        found: List[Tuple[float, str, WeightsFile]] = []
        for weights in self._held():
            for file in weights.files:
                # a file that was never read again was proven when it came
                at = self._read.setdefault(file.sha256, now)
                if not 0 <= now - at < self._again:
                    found.append((at, weights.name, file))
        if not found:
            return None
        _, name, file = min(found, key=lambda one: one[:2])
        return file, name

    def _pause(self, count: int) -> None:
        if self._stop.wait(count / self._rate):
            raise _Stopped()

    def _note(self, digest: str) -> None:
        here = {file.sha256 for weights in self._held() for file in weights.files}
        self._read = {**{key: at for key, at in self._read.items() if key in here}, digest: time.time()}
        try:
            files.make_dir(os.path.dirname(self._path))
            files.write_json(self._path, self._read)
        except LlmgwError as error:            # then the next agent reads it once more
            log.debug("not written down: %s", error.message)

    def _recall(self) -> Dict[str, float]:
        try:
            data = json.loads(files.read_bytes(self._path) or b"{}")
            return {str(key): float(at) for key, at in data.items()}
        except (ValueError, TypeError, AttributeError, LlmgwError):
            return {}
