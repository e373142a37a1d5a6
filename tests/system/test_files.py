"""Files that are whole or not there."""
import os
import signal
import subprocess
import sys

import pytest

from llmgw.domain.command import Command
from llmgw.domain.errors import AlreadyRunning, CommandFailed, DiskFull, StorageError
from llmgw.system import files, logs
from llmgw.system.process import Processes


def python(code, *args, env=None):
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "PATH": os.environ["PATH"], **(env or {})}
    return subprocess.Popen([sys.executable, "-c", code, *args], env=environment, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE)


def test_a_file_is_replaced_whole_and_private(tmp_path):
    path = tmp_path / "state.json"
    files.write_atomic(str(path), b"old")
    files.write_json(str(path), {"a": 1})

    assert path.read_text() == '{\n "a": 1\n}\n'
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["state.json"]


def test_kill_9_before_the_rename_keeps_the_old_file(tmp_path):
    path = tmp_path / "state"
    files.write_atomic(str(path), b"old")
    child = python("import sys; from llmgw.system import files; files.write_atomic(sys.argv[1], b'new')",
                   str(path), env={"LLMGW_FAILPOINT": "write-atomic-before-rename:kill"})
    child.communicate(timeout=30)

    assert child.returncode == -signal.SIGKILL
    assert path.read_bytes() == b"old"


def test_a_full_disk_is_a_sentence_and_leaves_nothing_behind(tmp_path):
    child = python("import sys; from llmgw.system import files\n"
                   "try: files.write_atomic(sys.argv[1], b'new')\n"
                   "except files.DiskFull as e: print(e.message)", str(tmp_path / "state"),
                   env={"LLMGW_FAILPOINT": "write-atomic-before-rename:enospc"})
    out, err = child.communicate(timeout=30)

    assert b"no space left on the device" in out, err
    assert os.listdir(tmp_path) == []


def test_a_missing_file_is_none_and_a_large_one_is_refused(tmp_path):
    (tmp_path / "big").write_bytes(b"x" * 11)

    assert files.read_bytes(str(tmp_path / "none")) is None
    with pytest.raises(StorageError, match="larger than 10 bytes"):
        files.read_bytes(str(tmp_path / "big"), limit=10)


def test_a_folder_that_cannot_be_made_says_which(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="cannot make the folder .*file/x"):
        files.make_dir(str(tmp_path / "file" / "x"))


def test_disk_full_and_other_faults_are_told_apart():
    assert isinstance(files.storage_error("write", "/x/y", OSError(28, "No space")), DiskFull)
    assert "read-only" in files.storage_error("write", "/x/y", OSError(30, "ro")).message


def test_a_second_holder_of_a_folder_is_told_the_first_ones_pid(tmp_path):
    held = files.FolderLock(str(tmp_path), "agent")
    try:
        with pytest.raises(AlreadyRunning, match=f"another agent \\(pid {os.getpid()}\\)"):
            files.FolderLock(str(tmp_path), "agent")
    finally:
        held.release()
    files.FolderLock(str(tmp_path), "agent").release()


def test_the_lock_of_a_killed_process_is_free(tmp_path):
    child = python("import sys, time; from llmgw.system import files\n"
                   "held = files.FolderLock(sys.argv[1], 'agent'); print('held', flush=True); time.sleep(60)",
                   str(tmp_path))
    assert child.stdout.readline() == b"held\n"
    child.kill()
    child.communicate(timeout=30)

    files.FolderLock(str(tmp_path), "agent").release()


def test_a_program_gets_only_the_environment_it_is_given():
    outcome = Processes().run(Command((sys.executable, "-Ic", "import os; print(sorted(os.environ))"),
                                      {"A": "1"}, {"B": "2"}), timeout=30)

    assert outcome.code == 0
    assert set(eval(outcome.out)) - {"LC_CTYPE"} == {"A", "B"}


def test_a_program_that_does_not_end_is_killed_with_its_children():
    with pytest.raises(CommandFailed, match="no end after 0.5 seconds"):
        Processes().run(Command(("/bin/sh", "-c", "sleep 60 & sleep 60")), timeout=0.5)


def test_a_program_that_is_not_there_is_a_sentence():
    with pytest.raises(CommandFailed, match="cannot run /nonexistent: No such file"):
        Processes().run(Command(("/nonexistent",)), timeout=5)


def test_tokens_never_reach_the_log():
    line = logs.redact("GET / Authorization: Bearer abcdefghijkl key llmgw_infer_abcd1234_" + "x" * 43)

    assert "abcdefghijkl" not in line and "xxxx" not in line


def test_what_a_killed_writer_left_is_swept_and_nothing_else(tmp_path):
    (tmp_path / "below").mkdir()
    left = [tmp_path / ".table.json.0123456789ab.tmp", tmp_path / "below" / ".key.abcdef012345.tmp"]
    kept = [tmp_path / "table.json", tmp_path / "a.tmp", tmp_path / "below" / ".key.short.tmp"]
    for path in [*left, *kept]:
        path.write_text("x")
    files.sweep_scratch(str(tmp_path), str(tmp_path / "none"))
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted(kept)
