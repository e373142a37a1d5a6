"""Hash a file while reading it once: the whole, and each 8 MiB chunk."""
from __future__ import annotations

import hashlib
import os
from typing import Callable, Optional, Tuple

from llmgw.domain.errors import Conflict
from llmgw.domain.model import CHUNK_BYTES
from llmgw.system.files import storing


def hash_bytes(data: bytes) -> str:
    """Return the sha256 of ``data`` in hex."""
    return hashlib.sha256(data).hexdigest()


def hash_file(path: str, progress: Optional[Callable[[int], None]] = None) -> Tuple[str, Tuple[str, ...], int]:
    """Return (sha256, chunk sha256s, size_bytes); refuse a file that changes meanwhile.

    ``progress`` is told the number of bytes of each chunk as it is read.
    """
    whole, chunks, size_bytes = hashlib.sha256(), [], 0
    with storing("read", path), open(path, "rb") as source:
        before = os.fstat(source.fileno())
        while True:
            chunk = source.read(CHUNK_BYTES)
            if not chunk:
                break
            whole.update(chunk)
            chunks.append(hashlib.sha256(chunk).hexdigest())
            size_bytes += len(chunk)
            if progress is not None:
                progress(len(chunk))
        after = os.fstat(source.fileno())
    if (before.st_mtime_ns, before.st_size) != (after.st_mtime_ns, after.st_size) or size_bytes != after.st_size:
        raise Conflict(f"{path}: the file changed while it was read", hint="wait until whoever writes it is done")
    return whole.hexdigest(), tuple(chunks), size_bytes
