"""A folder for what is needed during one call only."""
from __future__ import annotations

import contextlib
import tempfile
from typing import Iterator

from llmgw.domain.errors import StorageError
from llmgw.system import files


@contextlib.contextmanager
def scratch_dir(prefix: str) -> Iterator[str]:
    """Yield the path of an empty folder of this user's; it is gone afterwards, as far as it can be removed."""
    with files.storing("make a folder in", tempfile.gettempdir()):
        folder = tempfile.mkdtemp(prefix=prefix)
    try:
        yield folder
    finally:
        with contextlib.suppress(StorageError):
            files.remove(folder)
