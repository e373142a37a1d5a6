"""Files that are whole or not there: scratch name, fsync, rename."""
from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import stat
from typing import Any, Iterator, Optional, Union

from llmgw.domain.errors import AlreadyRunning, DiskFull, LlmgwError, StorageError
from llmgw.system import failpoint

_SCRATCH = re.compile(r"\..+\.[0-9a-f]{12}\.tmp")


def storage_error(what: str, path: str, error: OSError) -> LlmgwError:
    """Return our error for ``error``: what could not be done to which path, and what to try."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(f"cannot {what} {path}: no space left on the device",
                        hint=f"free some space on the filesystem of {os.path.dirname(path) or '.'}")
    if error.errno in (errno.EACCES, errno.EPERM):
        return StorageError(f"cannot {what} {path}: permission denied",
                            hint="check who owns it, and which user llmgw runs as")
    if error.errno == errno.EROFS:
        return StorageError(f"cannot {what} {path}: the filesystem is read-only",
                            hint="look at dmesg: a disk that fails becomes read-only by itself; or choose another "
                                 "folder with --data-dir")
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        return StorageError(f"cannot {what} {path}: there is a file where a folder is needed",
                            hint="choose another folder with --data-dir, or move the file away")
    return StorageError(f"cannot {what} {path}: {error.strerror or error}")


@contextlib.contextmanager
def storing(what: str, path: str) -> Iterator[None]:
    """Turn an OSError of the block into our error about ``path``."""
    try:
        yield
    except OSError as error:
        raise storage_error(what, path, error) from error


def make_dir(path: str, mode: int = 0o700) -> str:
    """Make ``path`` and its parents, and return it."""
    with storing("make the folder", path):
        os.makedirs(path, mode=mode, exist_ok=True)
    return path


def fsync_dir(path: str) -> None:
    """Make the names in a folder survive a power cut."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def fsync_file(path: str) -> None:
    """Make the bytes of a file that another program wrote survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: str, data: bytes, mode: int = 0o600) -> None:
    """Replace ``path`` by ``data``, so that every reader and every crash sees the old or the new."""
    folder = os.path.dirname(path) or "."
    scratch = os.path.join(folder, f".{os.path.basename(path)}.{secrets.token_hex(6)}.tmp")
    with storing("write", path):
        try:
            handle = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
            with os.fdopen(handle, "wb") as out:
                out.write(data)
                out.flush()
                os.fsync(out.fileno())
            failpoint.reach("write-atomic-before-rename")
            os.replace(scratch, path)
            fsync_dir(folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(scratch)
            raise


def write_at(handle: int, data: Union[bytes, memoryview], offset: int) -> None:
    """Write all of ``data``; the kernel writes what fits when a disk fills up, and says so at the next write only."""
    view = memoryview(data)
    while len(view):
        count = os.pwrite(handle, view, offset)
        view, offset = view[count:], offset + count


def sweep_scratch(*folders: str) -> None:
    """Remove what ``write_atomic`` left below ``folders`` when it was killed; the caller has them to itself."""
    for top in folders:
        for folder, _, names in os.walk(top):
            for name in filter(_SCRATCH.fullmatch, names):
                remove(os.path.join(folder, name))


def write_json(path: str, data: Any, mode: int = 0o600) -> None:
    """``write_atomic`` of indented JSON."""
    write_atomic(path, (json.dumps(data, indent=1, sort_keys=True) + "\n").encode("utf-8"), mode)


def read_bytes(path: str, limit: int = 64 << 20) -> Optional[bytes]:
    """Return the file's bytes, None when there is no such file; refuse one over ``limit``."""
    with storing("read", path):
        try:
            with open(path, "rb") as source:
                data = source.read(limit + 1)
        except FileNotFoundError:
            return None
    if len(data) > limit:
        raise StorageError(f"{path}: larger than {limit} bytes")
    return data


def read_regular(path: str, limit: int = 64 << 20) -> Optional[bytes]:
    """``read_bytes`` of a file in a folder where somebody else may write: links and pipes are refused."""
    with storing("read", path):
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        with os.fdopen(handle, "rb") as source:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise StorageError(f"{path}: not a file")
            data = source.read(limit + 1)
    if len(data) > limit:
        raise StorageError(f"{path}: larger than {limit} bytes")
    return data


def remove(path: str) -> None:
    """Remove a file or a whole folder; what is not there is removed already."""
    with storing("remove", path):
        try:
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            else:
                os.unlink(path)
        except FileNotFoundError:
            pass


def free_bytes(path: str) -> int:
    """Return what an ordinary user may still write to the filesystem of ``path``."""
    with storing("look at the filesystem of", path):
        seen = os.statvfs(path)
    return seen.f_bavail * seen.f_frsize


def total_bytes(path: str) -> int:
    """Return the size of the filesystem of ``path``."""
    with storing("look at the filesystem of", path):
        seen = os.statvfs(path)
    return seen.f_blocks * seen.f_frsize


def check_space(folder: str, needed_bytes: int, kept_bytes: int) -> None:
    """Refuse, before anything is written, what would leave less than ``kept_bytes`` free on the disk of ``folder``."""
    free = free_bytes(folder)
    if free < needed_bytes + kept_bytes:
        raise DiskFull(f"no space left in {folder}: {_mb(needed_bytes)} are needed, {_mb(free)} are free, "
                       f"of which {_mb(kept_bytes)} are kept",
                       hint=f"free some space on the filesystem of {folder}, or choose another with --data-dir")


def check_writable(folder: str) -> None:
    """Refuse a folder that cannot be changed: a disk that failed looks well to all that only read."""
    with storing("write", folder):
        os.utime(folder)


def _mb(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


class FolderLock:
    """Holds a folder for this process; a second holder is refused with the first one's pid.

    The kernel drops the lock when the process ends, however it ends. It is not
    inherited by programs we start.
    """

    def __init__(self, folder: str, who: str) -> None:
        make_dir(folder)
        self._path = os.path.join(folder, "lock")
        with storing("open", self._path):
            self._handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            pid = os.pread(self._handle, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._handle)
            raise AlreadyRunning(
                f"{folder}: another {who} (pid {pid}) uses this data folder",
                hint="stop it, or give this one another folder with --data-dir") from None
        with contextlib.suppress(OSError):       # a full disk: the lock holds without the pid in it
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        os.close(self._handle)
