"""Take a file of this machine into the mirror without copying it: it shares the blocks, or at least the inode."""
from __future__ import annotations

import errno
import fcntl
import os
import stat

from llmgw.domain.errors import NotFound, ParseError, StorageError
from llmgw.server.mirror import Mirror
from llmgw.system import files

FICLONE = 0x40049409              # linux/fs.h; Btrfs and XFS share blocks until one of the two is written to
_NOT_HERE = (errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOSYS)


def link(mirror: Mirror, path: str, digest: str) -> int:
    """Make ``path`` the blob ``digest`` and return its size; refuse another filesystem, and other content."""
    if not path.startswith("/") or "\0" in path:
        raise ParseError(f"not an absolute path: {path!r:.200}")
    return mirror.take(digest, lambda scratch: _share(path, scratch), path)


def _share(path: str, scratch: str) -> None:
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        raise NotFound(f"the server has no file {path}", hint="--link works on the server's own machine only") from None
    if not stat.S_ISREG(mode):
        raise ParseError(f"{path}: not a file")
    with files.storing("link", path):
        if _clone(path, scratch):
            return
        try:
            os.link(os.path.realpath(path), scratch)
        except OSError as error:
            if error.errno in (errno.EXDEV, errno.EPERM, errno.EMLINK):
                raise StorageError(f"{path} cannot be linked: it is on another filesystem than the mirror, or linking "
                                   "is not allowed there", hint="leave --link out, then it is copied") from None
            raise


def _clone(path: str, scratch: str) -> bool:
    """Share the blocks of ``path``; False where this filesystem cannot."""
    with open(path, "rb") as source, open(scratch, "wb") as target:
        try:
            fcntl.ioctl(target.fileno(), FICLONE, source.fileno())
            return True
        except OSError as error:
            if error.errno not in _NOT_HERE:
                raise
    files.remove(scratch)
    return False
