"""What every store must do; run on SQLite now, on etcd when there is one."""
from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time

import pytest

from llmgw.domain.errors import StorageError, TryAgain
from llmgw.server import store_sqlite
from llmgw.server.store import ABSENT, Compare, Delete, Put, put
from llmgw.server.store_sqlite import SqliteStore

DEADLINE = 30.0


@pytest.fixture
def store(tmp_path):
    store = SqliteStore(str(tmp_path))
    yield store
    store.close()


def test_what_is_put_is_there_with_the_revision_of_its_last_change(store):
    assert store.get("a") is None
    first = put(store, "a", {"x": 1})
    second = put(store, "a", {"x": 2})
    assert second > first > 0
    entry = store.get("a")
    assert (entry.value, entry.revision) == ({"x": 2}, second)
    assert store.revision == second


def test_a_range_is_a_prefix_in_order(store):
    store.txn((), [Put(key, key) for key in ("n/b", "n/a", "m", "n", "o", "n/c/d")])
    assert [entry.key for entry in store.range("n/")] == ["n/a", "n/b", "n/c/d"]
    store.txn((), [Delete("n/b"), Delete("n/never")])
    assert [entry.key for entry in store.range("n/")] == ["n/a", "n/c/d"]
    assert store.range("zzz") == []


def test_a_transaction_happens_whole_or_not_at_all(store):
    at = put(store, "a", 1)
    assert store.txn([Compare("a", at + 5)], [Put("a", 2), Put("b", 2)]) is None
    assert store.get("b") is None and store.get("a").value == 1
    assert store.txn([Compare("a", at), Compare("b", ABSENT)], [Put("a", 2), Put("b", 2)])
    assert store.txn([Compare("b", ABSENT)], [Put("b", 3)]) is None
    assert store.get("b").value == 2
    assert store.get("a").revision == store.get("b").revision


def test_only_one_of_many_swaps_wins_and_every_increment_counts(store):
    put(store, "n", 0)
    won = []

    def increment():
        for _ in range(20):
            while True:
                entry = store.get("n")
                if store.txn([Compare("n", entry.revision)], [Put("n", entry.value + 1)]):
                    won.append(1)
                    break

    threads = [threading.Thread(target=increment) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert store.get("n").value == len(won) == 160


def test_a_watch_wakes_with_the_changed_keys_and_waits_no_longer_than_told(store):
    start = put(store, "a", 1)
    assert store.watch(start, 0.01).keys == ()
    timer = threading.Timer(0.05, lambda: put(store, "b", 1))
    timer.start()
    changes = store.watch(start, DEADLINE)
    assert changes.keys == ("b",) and changes.whole and changes.revision == store.revision
    put(store, "b", 2)
    put(store, "a", 2)
    assert set(store.watch(start, 0).keys) == {"a", "b"}


def test_a_watcher_who_missed_too_much_is_told_to_read_again(store, tmp_path):
    put(store, "a", 1)
    store.close()
    again = SqliteStore(str(tmp_path))
    assert not again.watch(0, 0).whole
    assert again.watch(again.revision, 0).whole
    again.close()


def test_everything_is_there_after_a_restart(store, tmp_path):
    put(store, "a", {"deep": [1, None, "ü"]})
    at = store.revision
    store.close()
    again = SqliteStore(str(tmp_path))
    assert again.get("a").value == {"deep": [1, None, "ü"]}
    assert again.revision == at
    assert put(again, "b", 1) > at
    again.close()


def test_the_database_is_readable_by_its_owner_only(store, tmp_path):
    put(store, "a", 1)
    for path in tmp_path.iterdir():
        assert path.stat().st_mode & 0o077 == 0, path


def test_a_backup_under_writes_is_whole_and_starts_a_store(store, tmp_path):
    stop = threading.Event()

    def write():
        number = 0
        while not stop.is_set():
            number += 1
            store.txn((), [Put("x", number), Put("y", number)])

    thread = threading.Thread(target=write)
    thread.start()
    (tmp_path / "copy").mkdir()
    store.backup(str(tmp_path / "copy" / store_sqlite.FILE_NAME))
    stop.set()
    thread.join(DEADLINE)
    copy = SqliteStore(str(tmp_path / "copy"))
    both = copy.range("")
    copy.close()
    assert len({entry.value for entry in both}) <= 1


def test_a_newer_database_is_refused_with_a_sentence(store, tmp_path):
    store.close()
    connection = sqlite3.connect(store.path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(StorageError, match="newer llmgw .schema 99") as caught:
        SqliteStore(str(tmp_path))
    assert caught.value.hint


@pytest.mark.parametrize("damage", ["garbage", "header", "middle"])
def test_a_damaged_database_is_refused_with_a_sentence(store, tmp_path, damage):
    for number in range(300):
        put(store, f"key/{number}", "x" * 100)
    store.close()
    with open(store.path, "r+b") as file:
        size = os.path.getsize(store.path)
        if damage == "garbage":
            file.truncate(0)
            file.write(b"not a database at all, but long enough to be looked at" * 100)
        elif damage == "header":
            file.write(b"\0" * 100)
        else:
            for offset in range(4096, size, 4096):
                file.seek(offset)
                file.write(b"\xff" * 2000)
    with pytest.raises(StorageError, match="damaged"):
        SqliteStore(str(tmp_path))


def test_a_foreign_database_is_refused(tmp_path):
    connection = sqlite3.connect(tmp_path / store_sqlite.FILE_NAME)
    connection.execute("CREATE TABLE t (x)")
    connection.commit()
    connection.close()
    with pytest.raises(StorageError, match="not one of llmgw"):
        SqliteStore(str(tmp_path))


def test_a_torn_write_ahead_log_loses_only_what_was_torn(store, tmp_path):
    for number in range(50):
        put(store, f"key/{number:03}", number)
    copy = tmp_path / "crashed"
    copy.mkdir()
    for name in (store_sqlite.FILE_NAME, store_sqlite.FILE_NAME + "-wal"):
        (copy / name).write_bytes((tmp_path / name).read_bytes())
    wal = copy / (store_sqlite.FILE_NAME + "-wal")
    os.truncate(wal, wal.stat().st_size - 1000)
    again = SqliteStore(str(copy))
    kept = [entry.value for entry in again.range("key/")]
    again.close()
    assert kept == list(range(len(kept))) and len(kept) >= 48


def test_a_database_locked_by_another_program_is_a_try_again(store):
    put(store, "a", 1)
    other = sqlite3.connect(store.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(TryAgain, match="locked"):
        put(store, "a", 2)
    other.execute("ROLLBACK")
    other.close()
    assert store.get("a").value == 1
    put(store, "a", 3)
    assert store.get("a").value == 3


def test_two_writers_of_one_database_wait_for_each_other_and_lose_no_update(store, tmp_path):
    """The caller's lock keeps a second server away; should it ever not, nothing acknowledged may be lost."""
    put(store, "n", 0)
    other = SqliteStore(str(tmp_path))
    failed = []

    def count(mine, times):
        try:
            while times:
                entry = mine.get("n")
                times -= mine.txn([Compare("n", entry.revision)], [Put("n", entry.value + 1)]) is not None
        except Exception as error:            # told below: a thread's own would be lost
            failed.append(error)

    threads = [threading.Thread(target=count, args=(mine, 40)) for mine in (store, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert failed == []
    last = put(other, "last", 1)
    assert store.watch(last - 1, 0).whole                     # it has not heard of that yet
    assert put(store, "mine", 1) > last
    assert (store.get("n").value, store.get("last").value) == (80, 1)
    assert not store.watch(last - 1, 0).whole                 # so that who watches reads all of it again
    other.close()


CHILD = """
import sys
from llmgw.server.store import Put
from llmgw.server.store_sqlite import SqliteStore
store = SqliteStore(sys.argv[1])
start = store.get("n").value if store.get("n") else 0
print("open", start, flush=True)
for number in range(start + 1, start + 100000):
    store.txn((), [Put("n", number), Put("row/%d" % (number % 50), number)])
    print(number, flush=True)
"""


def child(folder, **environment):
    return subprocess.Popen([sys.executable, "-c", CHILD, str(folder)], stdout=subprocess.PIPE, text=True,
                            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment})


def test_25_kills_in_a_row_lose_nothing_that_was_acknowledged(tmp_path):
    acknowledged = 0
    for turn in range(25):
        process = child(tmp_path)
        with process.stdout:
            opened = process.stdout.readline().split()
            assert opened[0] == "open" and int(opened[1]) >= acknowledged
            for _ in range(3 + turn):
                acknowledged = int(process.stdout.readline())
            process.send_signal(signal.SIGKILL)
            for line in process.stdout:
                if line.endswith("\n"):
                    acknowledged = int(line)
        process.wait(DEADLINE)
    store = SqliteStore(str(tmp_path))
    last = store.get("n").value
    rows = [entry.value for entry in store.range("row/")]
    store.close()
    assert last >= acknowledged > 25
    assert max(rows) == last


@pytest.mark.parametrize("place, kept", [("store-before-commit", 3), ("store-after-commit", 4)])
def test_a_kill_around_the_commit_keeps_the_whole_transaction_or_none_of_it(tmp_path, place, kept):
    process = child(tmp_path, LLMGW_FAILPOINT=f"{place}:kill@4")
    out, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == -signal.SIGKILL
    assert out.split() == ["open", "0", "1", "2", "3"]
    store = SqliteStore(str(tmp_path))
    values = {entry.value for entry in store.range("n")} | {max(e.value for e in store.range("row/"))}
    store.close()
    assert values == {kept}


def test_a_kill_while_the_database_is_made_leaves_one_that_can_be_made(tmp_path):
    process = child(tmp_path, LLMGW_FAILPOINT="store-before-schema:kill@1")
    process.communicate(timeout=DEADLINE)
    store = SqliteStore(str(tmp_path))
    assert store.range("") == []
    store.close()


def test_a_full_disk_is_a_sentence_and_nothing_is_half_written(tmp_path):
    code = ("import sys\nfrom llmgw.server.store import put\nfrom llmgw.server.store_sqlite import SqliteStore\n"
            "from llmgw.domain.errors import DiskFull\nstore = SqliteStore(sys.argv[1])\nput(store, 'a', 1)\n"
            "try:\n    put(store, 'a', 2)\nexcept DiskFull as error:\n    print(error.message)\n"
            "print(store.get('a').value)\nput(store, 'a', 3)\nprint(store.get('a').value)\nstore.close()\n")
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True, timeout=DEADLINE,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path),
                               "LLMGW_FAILPOINT": "store-before-commit:enospc@2"})
    lines = done.stdout.splitlines()
    assert "no space left" in lines[0] and lines[1:] == ["1", "3"]


def test_waiting_transactions_share_a_commit(store):
    started = time.monotonic()
    threads = [threading.Thread(target=put, args=(store, f"k/{number}", number)) for number in range(200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert len(store.range("k/")) == 200
    assert time.monotonic() - started < 10
