"""Weights from Hugging Face: pulled in the background, pinned to a commit, verified file by file."""
from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO, Dict, List, Optional, Tuple
from urllib.parse import quote, urljoin, urlsplit

from llmgw.api import wire
from llmgw.domain.digest import blob_path, fingerprint
from llmgw.domain.errors import DigestMismatch, DiskFull, DownloadFailed, LlmgwError, NotFound, ParseError, Unauthorized
from llmgw.domain.model import Weights, WeightsFile
from llmgw.parse import hugging_face, weights_source
from llmgw.parse.hugging_face import HubFile
from llmgw.parse.weights_source import HubSource
from llmgw.server.describe import describe
from llmgw.server.releases import RESERVE_BYTES, RETRY_SECONDS, fetch_patiently, partial_path
from llmgw.system import files
from llmgw.system.hashing import hash_file
from llmgw.system.internet import Internet, RateLimited

log = logging.getLogger(__name__)

ENDPOINT = "https://huggingface.co"
MAX_PAGES = 50
AT_ONCE = 2               # pulls; more only share the same line


@dataclass
class _Pull:
    """One source. Only its own thread changes it, under the lock of Hub."""

    name: str
    sentence: str = "waiting for other pulls"
    running: bool = False
    failures: int = 0
    hopeless: bool = False    # trying again will not help: somebody has to do something
    done_bytes: int = 0
    total_bytes: int = 0
    again_at: float = 0.0
    weights: Optional[Weights] = None
    pinned: Dict[str, str] = field(default_factory=dict)   # commit: what the revision meant when first asked


class Hub:
    """Knows what was pulled across restarts; a source keeps the commit it meant when it was first asked for."""

    def __init__(self, data_dir: str, endpoint: str = "", token_file: str = "") -> None:
        self._data_dir = data_dir
        self._endpoint = (endpoint or os.environ.get("LLMGW_HF_ENDPOINT", "") or ENDPOINT).rstrip("/")
        self._internet = Internet(
            self._endpoint, token_file=token_file or os.environ.get("LLMGW_HF_TOKEN_FILE", ""))
        self._lock = threading.Lock()
        self._pulls: Dict[str, _Pull] = {}
        self._slots = threading.Semaphore(AT_ONCE)
        self._stop = threading.Event()

    def want(self, source: str, name: str) -> None:
        """See to it that ``source`` is pulled; call it again and again, a failure is retried when it is time."""
        hub_source = weights_source.hub(source)
        with self._lock:
            pull = self._pulls.get(source)
            if pull is None:
                pull = self._pulls[source] = self._remembered(source, name)
            pull.name = name
            if pull.weights is not None and not self._are_here(pull.weights):
                pull.weights, pull.sentence = None, f"files of {source} are gone from the mirror"
            due = pull.weights is None and not pull.running and time.monotonic() >= pull.again_at
            if not due or self._stop.is_set():
                return
            pull.running = True
        threading.Thread(target=self._run, args=(source, hub_source, pull), name=f"hub-{name}", daemon=True).start()

    def status(self, source: str) -> Tuple[Optional[Weights], str]:
        """Return the weights when they are whole, and else in words what they wait for."""
        with self._lock:
            pull = self._pulls.get(source)
            if pull is None:
                return None, f"{source} is not being pulled"
            if pull.weights is None:
                return None, pull.sentence
            return replace(pull.weights, name=pull.name), ""

    def progress(self, source: str) -> Dict[str, Any]:
        """Return how far a pull is, and whether it has to be given up."""
        with self._lock:
            pull = self._pulls.get(source) or _Pull("")
            return {"done_bytes": pull.done_bytes, "total_bytes": pull.total_bytes,
                    "failed": pull.hopeless and not pull.running}

    def look(self, source: str) -> Tuple[str, Tuple[HubFile, ...]]:
        """Ask now, and return the commit and the files that ``source`` means; nothing is fetched or kept."""
        hub_source = weights_source.hub(source)
        commit = self._ask_commit(source, hub_source)
        return commit, hugging_face.choose(self._files(hub_source, commit), hub_source)[0]

    def activity(self) -> Tuple[str, ...]:
        """Return one sentence for each pull under way."""
        with self._lock:
            return tuple(pull.sentence for pull in self._pulls.values() if pull.running)

    def close(self) -> None:
        """Stop pulling; what has come so far is kept."""
        self._stop.set()

    def _run(self, source: str, hub_source: HubSource, pull: _Pull) -> None:
        failure: Optional[LlmgwError] = None
        weights: Optional[Weights] = None
        try:
            with self._slots:
                weights = self._pull(source, hub_source, pull)
        except LlmgwError as error:
            failure = error
        finally:
            with self._lock:
                pull.running = False
                pull.weights = weights
                if weights is None:
                    self._note_failure(source, pull, failure)
        if weights is not None:
            log.info("pulled source=%s size_bytes=%d", source, weights.size_bytes)

    def _note_failure(self, source: str, pull: _Pull, error: Optional[LlmgwError]) -> None:
        wait = RETRY_SECONDS[min(pull.failures, len(RETRY_SECONDS) - 1)]
        if isinstance(error, RateLimited):
            wait = max(wait, error.seconds)
        message = "the pull ended by a fault of its own; see the server's log" if error is None else error.message
        message = message if source in message else f"{source}: {message}"
        if error is not None and error.hint:
            message += f"; {error.hint}"
        if pull.sentence != message:
            log.warning("pull failed source=%s: %s", source, message)
        pull.hopeless = isinstance(error, (NotFound, Unauthorized, ParseError))
        pull.sentence, pull.failures, pull.again_at = message, pull.failures + 1, time.monotonic() + wait

    def _pull(self, source: str, hub_source: HubSource, pull: _Pull) -> Weights:
        commit = pull.pinned.get("commit") or self._commit(source, hub_source, pull)
        chosen, form = hugging_face.choose(self._files(hub_source, commit), hub_source)
        _check_names(chosen, source)
        self._check_space(chosen, source)
        total = sum(file.size_bytes for file in chosen)
        done, kept = 0, []
        pull.total_bytes = total
        for file in chosen:
            kept.append(self._bring(source, hub_source, commit, file, pull, done, total))
            done += file.size_bytes
        weights = self._manifest(source, commit, pull.name, form, kept)
        self._remember(source, {"commit": commit, "weights": wire.WEIGHTS.encode(weights)})
        return weights

    def _commit(self, source: str, hub_source: HubSource, pull: _Pull) -> str:
        self._say(pull, f"asking for {source}")
        commit = self._ask_commit(source, hub_source)
        pull.pinned["commit"] = commit
        self._remember(source, {"commit": commit, "weights": None})
        return commit

    def _ask_commit(self, source: str, hub_source: HubSource) -> str:
        url = f"{self._api(hub_source)}/revision/{quote(hub_source.revision, safe='')}"
        try:
            answer = self._internet.get(url)
        except (NotFound, Unauthorized) as error:
            raise NotFound(f"{source} does not exist, or may not be read without a token",
                           hint="check how it is spelled; gated and private models need LLMGW_HF_TOKEN_FILE") from error
        return hugging_face.commit(answer.body, hub_source.repo)

    def _files(self, hub_source: HubSource, commit: str) -> List[HubFile]:
        found: List[HubFile] = []
        url = f"{self._api(hub_source)}/tree/{commit}?recursive=true"
        for _ in range(MAX_PAGES):
            answer = self._internet.get(url)
            found += hugging_face.files(answer.body, hub_source.repo)
            following = hugging_face.next_page(answer.headers.get("link", ""))
            if not following:
                return found
            url = urljoin(url, following)
            if urlsplit(url)[:2] != urlsplit(self._endpoint)[:2]:
                raise DownloadFailed(f"hf:{hub_source.repo}: its list of files goes on at another server: {url[:200]}")
        raise ParseError(f"hf:{hub_source.repo}: its list of files has no end")

    def _bring(self, source: str, hub_source: HubSource, commit: str, file: HubFile, pull: _Pull, before: int,
               total: int) -> WeightsFile:
        """Return one file of the manifest, fetched and verified; a blob that is there already stays."""
        url = f"{self._endpoint}/{hub_source.repo}/resolve/{commit}/{quote(file.path)}"
        if not file.sha256:
            return self._bring_small(url, source, file)
        target = os.path.join(self._data_dir, blob_path(file.sha256))

        def told(done: int) -> None:
            pull.done_bytes = before + done
            self._say(pull, _progress(source, before + done, total))

        try:
            fetch_patiently(self._internet, url, target, file.sha256, file.size_bytes, told, self._stop,
                            partial=partial_path(self._data_dir, file.sha256))
        except Unauthorized as error:
            raise Unauthorized(
                f"{source} is gated or private: {error.message}",
                hint=f"accept its terms at {self._endpoint}/{hub_source.repo}, and give the server a token of that "
                     "account in a file: LLMGW_HF_TOKEN_FILE") from error
        self._say(pull, f"checking {file.name} of {source}")
        sha256, chunks, size = hash_file(target)
        if (sha256, size) != (file.sha256, file.size_bytes):
            files.remove(target)
            raise DigestMismatch(file.name, expected=file.sha256, actual=sha256)
        return WeightsFile(file.name, size, sha256, chunks)

    def _bring_small(self, url: str, source: str, file: HubFile) -> WeightsFile:
        """Bring a file that git itself holds: its digest is git's, of a header and the bytes."""
        if file.size_bytes > hugging_face.MAX_SMALL_BYTES:
            raise ParseError(f"{source}: {file.path} has {file.size_bytes} bytes and no sha256")
        data = self._internet.get(url, max_body=hugging_face.MAX_SMALL_BYTES).body
        oid = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
        if oid != file.git_oid:
            raise DownloadFailed(f"{source}: {file.path} is not what its commit says",
                                 hint="it will be fetched again")
        sha256 = hashlib.sha256(data).hexdigest()
        target = os.path.join(self._data_dir, blob_path(sha256))
        files.make_dir(os.path.dirname(target), 0o755)
        files.write_atomic(target, data, 0o644)
        return WeightsFile(file.name, len(data), sha256, hash_file(target)[1])

    def _manifest(self, source: str, commit: str, name: str, form: str, kept: List[WeightsFile]) -> Weights:
        mark = fingerprint((file.name, file.size_bytes, file.sha256) for file in kept)
        weights = Weights(name, mark, tuple(kept), source=source, revision=commit, format=form,
                          imported_at=time.time())
        return describe(weights, self._open)

    def _open(self, digest: str) -> BinaryIO:
        path = os.path.join(self._data_dir, blob_path(digest))
        with files.storing("read", path):
            return open(path, "rb")

    def _check_space(self, chosen: Tuple[HubFile, ...], source: str) -> None:
        here = files.make_dir(os.path.join(self._data_dir, "blobs"), 0o755)
        needed = sum(file.size_bytes for file in chosen if not (file.sha256 and os.path.exists(
            os.path.join(self._data_dir, blob_path(file.sha256)))))
        free = files.free_bytes(here)
        if needed + RESERVE_BYTES > free:
            raise DiskFull(f"{source} needs {needed} bytes, {free} are free on the filesystem of {here}",
                           hint="free some space there, or choose a smaller model")

    def _api(self, hub_source: HubSource) -> str:
        return f"{self._endpoint}/api/models/{hub_source.repo}"

    def _say(self, pull: _Pull, sentence: str) -> None:
        with self._lock:
            pull.sentence = sentence

    def _state_path(self, source: str) -> str:
        return os.path.join(self._data_dir, "hub", hashlib.sha256(source.encode()).hexdigest()[:32] + ".json")

    def _remember(self, source: str, state: Dict[str, Any]) -> None:
        path = self._state_path(source)
        files.make_dir(os.path.dirname(path))
        files.write_json(path, {"source": source, **state})

    def _remembered(self, source: str, name: str) -> _Pull:
        """Return what an earlier process knew of ``source``; weights whose files are gone are pulled again."""
        pull = _Pull(name)
        data = files.read_bytes(self._state_path(source))
        if data is None:
            return pull
        try:
            state = json.loads(data)
            pull.pinned["commit"] = hugging_face.commit(json.dumps({"sha": state["commit"]}).encode(), source)
            weights = wire.WEIGHTS.decode(state["weights"]) if state["weights"] else None
        except (ParseError, ValueError, KeyError, TypeError):
            log.warning("what was known of a pull cannot be read, starting anew source=%s", source)
            return _Pull(name)
        if weights is not None and self._are_here(weights):
            pull.weights = weights
        return pull

    def _are_here(self, weights: Weights) -> bool:
        return all(os.path.isfile(os.path.join(self._data_dir, blob_path(file.sha256))) for file in weights.files)


def _check_names(chosen: Tuple[HubFile, ...], source: str) -> None:
    if len({file.name for file in chosen}) != len(chosen):
        raise ParseError(f"{source}: two of its files have the same name")


def _progress(source: str, done: int, total: int) -> str:
    return f"pulling {source}: {done * 100 // max(total, 1)} % ({done >> 20} of {total >> 20} MiB)"
