"""The store in one SQLite file: WAL and FULL, one writer thread, reads from memory.

Every commit first reads whether another program has written meanwhile. A deferred
transaction that turns from reading to writing fails at once with "database is
locked", whatever the timeout; BEGIN IMMEDIATE waits. Waiting transactions share
one commit: an fsync each would allow some 276 a second. The file holds keys of
replicas, so it is 0600.
"""
from __future__ import annotations

import bisect
import json
import logging
import os
import queue
import sqlite3
import threading
from collections import deque
from typing import Deque, Dict, List, Optional, Sequence, Tuple

from llmgw.domain.errors import DiskFull, LlmgwError, StorageError, TryAgain
from llmgw.parse.mounts import network_filesystem
from llmgw.server.store import Changes, Compare, Delete, Entry, Operation, Put
from llmgw.system import failpoint, files

log = logging.getLogger(__name__)

FILE_NAME = "llmgw.db"
SCHEMA = 1
APPLICATION_ID = 0x6C6D6777   # "lmgw"
BUSY_SECONDS = 3.0
MAX_TOGETHER = 100            # transactions in one commit
KEPT_CHANGES = 10_000
WAIT_SECONDS = 30.0
MAX_VALUE_BYTES = 16 << 20


class _Job:
    """A transaction under way."""

    def __init__(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> None:
        self.compares = tuple(compares)
        self.operations = tuple((operation, _encoded(operation)) for operation in operations)
        self.done = threading.Event()
        self.revision: Optional[int] = None
        self.error: Optional[LlmgwError] = None


def _encoded(operation: Operation) -> str:
    if isinstance(operation, Delete):
        return ""
    text = json.dumps(operation.value, sort_keys=True, separators=(",", ":"))
    if len(text) > MAX_VALUE_BYTES:
        raise StorageError(f"{operation.key}: an object of {len(text)} bytes, at most {MAX_VALUE_BYTES} are stored")
    return text


class SqliteStore:
    """A Store in ``folder``/llmgw.db. The caller holds the folder's lock."""

    def __init__(self, folder: str) -> None:
        self.path = os.path.join(folder, FILE_NAME)
        refuse_network_filesystem(folder)
        self._objects, self._revision = _prepare(self.path)
        self._keys = sorted(self._objects)
        self._changes: Deque[Tuple[int, str]] = deque(maxlen=KEPT_CHANGES)
        self._oldest = self._revision          # changes after this are in _changes
        self._changed = threading.Condition()
        self._jobs: "queue.SimpleQueue[Optional[_Job]]" = queue.SimpleQueue()
        self._closed = False
        self._writer = threading.Thread(target=self._write, name="store-writer", daemon=True)
        self._writer.start()

    @property
    def revision(self) -> int:
        return self._revision

    def get(self, key: str) -> Optional[Entry]:
        return self._objects.get(key)

    def range(self, prefix: str) -> List[Entry]:
        with self._changed:
            first = bisect.bisect_left(self._keys, prefix)
            found = []
            for key in self._keys[first:]:
                if not key.startswith(prefix):
                    break
                found.append(self._objects[key])
        return found

    def txn(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Optional[int]:
        job = _Job(compares, operations)
        if self._closed:
            raise TryAgain("the store is closed")
        self._jobs.put(job)
        if not job.done.wait(WAIT_SECONDS):
            raise TryAgain(f"{self.path}: no commit within {WAIT_SECONDS:g} seconds; it may still happen")
        if job.error is not None:
            raise job.error
        return job.revision

    def watch(self, after: int, timeout: float) -> Changes:
        with self._changed:
            self._changed.wait_for(lambda: self._revision > after or self._closed, timeout)
            if after < self._oldest:
                return Changes(self._revision, (), whole=False)
            keys = {key: None for revision, key in self._changes if revision > after}
            return Changes(self._revision, tuple(keys))

    def close(self) -> None:
        self._closed = True
        self._jobs.put(None)
        self._writer.join(WAIT_SECONDS)
        with self._changed:
            self._changed.notify_all()

    def backup(self, target: str) -> None:
        """Write a whole, consistent copy to ``target`` (0600) while the server goes on."""
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600))
        source = sqlite3.connect(f"file:{_quoted(self.path)}?mode=ro", uri=True, timeout=BUSY_SECONDS)
        try:
            copy = sqlite3.connect(target)
            try:
                source.backup(copy)
                copy.execute("PRAGMA journal_mode=DELETE")     # one file, nothing beside it
            finally:
                copy.close()
        except sqlite3.Error as error:
            raise _translated(target, error) from error
        finally:
            source.close()

    # The writer thread.

    def _write(self) -> None:
        connection = _connect(self.path)
        try:
            while True:
                job = self._jobs.get()
                if job is None:
                    return
                jobs, last = self._waiting([job])
                self._commit(connection, jobs)
                if last:
                    return
        finally:
            connection.close()

    def _waiting(self, jobs: List[_Job]) -> Tuple[List[_Job], bool]:
        while len(jobs) < MAX_TOGETHER:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                break
            if job is None:
                return jobs, True
            jobs.append(job)
        return jobs, False

    def _commit(self, connection: sqlite3.Connection, jobs: List[_Job]) -> None:
        """Commit the jobs together; each still sees those before it, and has its own revision."""
        written: Dict[str, Optional[Entry]] = {}
        revision = self._revision
        changes: List[Tuple[int, str]] = []
        try:
            connection.execute("BEGIN IMMEDIATE")
            self._catch_up(connection)
            revision = self._revision
            for job in jobs:
                if self._holds(job, written):
                    revision += 1
                    job.revision = revision
                    _apply(connection, job, written, changes)
            if revision == self._revision:     # every compare failed: there is nothing to write
                connection.execute("ROLLBACK")
                for job in jobs:
                    job.done.set()
                return
            connection.execute("UPDATE meta SET value = ? WHERE name = 'revision'", (revision,))
            failpoint.reach("store-before-commit")
            connection.execute("COMMIT")
            failpoint.reach("store-after-commit")
        except (sqlite3.Error, OSError) as error:
            if not _is_committed(connection, revision) or revision == self._revision:
                self._failed(jobs, error)
                return
        self._publish(revision, written, changes)
        for job in jobs:
            job.done.set()

    def _catch_up(self, connection: sqlite3.Connection) -> None:
        """Read all anew when another program has written: compares must see it, and nothing of it may be lost."""
        try:
            if _revision(connection) == self._revision:
                return
            objects, revision = _read(connection)
        except (ValueError, TypeError) as error:
            raise sqlite3.DatabaseError(f"malformed object: {error}") from error
        log.warning("another program has written to the database path=%s revision=%d", self.path, revision)
        with self._changed:
            self._objects, self._keys, self._revision = objects, sorted(objects), revision
            self._changes.clear()
            self._oldest = revision            # who watches has to read all of it again
            self._changed.notify_all()

    def _holds(self, job: _Job, written: Dict[str, Optional[Entry]]) -> bool:
        for compare in job.compares:
            entry = written[compare.key] if compare.key in written else self._objects.get(compare.key)
            if (entry.revision if entry is not None else 0) != compare.revision:
                return False
        return True

    def _failed(self, jobs: List[_Job], error: Exception) -> None:
        for job in jobs:
            job.revision = None
            job.error = _translated(self.path, error)
            job.done.set()

    def _publish(self, revision: int, written: Dict[str, Optional[Entry]],
                 changes: List[Tuple[int, str]]) -> None:
        with self._changed:
            for key, entry in written.items():
                if entry is None:
                    if self._objects.pop(key, None) is not None:
                        del self._keys[bisect.bisect_left(self._keys, key)]
                else:
                    if key not in self._objects:
                        bisect.insort(self._keys, key)
                    self._objects[key] = entry
            for change in changes:
                if len(self._changes) == KEPT_CHANGES:
                    self._oldest = self._changes[0][0]
                self._changes.append(change)
            self._revision = revision
            self._changed.notify_all()


def _is_committed(connection: sqlite3.Connection, revision: int) -> bool:
    """Ask the file after a commit that failed: an error does not always mean that nothing happened."""
    try:
        connection.execute("ROLLBACK")
    except sqlite3.Error:
        pass                                   # there was no transaction to end
    try:
        return _revision(connection) == revision
    except (sqlite3.Error, TypeError):
        return False


def _revision(connection: sqlite3.Connection) -> int:
    return int(connection.execute("SELECT value FROM meta WHERE name = 'revision'").fetchone()[0])


def _read(connection: sqlite3.Connection) -> Tuple[Dict[str, Entry], int]:
    rows = connection.execute("SELECT key, value, revision FROM objects").fetchall()
    return {key: Entry(key, json.loads(text), at) for key, text, at in rows}, _revision(connection)


def _apply(connection: sqlite3.Connection, job: _Job, written: Dict[str, Optional[Entry]],
           changes: List[Tuple[int, str]]) -> None:
    assert job.revision is not None
    for operation, text in job.operations:
        if isinstance(operation, Put):
            connection.execute("INSERT OR REPLACE INTO objects (key, value, revision) VALUES (?, ?, ?)",
                               (operation.key, text, job.revision))
            written[operation.key] = Entry(operation.key, json.loads(text), job.revision)
        else:
            connection.execute("DELETE FROM objects WHERE key = ?", (operation.key,))
            written[operation.key] = None
        changes.append((job.revision, operation.key))


def _connect(path: str) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA trusted_schema=OFF")
    except BaseException:
        connection.close()
        raise
    return connection


def _prepare(path: str) -> Tuple[Dict[str, Entry], int]:
    """Open or make the database, check it, and return all objects and the revision."""
    with files.storing("open", path):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    try:
        connection = _connect(path)
        try:
            _migrate(connection, path)
            return _read(connection)
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise _translated(path, error) from error
    except (ValueError, TypeError) as error:
        raise _damaged(path, str(error)) from error


def _migrate(connection: sqlite3.Connection, path: str) -> None:
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > SCHEMA:
        raise StorageError(f"{path}: written by a newer llmgw (schema {version}, this one knows {SCHEMA})",
                           hint="start the newer llmgw.pyz, or restore a backup made by this version")
    if version:
        said = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if said != "ok":
            raise _damaged(path, said)
    elif connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        raise StorageError(f"{path}: a database, but not one of llmgw",
                           hint="name another folder with --data-dir")
    if connection.execute("PRAGMA journal_mode=WAL").fetchone()[0] != "wal":
        raise StorageError(f"{path}: this filesystem cannot hold a write-ahead log",
                           hint="put the data folder on a local disk with --data-dir")
    if not version:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("CREATE TABLE objects (key TEXT PRIMARY KEY, value TEXT NOT NULL, "
                           "revision INTEGER NOT NULL) WITHOUT ROWID")
        connection.execute("CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID")
        connection.execute("INSERT INTO meta VALUES ('revision', 0)")
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID:d}")
        connection.execute(f"PRAGMA user_version = {SCHEMA:d}")
        failpoint.reach("store-before-schema")
        connection.execute("COMMIT")


def _damaged(path: str, why: str) -> StorageError:
    return StorageError(f"{path}: the database is damaged: {why:.200}",
                        hint=f"move {path}* away and restore a backup (llmgw.pyz server --restore FILE)")


def _translated(path: str, error: Exception) -> LlmgwError:
    text = str(error)
    if isinstance(error, OSError):
        return files.storage_error("write", path, error)
    if "locked" in text or "busy" in text:
        return TryAgain(f"{path}: another program holds the database locked")
    if "full" in text:
        return DiskFull(f"cannot write {path}: no space left on the device",
                        hint=f"free some space on the filesystem of {os.path.dirname(path)}")
    if "malformed" in text or "not a database" in text or "corrupt" in text:
        return _damaged(path, text)
    if "disk I/O" in text:                     # also what a file that is open meets when its disk becomes read-only
        return StorageError(f"cannot write {path}: {text}", hint="look at dmesg: the disk may have failed")
    if "readonly" in text:
        return StorageError(f"cannot write {path}: it is read-only",
                            hint="check who owns it, and which user llmgw runs as")
    return StorageError(f"{path}: {text:.200}")


def refuse_network_filesystem(folder: str) -> None:
    """Refuse a folder on NFS and the like: SQLite's locks do not hold there (gpustack#1389)."""
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as source:
            kind = network_filesystem(source.read(), os.path.realpath(folder))
    except OSError:
        return                                 # no /proc: nothing to ask
    if kind:
        raise StorageError(f"{folder}: on a network filesystem ({kind}), where a database can be damaged",
                           hint="name a folder on a local disk with --data-dir")


def _quoted(path: str) -> str:
    return path.replace("%", "%25").replace("?", "%3f").replace("#", "%23")
