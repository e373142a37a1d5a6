"""The weights of a node: fetched from the control plane, verified, and usable only when complete."""
from __future__ import annotations

import json
import logging
import os
import threading
import time
from typing import Dict, FrozenSet, List, Optional, Sequence, Set, Tuple

from llmgw.agent import fetch
from llmgw.agent.board import Board
from llmgw.agent.fetch import Fetcher
from llmgw.agent.layout import Layout
from llmgw.api import wire
from llmgw.decide import weights as decide
from llmgw.domain.digest import fingerprint
from llmgw.domain.errors import DiskFull, LlmgwError, ParseError
from llmgw.domain.model import Weights, WeightsFile, WeightsObserved, WeightsPhase
from llmgw.domain.replica import ShardState
from llmgw.system import download, failpoint, files
from llmgw.system.logs import Said

log = logging.getLogger(__name__)

MARKER = ".complete.json"
EVERY_SECONDS = 5.0
RETRY_SECONDS = (2.0, 5.0, 15.0, 60.0)
USED_SECONDS = 600.0              # between two marks that weights are still wanted
DISK_FAILURES = 3                 # as many failures a full disk counts as, at most: tried again within 15 s
RECHECK_SECONDS = 600.0           # between two looks at the bytes of weights that no engine can load


class WeightsKeeper:
    """One thread; the only writer of ``models/`` and ``blobs/`` but for engine archives."""

    def __init__(self, fetcher: Fetcher, board: Board, layout: Layout, stop: threading.Event) -> None:
        self._board, self._layout, self._stop = board, layout, stop
        self._failed: Dict[str, Tuple[int, float]] = {}      # fingerprint -> (failures, when)
        self._manifests: Dict[str, Tuple[int, Optional[Weights]]] = {}
        self._checked: Dict[str, float] = {}                 # fingerprint -> when its bytes were read again
        self._damaged: Dict[str, List[int]] = {}             # sha256 -> chunks that have changed on the disk
        self._runs: Dict[str, str] = {}                      # shard -> fingerprint
        self._said = Said()
        self._fetcher = fetcher
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
        """Fetch what is wanted and not here; remove what nobody wants when room is short, or for a day."""
        desired = self._board.desired
        if desired is None:
            return None
        wanted = list({shard.weights.fingerprint: shard.weights for shard in desired.node.shards}.values())
        self._runs.update({shard.id: shard.weights.fingerprint for shard in desired.node.shards})
        held = self.held()
        for item in held:
            self._look_after(item)
        free, total = files.free_bytes(self._layout.root), self._board.facts.disk_total_bytes
        plan = decide.plan(wanted, [_as_held(self._layout, item) for item in held], free_bytes=free,
                           reserve_bytes=decide.reserve(total), now=time.time(), in_use=self._in_use())
        for old in plan.remove:
            self._remove(old.name, old.fingerprint)
        for weights in wanted:
            if weights not in plan.fetch:
                self._use(weights)
        waits = [self._fetch_or_wait(weights, decide.reserve(total)) for weights in plan.fetch]
        return min(waits + [EVERY_SECONDS])

    def _in_use(self) -> FrozenSet[str]:
        """Return the fingerprints of what runs here, wanted or not."""
        running = {seen.id for seen in self._board.shards() if seen.state is not ShardState.STOPPED}
        self._runs = {shard: mark for shard, mark in self._runs.items() if shard in running}
        return frozenset(self._runs.values())

    def _look_after(self, weights: Weights) -> None:
        """Read the files again when a shard of them cannot start, and repair them when they are not what they were."""
        now = time.monotonic()
        if weights.fingerprint in self._suspects() and \
                now - self._checked.get(weights.fingerprint, -RECHECK_SECONDS) >= RECHECK_SECONDS:
            self._checked[weights.fingerprint] = now
            for file in weights.files:
                self.report_damage(file.sha256, self._fetcher.damage(file))
        found = [(file, bad) for file in weights.files for bad in [self._damaged.get(file.sha256)] if bad]
        if found:
            self._repair(weights, found)

    def held(self) -> List[Weights]:
        """Return what lies here whole; for other threads to look at."""
        return [item for item in self._held() if _phase(self._layout, item) is WeightsPhase.WHOLE]

    def report_damage(self, digest: str, bad: Sequence[int]) -> None:
        """Note which chunks of a blob have changed; the keeper's own thread repairs them."""
        if bad:
            self._damaged[digest] = list(bad)
            self.poke.set()

    def _repair(self, weights: Weights, found: Sequence[Tuple[WeightsFile, Sequence[int]]]) -> None:
        wait = self._wait_after_failure(weights.fingerprint)
        if wait > 0:
            return
        said = fetch.describe_damage(found)
        log.warning("weights damaged on this disk name=%s: %s", weights.name, said)
        self._put(weights, WeightsPhase.DAMAGED, 0, f"{said}; they are being fetched again")
        try:
            for file, bad in found:
                self._fetcher.repair(file, bad, lambda done: None, self._stop.is_set)
                self._damaged.pop(file.sha256, None)
        except download.Stopped:
            return
        except LlmgwError as error:
            self._note_failure(weights, error, WeightsPhase.DAMAGED, f"{said}, and cannot be fetched again yet: ")
            return
        self._failed.pop(weights.fingerprint, None)
        log.info("weights repaired name=%s: %s", weights.name, said)
        self._put(weights, WeightsPhase.WHOLE, weights.size_bytes, f"{said}, and were fetched again")

    def _suspects(self) -> Set[str]:
        desired = self._board.desired
        looping = {seen.id for seen in self._board.shards() if seen.state is ShardState.CRASHLOOP}
        return {shard.weights.fingerprint for shard in desired.node.shards if shard.id in looping} if desired else set()

    def _use(self, weights: Weights) -> None:
        """Mark as used now, so that what is wanted longest ago is removed first."""
        seen = self._board.weights((weights.name, weights.fingerprint))
        is_news = seen is None or seen.phase not in (WeightsPhase.WHOLE, WeightsPhase.DAMAGED)
        if is_news:
            self._put(weights, WeightsPhase.WHOLE, weights.size_bytes)
        marker = os.path.join(self._layout.weights(weights.name, weights.fingerprint), MARKER)
        if is_news or abs(time.time() - os.path.getmtime(marker)) >= USED_SECONDS:
            os.utime(marker)

    def _wait_after_failure(self, fingerprint: str) -> float:
        failures, at = self._failed.get(fingerprint, (0, 0.0))
        return at + RETRY_SECONDS[min(failures, len(RETRY_SECONDS)) - 1] - time.monotonic() if failures else 0.0

    def _fetch_or_wait(self, weights: Weights, reserve: int) -> float:
        wait = self._wait_after_failure(weights.fingerprint)
        if wait > 0:
            return wait
        if weights.fingerprint not in self._failed:
            log.info("fetching weights name=%s files=%d bytes=%d", weights.name, len(weights.files),
                     weights.size_bytes)
        try:
            self._fetch(weights, reserve)
        except download.Stopped:
            return 0.0
        except LlmgwError as error:
            self._note_failure(weights, error, WeightsPhase.FAILED)
            return RETRY_SECONDS[0]
        self._failed.pop(weights.fingerprint, None)
        self._said.is_over(weights.fingerprint)
        return EVERY_SECONDS

    def _note_failure(self, weights: Weights, error: LlmgwError, phase: WeightsPhase, before: str = "") -> None:
        if self._said.is_new(weights.fingerprint, error.message):
            log.warning("weights not fetched name=%s reason=%s: %s", weights.name, error.reason, error.message)
        most = DISK_FAILURES if isinstance(error, DiskFull) else len(RETRY_SECONDS)
        failures, _ = self._failed.get(weights.fingerprint, (0, 0.0))
        self._failed[weights.fingerprint] = (min(failures + 1, most), time.monotonic())
        self._put(weights, phase, 0, before + error.message + (f"; {error.hint}" if error.hint else ""))

    def _fetch(self, weights: Weights, reserve: int) -> None:
        fetched = self._fetcher.fetch(weights, reserve_bytes=reserve, report=self._reporter(weights),
                                      stopping=lambda: self._stop.is_set() or not self._is_wanted(weights))
        self._complete(weights)
        self._put(weights, WeightsPhase.WHOLE, weights.size_bytes, "; ".join(filter(None, (
            fetched.problem, fetched.sources if fetched.has_peers else ""))))
        log.info("weights whole name=%s fingerprint=%.12s: %s", weights.name, weights.fingerprint,
                 fetched.sources or "everything was here")

    def _is_wanted(self, weights: Weights) -> bool:
        desired = self._board.desired
        return desired is None or any(shard.weights.fingerprint == weights.fingerprint
                                      for shard in desired.node.shards)

    def _reporter(self, weights: Weights) -> fetch.Report:
        total = weights.size_bytes

        def report(done: int, speed: int) -> None:
            share = 100 * done // total if total else 100
            self._put(weights, WeightsPhase.FETCHING, done,
                      f"fetching weights: {done / 1e6:.1f} of {total / 1e6:.1f} MB, {share} %", speed)
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
        log.info("weights removed, nobody wants them any more name=%s", name)

    def _put(self, weights: Weights, phase: WeightsPhase, done: int, message: str = "", speed: int = 0) -> None:
        self._board.put_weights(WeightsObserved(weights.name, weights.fingerprint, phase, done,
                                                weights.size_bytes, message, speed))


def read_marker(folder: str) -> Optional[Weights]:
    """Return the manifest of a complete folder, None where the marker is absent, unreadable or of other files.

    What the node reports as its fingerprint is the digest of this manifest: computed here, by the keeper's
    thread, when a marker changed; a heartbeat only copies it.
    """
    try:
        data = files.read_bytes(os.path.join(folder, MARKER))
        found = wire.WEIGHTS.decode(json.loads(data)) if data else None
        if found is not None and found.fingerprint != fingerprint(
                (file.name, file.size_bytes, file.sha256) for file in found.files):
            return None
        return found
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
