"""Put a backup back as this server's database. The server must not run."""
from __future__ import annotations

import os
import shutil

from llmgw.domain.errors import StorageError
from llmgw.server import records
from llmgw.server.store import Put
from llmgw.server.store_sqlite import FILE_NAME, SqliteStore
from llmgw.system import files
from llmgw.system.clock import Clock

EPOCH_LEAP = 1000             # agents may have followed later leaders than the backup knows of


def restore(data_dir: str, backup: str, clock: Clock) -> int:
    """Replace the database by ``backup``, once that proved whole, and return the new epoch.

    The next start hears every node before it acts. The old database is kept beside it.
    """
    scratch = os.path.join(data_dir, ".restore")
    files.remove(scratch)
    files.make_dir(scratch)
    with files.storing("read", backup):
        if not os.path.isfile(backup):
            raise StorageError(f"{backup}: no such file")
        shutil.copyfile(backup, os.path.join(scratch, FILE_NAME))
    os.chmod(os.path.join(scratch, FILE_NAME), 0o600)
    store = SqliteStore(scratch)
    try:
        epoch = max(records.number(store, records.EPOCH), _epoch_now(data_dir)) + EPOCH_LEAP
        store.txn((), (Put(records.EPOCH, epoch), Put(records.RESTORED, {"at": clock.wall()})))
    finally:
        store.close()
    live = os.path.join(data_dir, FILE_NAME)
    with files.storing("replace", live):
        for ending in ("", "-wal", "-shm"):
            if os.path.exists(live + ending):
                os.replace(live + ending, f"{live}{ending}.before-restore")
        os.replace(os.path.join(scratch, FILE_NAME), live)
        files.fsync_dir(data_dir)
    files.remove(scratch)
    return epoch


def _epoch_now(data_dir: str) -> int:
    """Return the epoch of the database that is there, 0 when it cannot be read: that may be why we are here."""
    if not os.path.exists(os.path.join(data_dir, FILE_NAME)):
        return 0
    try:
        store = SqliteStore(data_dir)
    except StorageError:
        return 0
    try:
        return records.number(store, records.EPOCH)
    finally:
        store.close()
