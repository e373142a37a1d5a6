"""Where a model's weights come from: the mirror, a file of this machine, or Hugging Face."""
from __future__ import annotations

import hashlib
import importlib
import logging
import os
import threading
import time
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Tuple

from llmgw.api import wire
from llmgw.domain.errors import DiskFull, LlmgwError, StorageError, TryAgain
from llmgw.domain.model import ModelSpec, Weights
from llmgw.server import records
from llmgw.server.mirror import Mirror
from llmgw.server.store import Store, put
from llmgw.system.logs import Said

log = logging.getLogger(__name__)

AGAIN_SECONDS = 15.0          # until a file is read again that the disk, not the file, kept from the mirror


@dataclass(frozen=True)
class _Problem:
    """Why a file as it was (mtime, size) did not come into the mirror, and when to try again (None: never)."""

    identity: Tuple[int, int]
    sentence: str
    again_at: Optional[float]

    def holds(self, identity: Tuple[int, int]) -> bool:
        return self.identity == identity and (self.again_at is None or time.monotonic() < self.again_at)


class Sources:
    """``weights`` never waits: what has to be fetched is fetched by threads of its own."""

    def __init__(self, store: Store, mirror: Mirror, hub: Optional[Any], poke: threading.Event) -> None:
        self._store, self._mirror, self._hub, self._poke = store, mirror, hub, poke
        self._lock = threading.Lock()
        self._problems: Dict[str, _Problem] = {}      # by path
        self._said = Said()
        self._running: Dict[str, str] = {}

    def weights(self, spec: ModelSpec) -> Tuple[Optional[Weights], str]:
        """Return a model's weights, or None and why they are not there yet."""
        kind, _, rest = spec.weights.partition(":")
        if kind == "mirror":
            found = self._mirror.model(rest)
            return found, "" if found is not None else (
                f"weights mirror:{rest} are not in the mirror (llmgw.pyz ctl mirror import FILE --name {rest})")
        if kind == "file":
            return self._file(rest, spec.name)
        if kind == "hf":
            return self._from_hub(spec)
        return None, f"weights {spec.weights}: not of a kind that this version knows"

    def activity(self) -> List[str]:
        """Return a sentence for everything under way."""
        with self._lock:
            reading = [f"reading {path}" for path in self._running]
        return reading if self._hub is None else [*reading, *self._hub.activity()]

    def sent_bytes(self) -> int:
        """Return how many bytes of weights nodes were sent since the start."""
        return self._mirror.pace.sent_bytes

    def _from_hub(self, spec: ModelSpec) -> Tuple[Optional[Weights], str]:
        if self._hub is None:
            return None, f"weights {spec.weights}: fetching from Hugging Face is not available in this build"
        try:
            self._hub.want(spec.weights, spec.name)
            weights, sentence = self._hub.status(spec.weights)
        except LlmgwError as error:
            return None, error.message
        return weights, sentence

    def _file(self, path: str, name: str) -> Tuple[Optional[Weights], str]:
        try:
            stat = os.stat(path)
        except OSError as error:
            return None, f"cannot read {path}: {error.strerror}"
        identity = (stat.st_mtime_ns, stat.st_size)
        with self._lock:
            running = path in self._running           # before what it left is looked for: it may end between the two
        entry = self._store.get(_key(path, name))
        if entry is not None and (entry.value["mtime_ns"], entry.value["size_bytes"]) == identity:
            weights = wire.WEIGHTS.decode(entry.value["weights"], entry.key)
            if all(self._mirror.has(kept.sha256) for kept in weights.files):
                return weights, ""
        with self._lock:
            problem = self._problems.get(path)
            if problem is not None and problem.holds(identity):
                return None, problem.sentence
            if not running and path not in self._running:
                self._running[path] = name
                threading.Thread(target=self._import, args=(path, name, identity), name="import-file",
                                 daemon=True).start()
            if problem is not None and problem.identity == identity:
                return None, problem.sentence         # until the next try has ended
        return None, f"reading {path} into the mirror"

    def _import(self, path: str, name: str, identity: Tuple[int, int]) -> None:
        try:
            weights = self._mirror.import_file(path, name, f"file:{path}")
            put(self._store, _key(path, name), {
                "path": path, "mtime_ns": identity[0], "size_bytes": identity[1],
                "weights": wire.WEIGHTS.encode(weights)})
            self._said.is_over(path)
        except LlmgwError as error:
            if self._said.is_new(path, error.message):
                log.error("cannot import path=%s reason=%s: %s", path, error.reason, error.message)
            passes = isinstance(error, (DiskFull, StorageError, TryAgain))
            with self._lock:
                self._problems[path] = _Problem(identity, error.message,
                                                time.monotonic() + AGAIN_SECONDS if passes else None)
        finally:
            with self._lock:
                self._running.pop(path, None)
            self._poke.set()


def _key(path: str, name: str) -> str:
    return records.FILES + hashlib.sha256(f"{name}\0{path}".encode("utf-8", "surrogateescape")).hexdigest()


def optional_part(module: str, kind: str, *args: Any, **named: Any) -> Optional[Any]:
    """Return ``kind(...)`` of a module of the server that this build may lack."""
    try:
        made = getattr(importlib.import_module(module), kind)
    except ImportError:
        log.warning("this build has no %s", module)
        return None
    return made(*args, **named)
