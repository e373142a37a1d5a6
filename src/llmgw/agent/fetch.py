"""Bring one model's files here: from the control plane and from nodes that have them, and repair what changed."""
from __future__ import annotations

import functools
import logging
import os
import threading
import time
from dataclasses import dataclass
from typing import Callable, Dict, List, Optional, Sequence, Tuple

from llmgw.agent.layout import Layout
from llmgw.api import paths
from llmgw.api.client import ControlClient
from llmgw.domain.model import CHUNK_BYTES, Weights, WeightsFile
from llmgw.system import chunk_file, chunks, download, failpoint, files
from llmgw.system.chunks import Bad, Brought, Filler, Supplier, Transfer
from llmgw.system.shares import Patience

log = logging.getLogger(__name__)

REPORT_SECONDS = 1.0
SPEED_SECONDS = 10.0              # over which the speed is taken
Report = Callable[[int, int], None]     # bytes done, bytes per second


class ControlPlane:
    """The control plane as a supplier of one blob."""

    name, spare = "the control plane", False

    def __init__(self, client: ControlClient, digest: str) -> None:
        self._client, self._path = client, paths.fill(paths.BLOB, digest=digest)

    def open(self, first: int, end: int) -> Filler:
        return self._client.stream(self._path, headers={"Range": f"bytes={first}-{end - 1}"})

    def look(self) -> str:
        raise AssertionError("the control plane has everything")

    def dropped(self, lied: bool) -> None:
        raise AssertionError("nothing goes on without the control plane")


@dataclass(frozen=True)
class Fetched:
    """How a model came: ``problem`` is what went wrong on the way, ``sources`` who sent how much, in words."""

    problem: str = ""
    sources: str = ""
    has_peers: bool = False


class Fetcher:
    """Writes below ``blobs/`` only.

    ``peers`` says who else has a blob, besides the control plane, and ``share`` which part of it this node begins
    with: nodes that fetch the same at once begin in different places. Without it there are no others.
    """

    def __init__(self, client: ControlClient, layout: Layout,
                 peers: Callable[[str], Sequence[Supplier]] = lambda digest: (),
                 share: Optional[Callable[[str], Tuple[int, int]]] = None) -> None:
        self._client, self._layout, self._peers, self._share = client, layout, peers, share

    def fetch(self, weights: Weights, *, reserve_bytes: int, report: Report, stopping: Callable[[], bool]) -> Fetched:
        """Bring all files of ``weights`` that are not here."""
        self._check_space(weights, reserve_bytes)
        done, patience, brought = 0, Patience(), []
        for file in weights.files:
            brought.append(self._fetch_file(file, reserve_bytes, _Progress(report, done), stopping, patience))
            done += file.size_bytes
            failpoint.reach("weights-after-blob")
        return Fetched(_problem([bad for one in brought for bad in one.bad], weights), _sources(brought),
                       any(name != ControlPlane.name for one in brought for name in one.by))

    def _check_space(self, weights: Weights, reserve_bytes: int) -> None:
        """Refuse, before the first byte, what this disk cannot hold; what has come already counts as there."""
        needed = sum(max(0, file.size_bytes - self._come(file)) for file in weights.files)
        folder = files.make_dir(os.path.dirname(self._layout.partial("0" * 64)), 0o755)
        files.check_space(folder, needed, reserve_bytes)

    def _come(self, file: WeightsFile) -> int:
        for path in (self._layout.blob(file.sha256), self._layout.partial(file.sha256)):
            try:
                return os.stat(path).st_blocks * 512          # a partial file has holes
            except OSError:
                continue
        return 0

    def _fetch_file(self, file: WeightsFile, reserve_bytes: int, progress: "_Progress",
                    stopping: Callable[[], bool], patience: Patience) -> Brought:
        target, partial = self._layout.blob(file.sha256), self._layout.partial(file.sha256)
        progress(0)
        if os.path.exists(target):
            return self._look_at(file, progress, stopping)
        if not file.chunks and file.size_bytes:
            self._fetch_whole(file, target, partial, reserve_bytes, progress, stopping)
            return Brought(by={ControlPlane.name: file.size_bytes})
        return chunks.bring(lambda: self._suppliers(file.sha256), target, size=file.size_bytes, chunks=file.chunks,
                            partial=partial, reserve_bytes=reserve_bytes, progress=progress, stopping=stopping,
                            share=self._share_of(file.sha256), patience=patience)

    def _fetch_whole(self, file: WeightsFile, target: str, partial: str, reserve_bytes: int, progress: "_Progress",
                     stopping: Callable[[], bool]) -> None:
        source = ControlPlane(self._client, file.sha256)
        download.fetch(lambda offset: source.open(offset, file.size_bytes), target, sha256=file.sha256,
                       size=file.size_bytes, partial=partial, reserve_bytes=reserve_bytes, progress=progress,
                       stopping=stopping)

    def _look_at(self, file: WeightsFile, progress: "_Progress", stopping: Callable[[], bool]) -> Brought:
        """Read a blob that is here already, and bring again what of it is wrong."""
        read = [0]

        def count(more: int) -> None:
            read[0] += more
            progress(read[0])
            if stopping():
                raise download.Stopped(f"{file.name}: stopped while it was read")

        bad = self.damage(file, count)
        return self.repair(file, bad, progress, stopping) if bad else Brought()

    def damage(self, file: WeightsFile, pause: Callable[[int], None] = lambda count: None) -> List[int]:
        """Return which chunks of a blob are not what they should be."""
        target = self._layout.blob(file.sha256)
        if file.chunks or not file.size_bytes:
            return chunk_file.wrong(target, file.size_bytes, file.chunks, pause=pause)
        return [0] if download.damage(target, file.size_bytes, (), file.sha256) else []

    def repair(self, file: WeightsFile, bad: Sequence[int], progress: Callable[[int], None],
               stopping: Callable[[], bool]) -> Brought:
        """Write the right bytes over wrong ones, in place: who has the file mapped sees it get well."""
        target = self._layout.blob(file.sha256)
        whole = not os.path.islink(target) and os.path.exists(target) and os.path.getsize(target) == file.size_bytes
        if not whole or not file.chunks or len(bad) == len(file.chunks):
            files.remove(target)                  # nothing of it is worth keeping
            return self._fetch_file(file, 0, _Progress(lambda done, speed: progress(done), 0), stopping, Patience())
        log.warning("%s: %d of %d chunks have changed on this disk, and are fetched again: %s", file.name, len(bad),
                    len(file.chunks), _places(bad))
        return Transfer(lambda: self._suppliers(file.sha256), target, file.size_bytes, file.chunks, progress=progress,
                        stopping=stopping, share=self._share_of(file.sha256)).run(only=bad)

    def _share_of(self, digest: str) -> Optional[Callable[[], Tuple[int, int]]]:
        return None if self._share is None else functools.partial(self._share, digest)

    def _suppliers(self, digest: str) -> List[Supplier]:
        return [ControlPlane(self._client, digest), *self._peers(digest)]


class _Progress:
    """Turns bytes of one file into bytes of the model and a speed, at most once a second."""

    def __init__(self, report: Report, before: int) -> None:
        self._report, self._before = report, before
        self._lock = threading.Lock()
        self._last, self._marks = 0.0, [(time.monotonic(), 0)]

    def __call__(self, done: int) -> None:
        now = time.monotonic()
        with self._lock:
            if now - self._last < REPORT_SECONDS:
                return
            self._last = now
            self._marks = [mark for mark in self._marks if now - mark[0] <= SPEED_SECONDS] or self._marks[-1:]
            since, at = self._marks[0]
            speed = int((done - at) / (now - since)) if now - since >= REPORT_SECONDS else 0
            self._marks.append((now, done))
        self._report(self._before + done, max(0, speed))


def _problem(bad: Sequence[Bad], weights: Weights) -> str:
    """Return what is to be told of chunks that came wrong."""
    if not bad:
        return ""
    total = sum(len(file.chunks) for file in weights.files)
    return f"{len(bad)} of {total} chunks came wrong from {bad[0].supplier}, and were fetched again"


def _sources(brought: Sequence[Brought]) -> str:
    """Return how much came from whom, the most first."""
    total: Dict[str, int] = {}
    for one in brought:
        for name, count in one.by.items():
            total[name] = total.get(name, 0) + count
    return ", ".join(f"{count / 1e6:.1f} MB from {name}" for name, count in sorted(
        total.items(), key=lambda item: (-item[1], item[0])))


def _places(bad: Sequence[int]) -> str:
    shown = ", ".join(f"bytes {index * CHUNK_BYTES} on" for index in bad[:5])
    return shown + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")


def describe_damage(found: Sequence[Tuple[WeightsFile, Sequence[int]]]) -> str:
    """Return how much of a model was found changed."""
    count = sum(len(bad) for _, bad in found)
    total = sum(max(1, len(file.chunks)) for file, _ in found)
    names = ", ".join(file.name for file, _ in found[:3])
    return f"{count} of {total} chunks of {names} had changed on this disk"


