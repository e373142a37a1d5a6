"""Where a model's weights come from: the mirror, a file of this machine, or Hugging Face."""
from __future__ import annotations

import hashlib
import importlib
import logging
import os
import threading
from typing import Any, Dict, List, Optional, Tuple

from llmgw.api import wire
from llmgw.domain.errors import LlmgwError
from llmgw.domain.model import ModelSpec, Weights
from llmgw.server import records
from llmgw.server.mirror import Mirror
from llmgw.server.store import Store, put

log = logging.getLogger(__name__)


class Sources:
    """``weights`` never waits: what has to be fetched is fetched by threads of its own."""

    def __init__(self, store: Store, mirror: Mirror, hub: Optional[Any], poke: threading.Event) -> None:
        self._store, self._mirror, self._hub, self._poke = store, mirror, hub, poke
        self._lock = threading.Lock()
        self._problems: Dict[str, Tuple[Tuple[int, int], str]] = {}   # path: (of this file, sentence)
        self._running: Dict[str, str] = {}

    def weights(self, spec: ModelSpec) -> Tuple[Optional[Weights], str]:
        """Return a model's weights, or None and why they are not there yet."""
        kind, _, rest = spec.weights.partition(":")
        if kind == "mirror":
            found = self._mirror.model(rest)
            return found, "" if found is not None else (
                f"weights mirror:{rest} are not in the mirror (llmgw ctl mirror import FILE --name {rest})")
        if kind == "file":
            return self._file(rest, spec.name)
        if kind == "hf":
            return self._from_hub(spec)
        return None, f"weights {spec.weights}: not of a kind that this version knows"

    def activity(self) -> List[str]:
        """Return a sentence for everything under way."""
        with self._lock:
            return [f"reading {path}" for path in self._running]

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
        entry = self._store.get(_key(path, name))
        if entry is not None and (entry.value["mtime_ns"], entry.value["size_bytes"]) == identity:
            return wire.WEIGHTS.decode(entry.value["weights"], entry.key), ""
        with self._lock:
            problem = self._problems.get(path)
            if problem is not None and problem[0] == identity:
                return None, problem[1]
            if path not in self._running:
                self._running[path] = name
                threading.Thread(target=self._import, args=(path, name, identity), name="import-file",
                                 daemon=True).start()
        return None, f"reading {path} into the mirror"

    def _import(self, path: str, name: str, identity: Tuple[int, int]) -> None:
        try:
            weights = self._mirror.import_file(path, name, f"file:{path}")
            put(self._store, _key(path, name), {
                "path": path, "mtime_ns": identity[0], "size_bytes": identity[1],
                "weights": wire.WEIGHTS.encode(weights)})
        except LlmgwError as error:
            log.error("cannot import path=%s reason=%s: %s", path, error.reason, error.message)
            with self._lock:
                self._problems[path] = (identity, error.message)
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
