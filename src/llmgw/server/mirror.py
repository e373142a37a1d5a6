"""The control plane's content-addressed store of weights and engine archives.

A blob has its final name only when its sha256 is the one in the name. The server
is the only writer; a kill at any line leaves a part that the next try continues,
or a file that nothing names.
"""
from __future__ import annotations

import hashlib
import logging
import os
import threading
from dataclasses import replace
from typing import BinaryIO, Callable, Dict, Iterable, List, Optional, Set, Tuple

from llmgw.api import paths, wire
from llmgw.domain.digest import blob_path, fingerprint, sha256_hex
from llmgw.domain.engine import ENGINES, TOOLS, Asset
from llmgw.domain.errors import Conflict, DigestMismatch, NotFound, ParseError
from llmgw.domain.model import Weights, WeightsFile
from llmgw.domain.names import check_name
from llmgw.domain.view import EngineArchive
from llmgw.server import records
from llmgw.server.describe import describe
from llmgw.server.store import Delete, Put, Store
from llmgw.system import failpoint, files, hashing
from llmgw.system.clock import Clock
from llmgw.system.pace import Pace

log = logging.getLogger(__name__)

MAX_FILES = 2000
RESERVE_BYTES = 64 << 20      # kept free for the database, which shares the disk


class _Part:
    """An upload under way; the running hash is thrown away when the file is not where it was left.

    It stays for as long as the server runs: who waits for its lock must not find another one beside it.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.restart()

    def restart(self) -> None:
        self.digest = hashlib.sha256()
        self.hashed_bytes = 0


class Mirror:
    """Everything below ``folder``; what it holds under which name is in the store."""

    def __init__(self, folder: str, store: Store, clock: Clock) -> None:
        self.folder, self._store, self._clock = folder, store, clock
        blobs = os.path.join(folder, os.path.dirname(blob_path("0" * 64)))
        for made in (folder, os.path.dirname(blobs), blobs):     # makedirs gives the mode to the last one only
            files.make_dir(made)
        self._uploads = files.make_dir(os.path.join(folder, "uploads"))
        self.pace = Pace()            # of what nodes get
        self._names = threading.Lock()     # no blob goes between a look at what names it and the next name
        self._lock = threading.Lock()
        self._parts: Dict[str, _Part] = {}
        self._chunks: Dict[str, Tuple[str, ...]] = {}

    def path(self, digest: str) -> str:
        """Return where the blob is, or will be."""
        return os.path.join(self.folder, blob_path(digest))

    def has(self, digest: str) -> bool:
        return os.path.isfile(self.path(digest))

    def open(self, digest: str) -> BinaryIO:
        """Return the blob, open for reading; NotFound when there is none."""
        path = self.path(digest)
        with files.storing("read", path):
            try:
                return open(path, "rb")
            except FileNotFoundError:
                raise NotFound(f"no such blob: {sha256_hex(digest)}") from None

    # Uploads: pieces in order, any number of interruptions.

    def received(self, digest: str) -> Tuple[int, bool]:
        """Return (bytes that are here, whether the blob is complete)."""
        if self.has(digest):
            return os.path.getsize(self.path(digest)), True
        return self._part_size(digest), False

    def _part_path(self, digest: str) -> str:
        return os.path.join(self._uploads, sha256_hex(digest) + ".part")

    def _part_size(self, digest: str) -> int:
        try:
            return os.path.getsize(self._part_path(digest))
        except FileNotFoundError:
            return 0

    def _part(self, digest: str) -> _Part:
        with self._lock:
            return self._parts.setdefault(sha256_hex(digest), _Part())

    def append(self, digest: str, offset: int, piece: bytes) -> int:
        """Add a piece that continues what is here, and return the new size; Conflict tells where to go on."""
        part, path = self._part(digest), self._part_path(digest)
        with part.lock:
            size = self._part_size(digest)
            if self.has(digest):
                raise Conflict(f"blob {sha256_hex(digest)} is complete already")
            if offset != size:
                raise Conflict(f"the piece starts at {offset}, but {size} bytes are here",
                               hint=f"go on at offset {size}")
            if part.hashed_bytes != size:
                part.restart()
            self._check_space(len(piece))
            with files.storing("write", path):
                handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
                try:
                    files.write_at(handle, piece, size)
                    failpoint.reach("upload-after-write")
                except OSError:
                    os.ftruncate(handle, size)
                    raise
                finally:
                    os.close(handle)
            if part.hashed_bytes == size:
                part.digest.update(piece)
                part.hashed_bytes += len(piece)
            return size + len(piece)

    def _check_space(self, size_bytes: int) -> None:
        files.check_space(self.folder, size_bytes, RESERVE_BYTES)

    def finish(self, digest: str, size_bytes: int) -> None:
        """Verify the whole upload and give the blob its name; what is wrong is thrown away."""
        part, path, name = self._part(digest), self._part_path(digest), sha256_hex(digest)
        with part.lock:
            if self.has(digest):
                self._check_blob(name)
                with files.storing("write", self.path(digest)):
                    os.utime(self.path(digest))      # young: its manifest comes next
                return
            size = self._part_size(digest)
            if size != size_bytes:
                raise Conflict(f"{size} of {size_bytes} bytes are here", hint=f"go on at offset {size}")
            if not size and not os.path.exists(path):
                files.write_atomic(path, b"")
            actual = part.digest.hexdigest() if part.hashed_bytes == size else hashing.hash_file(path)[0]
            if actual != name:
                files.remove(path)
                raise DigestMismatch("the upload", expected=name, actual=actual)
            self.adopt(path, name)

    def _check_blob(self, name: str) -> None:
        """Read a blob that is here: one that rotted on the disk is thrown away, so that it can come again."""
        actual = hashing.hash_file(self.path(name))[0]
        if actual != name:
            files.remove(self.path(name))
            self._chunks.pop(name, None)
            raise DigestMismatch("the blob in the mirror", expected=name, actual=actual)

    def adopt(self, path: str, digest: str) -> None:
        """Move a verified file of this filesystem to its blob's name."""
        target = self.path(digest)
        with files.storing("write", target):
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
            failpoint.reach("blob-before-rename")
            os.replace(path, target)
            files.fsync_dir(os.path.dirname(target))

    # Models.

    def models(self) -> List[Weights]:
        """Return every manifest, by name."""
        return [wire.WEIGHTS.decode(entry.value, entry.key) for entry in self._store.range(records.MANIFESTS)]

    def model(self, name: str) -> Optional[Weights]:
        """Return the manifest of that name, None when there is none."""
        entry = self._store.get(records.MANIFESTS + name)
        return wire.WEIGHTS.decode(entry.value, entry.key) if entry is not None else None

    def complete(self, given: Weights) -> Weights:
        """Return the manifest with all that this server knows better: fingerprint, chunks, what the header says."""
        check_name(given.name, "model name")
        if not given.files or len(given.files) > MAX_FILES:
            raise ParseError(f"model {given.name}: a manifest of {len(given.files)} files")
        names = [file.name for file in given.files]
        for name in names:
            check_name(name, "file name")
            if "/" in name:
                raise ParseError(f"model {given.name}: the file {name!r:.100} is in a folder")
        if len(set(names)) != len(names):
            raise ParseError(f"model {given.name}: a file is named twice")
        whole = tuple(self._complete_file(file) for file in given.files)
        mark = fingerprint((file.name, file.size_bytes, file.sha256) for file in whole)
        return describe(replace(given, files=whole, fingerprint=mark,
                                imported_at=given.imported_at or self._clock.wall()), self.open)

    def _complete_file(self, file: WeightsFile) -> WeightsFile:
        digest = sha256_hex(file.sha256)
        if not self.has(digest):
            raise Conflict(f"{file.name}: its blob {digest} is not in the mirror", hint="upload it first")
        size = os.path.getsize(self.path(digest))
        if size != file.size_bytes:
            raise ParseError(f"{file.name}: {file.size_bytes} bytes, but the blob has {size}")
        return WeightsFile(file.name, size, digest, self._chunks_of(digest))

    def _chunks_of(self, digest: str) -> Tuple[str, ...]:
        """Return the chunk hashes, read from the blob once: nobody's word is taken for them."""
        if digest not in self._chunks:
            actual, chunks, _ = hashing.hash_file(self.path(digest))
            if actual != digest:
                raise DigestMismatch(f"blob {digest}", expected=digest, actual=actual)
            self._chunks[digest] = chunks
        return self._chunks[digest]

    def know_chunks(self, weights: Weights) -> None:
        """Take chunk hashes that this server itself computed, so that no file is read twice for them."""
        self._chunks.update({file.sha256: file.chunks for file in weights.files if file.chunks})

    def register_model(self, given: Weights) -> Weights:
        """Keep a manifest whose blobs are all here, and return it as it is kept."""
        made = self.complete(given)            # may read for minutes; a blob may go meanwhile
        with self._names:
            lost = self.lost(made)
            if lost:
                raise Conflict(f"{lost[0]}: its blob is not in the mirror any more", hint="upload it again")
            self._store.txn((), [Put(records.MANIFESTS + made.name, wire.WEIGHTS.encode(made))])
        return made

    def lost(self, weights: Weights) -> Tuple[str, ...]:
        """Return the files of a model whose blobs are not here."""
        return tuple(file.name for file in weights.files if not self.has(file.sha256))

    def notes(self, name: str) -> Dict[str, str]:
        """Return what else was known of a model where it came from: its template, its licence ..."""
        entry = self._store.get(records.NOTES + name)
        return dict(entry.value["notes"]) if entry is not None else {}

    def put_notes(self, name: str, notes: Dict[str, str]) -> None:
        """Keep the notes of a model that is here."""
        if self.model(name) is None:
            raise NotFound(f"no such model in the mirror: {name:.100}")
        self._store.txn((), [Put(records.NOTES + name, {"notes": notes})])

    def retire(self, digest: str, good_bytes: int) -> None:
        """Take a damaged blob out of service; its good beginning is where the next upload of it goes on."""
        name, path, part = sha256_hex(digest), self.path(digest), self._part_path(digest)
        with self._part(digest).lock:
            self._chunks.pop(name, None)
            with files.storing("write", path):
                # one with a second name is somebody's file: it is not ours to cut
                if good_bytes and not os.path.exists(part) and os.stat(path).st_nlink == 1:
                    os.truncate(path, good_bytes)
                    os.replace(path, part)
                else:
                    files.remove(path)

    def named_digests(self) -> Set[str]:
        """Return the blobs that a name of the mirror needs."""
        named = {file.sha256 for weights in self.models() for file in weights.files}
        return named | {archive.asset.sha256 for archive in self.archives()}

    def remove_model(self, name: str, used: Iterable[Weights]) -> None:
        """Forget a model, and the blobs that neither another name nor ``used`` needs."""
        gone = self.model(name)
        if gone is None:
            raise NotFound(f"no such model in the mirror: {name:.100}", hint="llmgw.pyz ctl mirror list shows them")
        with self._names:
            self._store.txn((), [Delete(records.MANIFESTS + name), Delete(records.NOTES + name)])
            self._collect((file.sha256 for file in gone.files), used)

    # Engine archives.

    def archives(self) -> List[EngineArchive]:
        """Return every archive, by engine and version."""
        return [wire.ENGINE_ARCHIVE.decode(entry.value, entry.key) for entry in self._store.range(records.ARCHIVES)]

    def register_archive(self, engine: str, version: str, name: str, sha256: str, size_bytes: int,
                         source: str = "import") -> EngineArchive:
        """Keep an uploaded blob as a file of an engine's release."""
        if engine not in (*ENGINES, *TOOLS):
            raise ParseError(f"unknown engine: {engine:.100}", hint=f"known: {', '.join((*ENGINES, *TOOLS))}")
        for text, what in ((version, "version"), (name, "archive name")):
            check_name(text.replace("+", "-"), what)         # builds of Python have one
            if "/" in text:
                raise ParseError(f"{what} {text!r:.100} is not a flat name")
        digest = sha256_hex(sha256)
        with self._names:
            if not self.has(digest):
                raise Conflict(f"{name}: its blob {digest} is not in the mirror", hint="upload it first")
            size = os.path.getsize(self.path(digest))
            if size != size_bytes:
                raise ParseError(f"{name}: {size_bytes} bytes, but the blob has {size}")
            made = EngineArchive(engine, version, Asset(name, size_bytes, digest), self._clock.wall(), source)
            self._store.txn((), [Put(_archive_key(engine, version, name), wire.ENGINE_ARCHIVE.encode(made))])
        return made

    def archive(self, engine: str, version: str, name: str) -> Optional[EngineArchive]:
        entry = self._store.get(_archive_key(engine, version, name))
        return wire.ENGINE_ARCHIVE.decode(entry.value, entry.key) if entry is not None else None

    def remove_archive(self, engine: str, version: str, name: str) -> None:
        gone = self.archive(engine, version, name)
        if gone is None:
            raise NotFound(f"no such archive in the mirror: {engine} {version} {name:.100}")
        with self._names:
            self._store.txn((), [Delete(_archive_key(engine, version, name))])
            self._collect([gone.asset.sha256], ())

    def _collect(self, digests: Iterable[str], used: Iterable[Weights]) -> None:
        kept = self.named_digests() | {file.sha256 for weights in used for file in weights.files}
        for digest in set(digests) - kept:
            files.remove(self.path(digest))
            self._chunks.pop(digest, None)

    def import_file(self, path: str, name: str, source: str) -> Weights:
        """Copy a file of this machine into the mirror and return its manifest (kept by the caller)."""
        digest, _, size_bytes = hashing.hash_file(path)
        try:
            self.take(digest, lambda scratch: self._copy(path, scratch, size_bytes), path)
        except DigestMismatch:
            raise Conflict(f"{path}: the file changed while it was read") from None
        flat = os.path.basename(path)
        return self.complete(Weights(name, "", (WeightsFile(flat, size_bytes, digest),), source=source))

    def take(self, digest: str, lay: Callable[[str], None], origin: str) -> int:
        """Make the blob of what ``lay`` puts at the path it is given, and return its size; other content is refused.

        One at a time for each blob: what another has laid there may be a second name of somebody's file.
        """
        name = sha256_hex(digest)
        with self._part(name).lock:
            if self.has(name):
                return os.path.getsize(self.path(name))
            scratch = self._part_path(name) + ".copy"
            files.remove(scratch)
            try:
                lay(scratch)
                actual, _, size_bytes = hashing.hash_file(scratch)
                if actual != name:
                    raise DigestMismatch(origin, expected=name, actual=actual)
                self.adopt(scratch, name)
                return size_bytes
            except BaseException:
                files.remove(scratch)        # a full disk needs the room
                raise

    def _copy(self, path: str, scratch: str, size_bytes: int) -> None:
        self._check_space(size_bytes)
        with files.storing("read", path), open(path, "rb") as data, files.storing("write", scratch):
            handle = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(handle, "wb") as out:
                for piece in iter(lambda: data.read(paths.PIECE_BYTES), b""):
                    out.write(piece)


def _archive_key(engine: str, version: str, name: str) -> str:
    return f"{records.ARCHIVES}{engine}/{version}/{name}"
