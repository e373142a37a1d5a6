"""Unpack an archive in a thread of its own while it is still being fetched."""
from __future__ import annotations

import logging
import os
import threading
from typing import Optional

from llmgw.domain.engine import Asset
from llmgw.domain.errors import DiskFull, EngineFailed, LlmgwError, UnsafeArchive
from llmgw.system import files
from llmgw.system.growing import Abandoned, Growing
from llmgw.system.unpack import TooMuch, budget, unpack

log = logging.getLogger(__name__)

RESERVE_BYTES = 256 << 20         # kept free on the disk of the data folder


class Unpacking:
    """``begin`` starts it, the download says how far it ``reaches``, ``finish`` waits and raises what went wrong."""

    def __init__(self, asset: Asset, folder: str) -> None:
        self.name = asset.name
        self._asset, self._folder, self._free = asset, folder, 0
        self._growing: Optional[Growing] = None
        self._thread: Optional[threading.Thread] = None
        self._error: Optional[LlmgwError] = None

    def begin(self, path: str, whole: bool = False) -> None:
        """Unpack the file at ``path``, which is being written unless it is ``whole``."""
        self._growing = Growing(path)
        coming = 0 if whole else self._asset.size_bytes - _size(path)
        above = files.make_dir(os.path.dirname(self._folder), 0o755)
        self._free = max(0, files.free_bytes(above) - RESERVE_BYTES - coming)
        if whole:
            self._growing.reaches(self._asset.size_bytes)
            self._growing.ends(whole=True)
        self._thread = threading.Thread(target=self._run, args=(self._growing,), name="unpack", daemon=True)
        self._thread.start()

    def reaches(self, count: int) -> None:
        """Note that so many bytes are on disk."""
        assert self._growing is not None
        self._growing.reaches(count)

    def is_whole(self) -> None:
        """Note that all of it is there, and that its digest was right."""
        assert self._growing is not None
        self._growing.ends(whole=True)

    def give_up(self) -> None:
        """End it, whatever it has done so far, and wait until it writes no more."""
        if self._growing is not None and self._thread is not None:
            self._growing.ends(whole=False)
            self._thread.join()
            self._growing.close()

    def finish(self) -> None:
        """Wait until all of it is unpacked; raise what went wrong."""
        assert self._growing is not None and self._thread is not None
        self._thread.join()
        self._growing.close()
        if self._error is not None:
            raise self._error

    def _run(self, growing: Growing) -> None:
        try:
            self._unpack(growing)
        except Abandoned:
            self._error = EngineFailed(f"unpacking {self.name}: its download ended")
        except LlmgwError as error:
            self._error = error
        except Exception:
            log.exception("unpacking failed name=%s", self.name)
            self._error = EngineFailed(f"unpacking {self.name} failed inside llmgw, the agent's log has the details")

    def _unpack(self, growing: Growing) -> None:
        most = budget(self._asset.size_bytes, self._free)
        above = os.path.dirname(self._folder)
        try:
            unpack(self.name, self._folder, max_bytes=most, coming=growing)
        except TooMuch:
            if most < self._free:
                raise                     # the disk has room, but nothing honest is that large
            raise DiskFull(f"no space left in {above} to unpack {self.name}: "
                           f"{(self._free + RESERVE_BYTES) / 1e6:.1f} MB are free, "
                           f"of which {RESERVE_BYTES / 1e6:.1f} MB are kept",
                           hint=f"free some space on the filesystem of {above}") from None
        except UnsafeArchive as error:
            error.hint = "bring the release's own archive: llmgw.pyz ctl mirror import-engine ARCHIVE --sha256 HEX"
            raise


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
