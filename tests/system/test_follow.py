"""Long programs, followed line by line."""
from __future__ import annotations

import os
import sys
import threading
import time

import pytest

from llmgw.domain.command import Command
from llmgw.domain.errors import CommandFailed
from llmgw.system import follow, proc

ENV = {"PATH": "/usr/bin:/bin"}


def run(script, tmp_path, **given):
    lines = []
    made = follow.follow(Command(("/bin/sh", "-c", script), env=ENV, cwd=str(tmp_path)), ("LLMGW_TEST_MARK", str(tmp_path)),
                         **{"seconds": 30.0, "line": lines.append, "stopping": lambda: False, **given})
    return made, lines


def left(tmp_path):
    return [process.pid for process in proc.marked("LLMGW_TEST_MARK", str(tmp_path))]


def test_every_line_is_passed_on_and_kept_by_where_it_was_said(tmp_path):
    made, lines = run("echo one; echo two >&2; printf 'a\\rb\\n'; printf three; exit 3", tmp_path)
    assert (made.code, made.out, made.err) == (3, "one\na\nb\nthree", "two")
    assert sorted(lines) == ["a", "b", "one", "three", "two"]


def test_lines_come_while_it_still_works(tmp_path):
    go, seen = tmp_path / "go", []
    def line(text):
        seen.append(text)
        go.touch()
    made, _ = run(f"echo first; while [ ! -e {go} ]; do sleep 0.05; done; echo last", tmp_path, line=line)
    assert seen == ["first", "last"] and made.code == 0


def test_much_output_is_read_and_only_its_end_is_kept(tmp_path):
    made, lines = run("i=0; while [ $i -lt 3000 ]; do echo line $i; i=$((i+1)); done", tmp_path)
    assert len(lines) == 3000 and made.out.split("\n")[-1] == "line 2999"
    assert len(made.out.split("\n")) == follow.KEPT_LINES


def test_bytes_that_are_no_text_and_lines_without_end_do_no_harm(tmp_path):
    script = f"exec {sys.executable} -c \"import sys; sys.stdout.buffer.write(b'\\\\xff' + b'x' * 200000)\""
    made, lines = run(script, tmp_path)
    assert made.code == 0 and lines[0].endswith("x") and len(lines[0]) <= follow.LINE_BYTES


def test_what_is_not_done_in_time_is_ended_with_all_it_started(tmp_path):
    with pytest.raises(CommandFailed, match="no end after 0.5 seconds"):
        run("sleep 60 & sleep 60", tmp_path, seconds=0.5)
    assert left(tmp_path) == []


def test_it_is_ended_when_we_are_to_stop(tmp_path):
    stop = threading.Event()
    started = time.monotonic()
    with pytest.raises(follow.Stopped):
        run("echo here; sleep 60", tmp_path, line=lambda text: stop.set(), stopping=stop.is_set)
    assert left(tmp_path) == [] and time.monotonic() - started < 20


def test_what_a_program_leaves_behind_holds_nothing_up(tmp_path):
    started = time.monotonic()
    made, lines = run("sleep 60 & echo done", tmp_path)
    assert made.code == 0 and lines == ["done"] and time.monotonic() - started < 20
    assert left(tmp_path) == []


def test_a_program_that_is_not_there_is_told(tmp_path):
    with pytest.raises(CommandFailed, match="cannot run /nowhere/uv: No such file"):
        follow.follow(Command(("/nowhere/uv",), env=ENV), ("A", "b"), seconds=1, line=print, stopping=lambda: False)


def test_only_what_is_given_is_in_its_environment(tmp_path):
    os.environ["LLMGW_FOLLOW_LEAK"] = "1"
    try:
        made, _ = run("env", tmp_path)
    finally:
        del os.environ["LLMGW_FOLLOW_LEAK"]
    assert "LLMGW_FOLLOW_LEAK" not in made.out and f"LLMGW_TEST_MARK={tmp_path}" in made.out
