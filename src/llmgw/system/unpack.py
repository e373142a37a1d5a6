"""Write the members of a .tar.gz below one folder, and nothing anywhere else.

``tarfile`` only reads. Its own extraction, filters included, can be led outside
on every Python that llmgw runs on (CVE-2025-4517). Here every folder is opened
relative to its parent and never through a link, every file must be new, and
links are made last, when nothing is written any more.
"""
from __future__ import annotations

import contextlib
import gzip
import os
import tarfile
import zlib
from typing import BinaryIO, Callable, Iterator, List, Optional, Protocol, Set, Tuple

from llmgw.domain.errors import UnsafeArchive
from llmgw.parse.archive import link_target, member_path
from llmgw.system import failpoint
from llmgw.system.files import make_dir, storing

MAX_MEMBERS = 20_000
COPY_BYTES = 1 << 20
HEADER_BYTES = 1 << 20            # what may lie between two members: a long name, a pax header
Parts = Tuple[str, ...]

_UNREADABLE = (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, ValueError, OverflowError,
               IndexError, KeyError, RecursionError)


class TooMuch(UnsafeArchive):
    """More came out of the archive than may: it is a bomb, or the disk is too full for it."""

    reason = "ArchiveTooLarge"


class _Budget:
    """A stream that ends in UnsafeArchive when more comes out of it than was allowed."""

    def __init__(self, source: BinaryIO, total: int) -> None:
        self._source, self._total, self._read = source, total, 0
        self._until = total

    def allow(self, more: int) -> None:
        """From here on, let at most ``more`` bytes through until the next call."""
        self._until = min(self._total, self._read + more)

    def read(self, size: int = -1) -> bytes:
        data = self._source.read(size if size >= 0 else COPY_BYTES)
        self._read += len(data)
        if self._read > self._until:
            raise TooMuch(f"the archive unpacks to more than {self._until} bytes")
        return data


class _Writer:
    """The folder written to. Parents are opened one by one; a link among them is refused by the kernel."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._files: Set[Parts] = set()

    def folder(self, parts: Parts) -> None:
        with self._parent(parts + ("",)):
            pass

    def file(self, parts: Parts, mode: int, pieces: Iterator[bytes]) -> None:
        with self._parent(parts) as parent:
            handle = os.open(parts[-1], os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC,
                             0o755 if mode & 0o100 else 0o644, dir_fd=parent)
            with os.fdopen(handle, "wb") as out:        # buffered: it writes on where the kernel wrote a part
                for piece in pieces:
                    out.write(piece)
                out.flush()
                os.fsync(out.fileno())
        self._files.add(parts)

    def hard_link(self, parts: Parts, to: Parts) -> None:
        if to not in self._files:
            raise UnsafeArchive(f"hard link {'/'.join(parts)!r:.200} to what the archive did not hold before")
        with self._parent(parts) as parent, self._parent(to) as source:
            os.link(to[-1], parts[-1], src_dir_fd=source, dst_dir_fd=parent, follow_symlinks=False)

    def symbolic_link(self, parts: Parts, target: str) -> None:
        with self._parent(parts) as parent:
            os.symlink(target, parts[-1], dir_fd=parent)

    @contextlib.contextmanager
    def _parent(self, parts: Parts) -> Iterator[int]:
        """Open the folder that ``parts`` lies in, making it where needed."""
        handle = os.dup(self._root)
        try:
            for name in parts[:-1]:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, 0o755, dir_fd=handle)
                below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=handle)
                os.close(handle)
                handle = below
            yield handle
        finally:
            os.close(handle)


class Readable(Protocol):
    """An archive's bytes in order: a file, or one that is still coming."""

    def read(self, size: int) -> bytes: ...

    def tell(self) -> int: ...


def unpack(archive: str, folder: str, *, max_bytes: int, max_members: int = MAX_MEMBERS,
           progress: Callable[[int], None] = lambda done: None, coming: Optional[Readable] = None) -> None:
    """Unpack ``archive`` (.tar.gz, read from ``coming`` while it is fetched) into the new or empty ``folder``.

    UnsafeArchive when a member would land or point outside, is no file, folder or
    link, comes twice, or when there are too many or too large ones. What was
    written until then stays: unpack into a scratch folder and remove that.
    """
    make_dir(folder, 0o755)
    with storing("unpack", archive), contextlib.ExitStack() as opened:
        source = coming or opened.enter_context(open(archive, "rb"))
        root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            _unpack(source, _Writer(root), max_bytes, max_members, progress)
        except FileExistsError as error:
            raise UnsafeArchive(f"the archive holds a name twice: {error.filename!r:.200}") from error
        except NotADirectoryError as error:
            raise UnsafeArchive(f"the archive uses a file or link as a folder: {error.filename!r:.200}") from error
        except _UNREADABLE as error:
            raise UnsafeArchive(f"{os.path.basename(archive)} is not a whole .tar.gz archive: "
                                f"{str(error)[:200]}") from error
        finally:
            os.close(root)


def _unpack(source: Readable, writer: _Writer, max_bytes: int, max_members: int,
            progress: Callable[[int], None]) -> None:
    budget = _Budget(gzip.GzipFile(fileobj=source, mode="rb"), max_bytes)  # type: ignore[call-overload]
    links: List[Tuple[Parts, str]] = []
    count = 0
    budget.allow(HEADER_BYTES)                  # opening reads the first header
    with tarfile.open(fileobj=budget, mode="r|") as tar:  # type: ignore[call-overload]
        while True:
            budget.allow(HEADER_BYTES)
            member = tar.next()
            tar.members = []                    # else it remembers a million of them
            if member is None:
                break
            count += 1
            if count > max_members:
                raise UnsafeArchive(f"the archive holds more than {max_members} members")
            budget.allow(max_bytes)
            _write(tar, member, writer, links)
            progress(source.tell())
    failpoint.reach("unpack-before-links")
    for parts, target in links:
        writer.symbolic_link(parts, target)


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, writer: _Writer,
           links: List[Tuple[Parts, str]]) -> None:
    parts = member_path(member.name)
    if member.isdir():
        writer.folder(parts)
        return
    if not parts:
        raise UnsafeArchive(f"the archive holds a member that is its own folder: {member.name!r:.200}")
    if member.issym():
        links.append((parts, link_target(parts, member.linkname)))
    elif member.islnk():
        writer.hard_link(parts, member_path(member.linkname))
    elif member.type in tarfile.REGULAR_TYPES and not member.issparse():
        writer.file(parts, member.mode, _pieces(tar, member))
    else:
        raise UnsafeArchive(f"the archive holds {_kind(member)}: {member.name!r:.200}")


def _pieces(tar: tarfile.TarFile, member: tarfile.TarInfo) -> Iterator[bytes]:
    source = tar.extractfile(member)
    if source is None:
        raise UnsafeArchive(f"the archive holds an unreadable member: {member.name!r:.200}")
    left = member.size
    while left > 0:
        piece = source.read(min(COPY_BYTES, left))
        if not piece:
            raise UnsafeArchive(f"the archive ends within {member.name!r:.200}")
        left -= len(piece)
        yield piece


def _kind(member: tarfile.TarInfo) -> str:
    if member.isdev():
        return "a device or pipe"
    return "a file with holes" if member.issparse() else f"a member of unknown kind {member.type!r}"


def size_of(archive: str) -> int:
    """Return the size of an archive's file."""
    with storing("look at", archive):
        return os.stat(archive).st_size


def budget(compressed_bytes: int, free_bytes: int) -> int:
    """Return how much an archive may unpack to: twenty times its size, within what is free."""
    return max(0, min(20 * compressed_bytes + (64 << 20), free_bytes))
