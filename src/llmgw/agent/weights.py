"""The weights of a node: fetched from the control plane, verified, and usable only when complete."""
from __future__ import annotations

import json
import logging
import os
import threading
import time
from typing import Callable, Dict, List, Optional, Set, Tuple

from llmgw.agent.board import Board
from llmgw.agent.layout import Layout
from llmgw.api import paths, wire
from llmgw.api.client import ControlClient
from llmgw.decide import weights as decide
from llmgw.domain.errors import DiskFull, LlmgwError, ParseError
from llmgw.domain.model import Weights, WeightsFile, WeightsObserved, WeightsPhase
from llmgw.domain.replica import ShardState
from llmgw.system import download, failpoint, files
from llmgw.system.logs import Said

log = logging.getLogger(__name__)

MARKER = ".complete.json"
EVERY_SECONDS = 5.0
RETRY_SECONDS = (2.0, 5.0, 15.0, 60.0)
REPORT_SECONDS = 1.0
DISK_FAILURES = 3                 # as many failures a full disk counts as, at most: tried again within 15 s
RECHECK_SECONDS = 600.0           # between two looks at the bytes of weights that no engine can load


class WeightsKeeper:
    """One thread; the only writer of ``models/`` and ``blobs/`` but for engine archives."""

    def __init__(self, client: ControlClient, board: Board, layout: Layout, stop: threading.Event) -> None:
        self._client, self._board, self._layout, self._stop = client, board, layout, stop
        self._failed: Dict[str, Tuple[int, float]] = {}      # fingerprint -> (failures, when)
        self._manifests: Dict[str, Tuple[int, Optional[Weights]]] = {}
        self._checked: Dict[str, float] = {}                 # fingerprint -> when its bytes were read again
        self._said = Said()
        self.poke = threading.Event()

    def recall(self) -> None:
        """Tell the board what lies here whole, from the markers, and what of it has gone."""
        for weights in self._held():
            self._put(weights, _phase(self._layout, weights), weights.size_bytes)

    def sweep(self) -> None:
        """Remove blobs and partial downloads that neither a complete model nor the desired state names."""
        desired = self._board.desired
        if desired is None:
            return
        kept = {file.sha256 for weights in self._held() for file in weights.files}
        kept |= {file.sha256 for shard in desired.node.shards for file in shard.weights.files}
        kept |= {asset.sha256 for engine in desired.node.engines for asset in engine.assets
                 if not os.path.isdir(self._layout.engine(engine.name, engine.version))}
        for kind in ("sha256", "partial"):
            folder = os.path.join(self._layout.root, "blobs", kind)
            for name in _names(folder):
                if name not in kept:
                    files.remove(os.path.join(folder, name))

    def turn(self) -> Optional[float]:
        """Fetch what is wanted and not here; remove what nobody wants when room is short."""
        desired = self._board.desired
        if desired is None:
            return None
        wanted = list({shard.weights.fingerprint: shard.weights for shard in desired.node.shards}.values())
        held = [item for item in self._held() if _phase(self._layout, item) is WeightsPhase.WHOLE]
        held = [item for item in held if not self._has_rotted(item)]
        free, total = files.free_bytes(self._layout.root), self._board.facts.disk_total_bytes
        plan = decide.plan(wanted, [_as_held(self._layout, item) for item in held],
                           free_bytes=free, reserve_bytes=decide.reserve(total))
        for old in plan.remove:
            self._remove(old.name, old.fingerprint)
        for weights in wanted:
            if weights not in plan.fetch:
                self._use(weights)
        waits = [self._fetch_or_wait(weights, decide.reserve(total)) for weights in plan.fetch]
        return min(waits + [EVERY_SECONDS])

    def _has_rotted(self, weights: Weights) -> bool:
        """Read the files again when a shard of them cannot start; remove one that is not what it was."""
        now = time.monotonic()
        if weights.fingerprint not in self._suspects() or \
                now - self._checked.get(weights.fingerprint, -RECHECK_SECONDS) < RECHECK_SECONDS:
            return False
        self._checked[weights.fingerprint] = now
        for file in weights.files:
            wrong = download.damage(self._layout.blob(file.sha256), file.size_bytes, file.chunks, file.sha256)
            if wrong:
                log.warning("weights damaged on this disk name=%s, fetched again: %s", weights.name, wrong)
                files.remove(self._layout.blob(file.sha256))
                self._put(weights, WeightsPhase.DAMAGED, 0, f"damaged on this disk, fetched again: {wrong}")
                return True
        return False

    def _suspects(self) -> Set[str]:
        desired = self._board.desired
        looping = {seen.id for seen in self._board.shards() if seen.state is ShardState.CRASHLOOP}
        return {shard.weights.fingerprint for shard in desired.node.shards if shard.id in looping} if desired else set()

    def _use(self, weights: Weights) -> None:
        """Mark as used now, so that what is wanted longest ago is removed first."""
        seen = self._board.weights((weights.name, weights.fingerprint))
        if seen is None or seen.phase is not WeightsPhase.WHOLE:
            self._put(weights, WeightsPhase.WHOLE, weights.size_bytes)
            os.utime(os.path.join(self._layout.weights(weights.name, weights.fingerprint), MARKER))

    def _fetch_or_wait(self, weights: Weights, reserve: int) -> float:
        failures, at = self._failed.get(weights.fingerprint, (0, 0.0))
        if failures:
            wait = at + RETRY_SECONDS[min(failures, len(RETRY_SECONDS)) - 1] - time.monotonic()
            if wait > 0:
                return wait
        if not failures:
            log.info("fetching weights name=%s files=%d bytes=%d", weights.name, len(weights.files),
                     weights.size_bytes)
        try:
            self._fetch(weights, reserve)
            self._failed.pop(weights.fingerprint, None)
            self._said.is_over(weights.fingerprint)
        except download.Stopped:
            return 0.0
        except LlmgwError as error:
            if self._said.is_new(weights.fingerprint, error.message):
                log.warning("weights not fetched name=%s reason=%s: %s", weights.name, error.reason, error.message)
            most = DISK_FAILURES if isinstance(error, DiskFull) else len(RETRY_SECONDS)
            self._failed[weights.fingerprint] = (min(failures + 1, most), time.monotonic())
            self._put(weights, WeightsPhase.FAILED, 0,
                      error.message + (f"; {error.hint}" if error.hint else ""))
            return RETRY_SECONDS[0]
        return EVERY_SECONDS

    def _fetch(self, weights: Weights, reserve: int) -> None:
        done = 0
        for file in weights.files:
            self._fetch_file(weights, file, done, reserve)
            done += file.size_bytes
            failpoint.reach("weights-after-blob")
        self._complete(weights)
        self._put(weights, WeightsPhase.WHOLE, weights.size_bytes)
        log.info("weights whole name=%s fingerprint=%.12s", weights.name, weights.fingerprint)

    def _fetch_file(self, weights: Weights, file: WeightsFile, before: int, reserve: int) -> None:
        target = self._layout.blob(file.sha256)
        report = self._reporter(weights, before)
        report(0)
        if os.path.exists(target):
            wrong = download.damage(target, file.size_bytes, file.chunks, file.sha256)
            if not wrong:
                return
            log.warning("%s: fetched again", wrong)
            files.remove(target)
        path = paths.fill(paths.BLOB, digest=file.sha256)
        download.fetch(lambda offset: self._client.stream(path, headers={"Range": f"bytes={offset}-"}),
                       target, sha256=file.sha256, size=file.size_bytes, chunks=file.chunks,
                       partial=self._layout.partial(file.sha256), reserve_bytes=reserve, progress=report,
                       stopping=lambda: self._stop.is_set() or not self._is_wanted(weights))

    def _is_wanted(self, weights: Weights) -> bool:
        desired = self._board.desired
        return desired is None or any(shard.weights.fingerprint == weights.fingerprint
                                      for shard in desired.node.shards)

    def _reporter(self, weights: Weights, before: int) -> Callable[[int], None]:
        last = [0.0]
        total = weights.size_bytes

        def report(count: int) -> None:
            now = time.monotonic()
            if now - last[0] >= REPORT_SECONDS:
                last[0] = now
                done = before + count
                share = 100 * done // total if total else 100
                self._put(weights, WeightsPhase.FETCHING, done,
                          f"fetching weights: {done / 1e6:.1f} of {total / 1e6:.1f} MB, {share} %")
        return report

    def _complete(self, weights: Weights) -> None:
        """Link the blobs under their own names, and write the marker last."""
        folder = files.make_dir(self._layout.weights(weights.name, weights.fingerprint), 0o755)
        for file in weights.files:
            link = os.path.join(folder, _flat(file.name))
            target = os.path.relpath(self._layout.blob(file.sha256), folder)
            with files.storing("link", link):
                if not os.path.islink(link) or os.readlink(link) != target:
                    files.remove(link)
                    os.symlink(target, link)
        failpoint.reach("weights-before-marker")
        files.write_json(os.path.join(folder, MARKER), wire.WEIGHTS.encode(weights), mode=0o644)
        failpoint.reach("weights-after-marker")

    def _held(self) -> List[Weights]:
        found = []
        for name in _names(self._layout.models):
            for version in _names(os.path.join(self._layout.models, name)):
                weights = self._manifest(os.path.join(self._layout.models, name, version))
                if weights is not None:
                    found.append(weights)
        return found

    def _manifest(self, folder: str) -> Optional[Weights]:
        """Return the manifest in a folder, read once per change: one of a large model is long."""
        try:
            stamp = os.stat(os.path.join(folder, MARKER)).st_ctime_ns
        except OSError:
            return None
        known = self._manifests.get(folder)
        if known is None or known[0] != stamp:
            known = self._manifests[folder] = (stamp, read_marker(folder))
        return known[1]

    def _remove(self, name: str, fingerprint: str) -> None:
        folder = self._layout.weights(name, fingerprint)
        gone = read_marker(folder)
        files.remove(os.path.join(folder, MARKER))
        files.remove(folder)
        kept = {file.sha256 for weights in self._held() for file in weights.files}
        for file in gone.files if gone else ():
            if file.sha256 not in kept:
                files.remove(self._layout.blob(file.sha256))
        self._board.drop_weights((name, fingerprint))
        log.info("weights removed to make room name=%s", name)

    def _put(self, weights: Weights, phase: WeightsPhase, done: int, message: str = "") -> None:
        self._board.put_weights(WeightsObserved(weights.name, weights.fingerprint, phase, done,
                                                weights.size_bytes, message))


def read_marker(folder: str) -> Optional[Weights]:
    """Return the manifest of a complete folder, None where the marker is absent or unreadable."""
    try:
        data = files.read_bytes(os.path.join(folder, MARKER))
        return wire.WEIGHTS.decode(json.loads(data)) if data else None
    except (ValueError, LlmgwError):
        return None


def first_file(weights: Weights) -> str:
    """Return the file an engine is pointed to: the first in order of names (split files are numbered)."""
    models = sorted(file.name for file in weights.files
                    if file.name.endswith(".gguf") and file.name != weights.projector)
    names = models or sorted(file.name for file in weights.files)
    if not names:
        raise ParseError(f"weights {weights.name}: no files")
    return _flat(names[0])


def projector_file(folder: str, weights: Weights) -> str:
    """Return what a vision model sees with, empty where it does not."""
    return os.path.join(folder, _flat(weights.projector)) if weights.projector else ""


def _phase(layout: Layout, weights: Weights) -> WeightsPhase:
    """Say whether the files a marker lists are there in their sizes."""
    folder = layout.weights(weights.name, weights.fingerprint)
    for file in weights.files:
        try:
            if os.stat(os.path.join(folder, _flat(file.name))).st_size != file.size_bytes:
                return WeightsPhase.DAMAGED
        except OSError:
            return WeightsPhase.DAMAGED
    return WeightsPhase.WHOLE


def _as_held(layout: Layout, weights: Weights) -> decide.Held:
    marker = os.path.join(layout.weights(weights.name, weights.fingerprint), MARKER)
    return decide.Held(weights.name, weights.fingerprint, weights.size_bytes, os.path.getmtime(marker))


def _names(folder: str) -> List[str]:
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def _flat(name: str) -> str:
    if not name or name.startswith(".") or "/" in name or "\0" in name:
        raise ParseError(f"not a file name: {name!r:.200}")
    return name
