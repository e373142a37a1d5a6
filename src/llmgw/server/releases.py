"""Engine releases on GitHub: what files they have, and those files, fetched once per site."""
from __future__ import annotations

import logging
import os
import threading
import time
from typing import Callable, Dict, Optional, Tuple

from llmgw.domain.digest import blob_path, sha256_hex
from llmgw.domain.engine import Asset
from llmgw.domain.errors import DownloadFailed, LlmgwError, NotFound, TryAgain, Unreachable
from llmgw.engines import recipes
from llmgw.engines.recipes import RECIPES, REPOSITORIES
from llmgw.parse import github_release
from llmgw.parse.github_release import Release
from llmgw.system import download
from llmgw.system.github import Github
from llmgw.system.internet import Internet, RateLimited, WebPage

log = logging.getLogger(__name__)

RETRY_SECONDS = (5.0, 15.0, 60.0, 300.0, 600.0)
TRIES = 5
RESERVE_BYTES = 256 << 20     # kept free on the disk that holds the store

Key = Tuple[str, str]         # engine, version

_busy: Dict[str, threading.Lock] = {}     # by path: one writer per file in this process
_busy_lock = threading.Lock()


class Releases:
    """Asks GitHub for a release once per start, in the background, again after a failure."""

    def __init__(self, data_dir: str, api_url: str = "", token_file: str = "") -> None:
        self._data_dir = data_dir
        self._github = Github(api_url, token_file)
        self._api = self._github.api
        self._lock = threading.Lock()
        self._known: Dict[Key, Release] = {}
        self._asking: Dict[Key, threading.Event] = {}
        self._failed: Dict[Key, Tuple[LlmgwError, int, float]] = {}   # why, how often, when to ask again
        self._activity: Dict[str, str] = {}
        self._stop = threading.Event()

    def assets(self, engine: str, version: str) -> Tuple[Tuple[Asset, ...], str]:
        """Return the release's files as far as they are known, and in words why there are none, at once."""
        if engine not in REPOSITORIES:
            return (), ""
        release, problem = self._look((engine, version), f"the files of {engine} {version}")
        return (release.assets, _left_out(release)) if release is not None else ((), problem)

    def cannot(self, engine: str, version: str) -> bool:
        """Whether it is the way to GitHub that fails, as far as is known: who has another may ask there."""
        with self._lock:
            error = self._failed.get((engine, version), (None, 0, 0.0))[0]
        return isinstance(error, (Unreachable, DownloadFailed, RateLimited))

    def published(self, engine: str, version: str) -> Tuple[str, str]:
        """Return when a version was published (UTC), or in words why that is not known, at once."""
        release, problem = self._look((engine, version), f"the date of {engine} {version}")
        return (release.published_at, "") if release is not None else ("", problem)

    def _look(self, key: Key, what: str) -> Tuple[Optional[Release], str]:
        """Return what is known of a release, or why not; asks in the background when it is time to."""
        with self._lock:
            if key in self._known:
                return self._known[key], ""
            error, _, at = self._failed.get(key, (None, 0, 0.0))
            wait = at - time.monotonic()
            if key not in self._asking and wait <= 0 and not self._stop.is_set():
                self._asking[key] = threading.Event()
                threading.Thread(target=self._ask, args=(key,), name=f"release-{key[1]}", daemon=True).start()
        if error is None:
            return None, f"{_host(self._api)} is being asked for {what}"
        return None, f"{what} {'are' if 'files' in what else 'is'} not known: {error.message}"

    def fetch(self, engine: str, version: str, asset_name: str,
              progress: Optional[Callable[[int], None]] = None) -> str:
        """Return the path of a verified file of a release, fetching it if need be; ``progress`` gets bytes done."""
        release = self._release((engine, version))
        asset = next((item for item in release.assets if item.name == asset_name), None)
        if asset is None:
            raise NotFound(f"{engine} {version}: the release has no file {asset_name!r:.200} with a sha256 digest")
        target = os.path.join(self._data_dir, blob_path(asset.sha256))
        if not is_whole(target, asset.size_bytes):
            self._download(release.urls[asset.name], asset, target, progress)
        return target

    def progress(self, sha256: str) -> str:
        """Return how far the download of a file is, in words; empty when it is not under way."""
        with self._lock:
            return self._activity.get(sha256, "")

    def activity(self) -> Tuple[str, ...]:
        """Return one sentence for each download under way."""
        with self._lock:
            return tuple(self._activity.values())

    def close(self) -> None:
        """Stop downloads; what has come so far is kept."""
        self._stop.set()

    def _release(self, key: Key) -> Release:
        """Return the release, waiting for the answer to a question that is under way."""
        if key[0] not in REPOSITORIES:
            raise NotFound(f"{key[0]} does not come from a release archive")
        with self._lock:
            asking = self._asking.get(key)
        if asking is not None:
            asking.wait(120.0)
        with self._lock:
            known = self._known.get(key)
            failed = self._failed.get(key)
        if known is not None:
            return known
        if failed is not None and time.monotonic() < failed[2]:
            raise failed[0]
        self._ask(key)
        with self._lock:
            if key in self._known:
                return self._known[key]
            raise self._failed[key][0]

    def _ask(self, key: Key) -> None:
        """Ask GitHub now and note what it says, or why it did not."""
        release: Optional[Release] = None
        failure: Optional[LlmgwError] = None
        try:
            release = self._answer(*key)
        except LlmgwError as error:
            failure = error
        finally:
            with self._lock:                  # in one step, or somebody asks a second time in between
                asked = self._asking.pop(key, None)
                if release is not None:
                    self._known[key] = release
                    self._failed.pop(key, None)
                else:
                    self._note_failure(key, failure)
            if asked is not None:
                asked.set()
        if release is not None:
            log.info("release known engine=%s version=%s files=%d", *key, len(release.assets))

    def _answer(self, engine: str, version: str) -> Release:
        repository, tag = recipes.release(engine, version)
        try:
            answer = self._github.release(repository, tag)
        except NotFound:
            raise NotFound(f"{engine} has no release {version}",
                           hint="check the version under engines: in server.yaml") from None
        return github_release.dated(answer, tag) if engine in RECIPES else github_release.parse(answer, tag)

    def _note_failure(self, key: Key, found: Optional[LlmgwError]) -> None:
        error = found or TryAgain("the question ended by a fault of its own; see the server's log")
        old, count, _ = self._failed.get(key, (None, 0, 0.0))
        wait = RETRY_SECONDS[min(count, len(RETRY_SECONDS) - 1)]
        if isinstance(error, RateLimited):
            wait = max(wait, error.seconds)
        self._failed[key] = (error, count + 1, time.monotonic() + wait)
        if old is None or old.message != error.message:
            log.warning("release not known engine=%s version=%s: %s", *key, error.message)

    def _download(self, url: str, asset: Asset, target: str, progress: Optional[Callable[[int], None]]) -> None:
        if self._api.startswith("https:") and not url.startswith("https:"):
            raise DownloadFailed(f"{asset.name}: its address is without TLS: {url[:200]}")

        def note(done: int) -> None:
            with self._lock:
                self._activity[asset.sha256] = f"fetching {asset.name}: {done * 100 // asset.size_bytes} %"
            if progress is not None:
                progress(done)
        log.info("fetching asset=%s size_bytes=%d", asset.name, asset.size_bytes)
        try:
            fetch_patiently(self._github.internet, url, target, asset.sha256, asset.size_bytes, note, self._stop,
                            partial=partial_path(self._data_dir, asset.sha256))
        finally:
            with self._lock:
                self._activity.pop(asset.sha256, None)
        log.info("fetched asset=%s", asset.name)


def fetch_patiently(internet: Internet, url: str, target: str, sha256: str, size: int,
                    progress: Callable[[int], None], stop: threading.Event, *, partial: str) -> None:
    """Bring a file, trying again where it was cut off; gives up after several tries without a byte more.

    Whoever comes second for the same file waits, and finds it there.
    """
    with _busy_lock:
        lock = _busy.setdefault(target, threading.Lock())
    with lock:
        if not is_whole(target, size):
            _fetch(internet, url, target, sha256, size, progress, stop, partial)


def _fetch(internet: Internet, url: str, target: str, sha256: str, size: int, progress: Callable[[int], None],
           stop: threading.Event, partial: str) -> None:
    failures, most = 0, -1
    while True:
        try:
            download.fetch(lambda offset: internet.open(url, offset), target, sha256=sha256, size=size,
                           partial=partial, progress=progress, stopping=stop.is_set, reserve_bytes=RESERVE_BYTES)
            return
        except (download.Stopped, WebPage):
            raise
        except (Unreachable, DownloadFailed) as error:
            have = os.path.getsize(partial) if os.path.exists(partial) else 0
            failures = 0 if have > most >= 0 else failures + 1
            most = max(most, have)
            if failures >= TRIES:
                raise
            log.warning("transfer cut off, will go on at=%d of=%d: %s", have, size, error.message)
            if stop.wait(min(2.0 ** failures / 2, 30.0)):
                raise


def partial_path(data_dir: str, sha256: str) -> str:
    """Return where a file lies while it is being fetched; an upload of the same file lies elsewhere."""
    return os.path.join(data_dir, "blobs", "partial", f"fetch-{sha256_hex(sha256)}")


def is_whole(path: str, size: int) -> bool:
    """Whether the blob is there: nothing gets its final name before its sha256 was right."""
    return os.path.isfile(path) and os.path.getsize(path) == size


def _left_out(release: Release) -> str:
    names = [name for name in release.undigested if name.startswith(("llama-", "cudart-llama-"))]
    if not names:
        return ""
    return f"left out, because they have no sha256 digest: {', '.join(names[:10])}"


def _host(url: str) -> str:
    return url.partition("://")[2].partition("/")[0]
