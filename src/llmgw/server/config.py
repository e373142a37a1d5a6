"""server.yaml: read at the start, read again when it changes, and held when it would stop too much."""
from __future__ import annotations

import hashlib
import logging
import os
import threading
from dataclasses import dataclass, replace
from typing import Dict, FrozenSet, List, Optional, Tuple

from llmgw.decide.replicas import Wanted, stops_too_many
from llmgw.domain.cluster import ClusterConfig
from llmgw.domain.errors import ConfigError, LlmgwError, StorageError
from llmgw.domain.model import ModelSpec
from llmgw.engines import registry
from llmgw.parse import cluster_yaml
from llmgw.server import records
from llmgw.server.events import Events
from llmgw.server.store import Store, put
from llmgw.system import files

MAX_BYTES = 1 << 20
MAX_FILE_BYTES = 1 << 20      # of a file that it names


@dataclass(frozen=True)
class Loaded:
    """A configuration that could be used; ``digest`` covers the text and every file it names."""

    config: ClusterConfig
    digest: str


@dataclass(frozen=True)
class ConfigState:
    """What is in force, what waits for an admin, and what is wrong with the file just now."""

    current: ClusterConfig
    problem: str = ""
    held: Optional[Loaded] = None
    held_because: Tuple[str, ...] = ()


class ConfigFile:
    """One server.yaml."""

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        self._signature: Tuple[object, ...] = ()
        self._named: List[str] = [self.path]

    def load(self) -> Loaded:
        """Return what the file says now; ConfigError names file, line and key."""
        try:
            data = files.read_bytes(self.path, MAX_BYTES)
        except StorageError as error:        # too large, a folder, not ours to read
            raise ConfigError(error.message, hint=error.hint or "check that this is the right file") from None
        if data is None:
            raise ConfigError(f"{self.path}: no such file", hint="name it with --config FILE")
        return self.decode(data)

    def decode(self, data: bytes) -> Loaded:
        """Return what ``data`` would say in this file's place."""
        digest = hashlib.sha256(data)
        named: List[str] = [self.path]

        def read_file(name: str) -> bytes:
            path = os.path.join(os.path.dirname(self.path), name)
            named.append(path)
            content = files.read_bytes(path, MAX_FILE_BYTES)
            if content is None:
                raise ConfigError(f"{path}: no such file")
            digest.update(b"\0" + name.encode("utf-8", "surrogateescape") + b"\0" + content)
            return content

        try:
            config = cluster_yaml.decode(data, self.path, read_file, reserved_flags())
        finally:
            self._named = named
        for model in config.models:
            _check_engine(model, self.path)
        return Loaded(config, digest.hexdigest())

    def is_touched(self) -> bool:
        """Whether the file, or one that it names, looks different from when this was last asked."""
        signature = tuple(_signature(path) for path in self._named)
        touched, self._signature = signature != self._signature, signature
        return touched


def _signature(path: str) -> Optional[Tuple[int, int, int]]:
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def reserved_flags() -> Dict[str, FrozenSet[str]]:
    """Return the flags of each engine that ``args:`` may not hold."""
    return {name: engine.reserved_flags for name, engine in registry.ENGINES.items()}


class ConfigWatch:
    """Owns which configuration is in force; the loop calls ``poll``, an admin ``apply``."""

    def __init__(self, file: ConfigFile, loaded: Loaded, store: Store, events: Events,
                 running: records.Replicas) -> None:
        self._file, self._store, self._events, self._running = file, store, events, running
        self._lock = threading.Lock()
        self._unkept = False          # an edit that is fine waits for a store that can be written
        entry = store.get(records.APPLIED)
        self._digest = str(entry.value["sha256"]) if entry is not None else ""
        current = loaded.config
        if entry is not None and self._digest != loaded.digest:
            current = records.CLUSTER_CONFIG.decode(entry.value["config"], entry.key)
        # where to listen is always what the file said at the start
        self.state = ConfigState(replace(current, host=loaded.config.host, port=loaded.config.port))
        file.is_touched()
        with self._lock:
            self._consider(loaded, confirmed=False, is_start=True)

    def poll(self) -> None:
        """Take an edit that can be taken; an invalid one changes nothing and is told of once.

        One that could not be kept (a full disk) is tried again at every turn.
        """
        with self._lock:
            if self._file.is_touched() or self._unkept:
                self._read(confirmed=False)

    def apply(self, confirmed: bool) -> ConfigState:
        """Read the file now; ``confirmed`` lets through what would stop too much."""
        with self._lock:
            self._read(confirmed)
            self._file.is_touched()
            return self.state

    def plan(self, data: bytes) -> Loaded:
        """Return what ``data`` (or the file, when it is empty) would put in force."""
        with self._lock:
            return self._file.decode(data) if data.strip() else self._file.load()

    def _read(self, confirmed: bool) -> None:
        self._unkept = False
        try:
            loaded = self._file.load()
            self._unkept = True
            if self.state.problem and loaded.digest == self._digest:
                self._events.add("config", "Repaired", "the file says again what is in force")
            self._consider(loaded, confirmed)
            self._unkept = False
        except LlmgwError as error:
            if self.state.problem != error.message:
                self._events.add("config", error.reason, "the edit is not used: " + error.message
                                 + (f" (try: {error.hint})" if error.hint else ""), logging.ERROR)
            self.state = replace(self.state, problem=error.message)

    def _consider(self, loaded: Loaded, confirmed: bool, is_start: bool = False) -> None:
        if loaded.digest == self._digest:
            self.state = replace(self.state, problem="", held=None, held_because=())
            return
        because = stops_too_many([Wanted(spec, "") for spec in loaded.config.models],
                                 [row for _, row in self._running.all()])
        if because and not confirmed:
            if self.state.held is None or self.state.held.digest != loaded.digest:
                self._events.add("config", "NeedsConfirm", "; ".join(because)
                                 + ": the edit waits for llmgw.pyz ctl apply --confirm")
            self.state = replace(self.state, problem="", held=loaded, held_because=because)
            return
        config = loaded.config
        before = self.state.current
        if not is_start and (config.host, config.port) != (before.host, before.port):
            self._events.add("config", "NeedsRestart",
                             f"listen: {config.host}:{config.port} is used from the next start on")
        config = replace(config, host=before.host, port=before.port)
        put(self._store, records.APPLIED, {"sha256": loaded.digest,
                                           "config": records.CLUSTER_CONFIG.encode(config)})
        self._digest = loaded.digest
        self.state = ConfigState(config)
        self._events.add("config", "Applied", _said(before, config) if not is_start else "read at the start")
        for warning in config.warnings:
            self._events.add("config", "Warning", warning)


def _said(before: ClusterConfig, after: ClusterConfig) -> str:
    old, new = {spec.name: spec for spec in before.models}, {spec.name: spec for spec in after.models}
    parts = [f"model {name} added" for name in new if name not in old]
    parts += [f"model {name} removed" for name in old if name not in new]
    parts += [f"model {name} changed" for name in new if name in old and new[name] != old[name]]
    if before.engines != after.engines:
        parts.append("engines: " + (", ".join(f"{item.name} {item.version}" for item in after.engines) or "none"))
    return "; ".join(parts) or "nothing that matters changed"


def _check_engine(model: ModelSpec, path: str) -> None:
    try:
        registry.get(model.engine)
    except ConfigError as error:
        raise ConfigError(f"{path}: model {model.name}: engine: {error.message}", hint=error.hint) from None
