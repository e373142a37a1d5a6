"""Tables, sizes and ages as people see them."""
from __future__ import annotations

import io
import sys

import pytest

from llmgw.ctl import output
from llmgw.ctl.output import Row
from llmgw.ctl.progress import Progress

TITLES = ("NODE", "STATE", "SYSTEM", "CPUS", "MEMORY FREE")
HOSTILE = ["\x1b[2J\x1b[31mred", "a\rb", "a\nb", "tab\tbed", "\x9b31m", "\u202eevil", "nul\0", "\x7f", "\ud800",
           "\u2028line", "\ue000private"]


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_nothing_that_moves_a_cursor_or_reorders_text_reaches_the_terminal(text):
    for shown in (output.clean(text), *output.lines(text)):
        assert shown.isprintable()
        shown.encode("utf-8")


def test_clean_leaves_letters_of_every_script_alone():
    assert output.clean("żółw 模型 модель") == "żółw 模型 модель"


def test_the_lines_of_a_log_keep_their_indents_and_the_last_state_of_a_bar():
    assert output.lines("  a\n\tb\r\n10 %\r20 %\n\x1b[31mred") == ["  a", "    b", "20 %", "[31mred"]


@pytest.mark.parametrize("width", [80, 40, 20])
@pytest.mark.parametrize("name", ["alpha", "n" * 200, "模型" * 30, *HOSTILE], ids=ascii)
def test_a_table_never_is_wider_than_the_terminal(width, name):
    rows = [Row((name, "ready", "Debian GNU/Linux 12 (bookworm) x86_64", "64", "12 GB of 64 GB"),
                ("a warning " * 20 + name,)),
            Row(("b", name, name, "8", "-"), (name,))]
    for line in output.table(TITLES, rows, width=width):
        assert output.columns(line) <= width or width == 20, line
        assert line.isprintable()


@pytest.mark.parametrize("width", [80, 40])
def test_the_name_that_people_copy_is_never_cut(width):
    name = "a-rather-long-name-of-38-characters-xx"
    shown = output.table(TITLES, [Row((name, "ready", "Debian", "64", "-"))], width=width)
    assert any(line.startswith(name) for line in shown)


def test_a_wide_table_is_one_line_per_row_and_notes_stand_below():
    shown = output.table(TITLES, [Row(("a", "lost", "Debian", "64", ""), ("no answer for 61 s",)),
                                  Row(("b", "ready", "Alma", "8", "1 GB"))], width=80)
    assert shown == ["NODE  STATE  SYSTEM  CPUS  MEMORY FREE", "a     lost   Debian  64    -",
                     "  no answer for 61 s", "b     ready  Alma    8     1 GB"]


def test_what_does_not_fit_side_by_side_is_stacked_and_complete():
    shown = output.table(TITLES, [Row(("alpha", "ready", "Debian GNU/Linux 12", "64", "12 GB of 64 GB"))], width=36)
    assert shown == ["alpha", "  state        ready", "  system       Debian GNU/Linux 12", "  cpus         64",
                     "  memory free  12 GB of 64 GB"]


def test_cut_counts_columns_not_characters():
    assert output.cut("模型模型", 6) == "模型.."
    assert output.cut("abcdef", 6) == "abcdef"
    assert output.cut("abcdefg", 6) == "abcd.."


@pytest.mark.parametrize("count, text", [
    (None, "-"), (0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (253113024, "253 MB"), (999_600_000, "1.0 GB"),
    (9_960_000, "10 MB"), (4_250_000, "4.2 MB"), (3 * 10**15, "3.0 PB"), (5 * 10**18, "5000 PB")])
def test_sizes_are_short(count, text):
    assert output.size(count) == text


@pytest.mark.parametrize("seconds, text", [
    (None, "-"), (-3, "0s"), (59.9, "59s"), (60, "1m"), (3599, "59m"), (3600, "1h"), (172799, "47h"), (172800, "2d")])
def test_ages_are_short(seconds, text):
    assert output.age(seconds) == text


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def test_colour_is_for_terminals_whose_user_did_not_refuse(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert output.coloured(_Terminal()) and not output.coloured(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not output.coloured(_Terminal())


def test_a_table_in_colour_is_laid_out_as_one_without():
    rows = [Row(("a", "ready", "x", "1", "-")), Row(("b", "unreachable", "x", "1", "-"))]
    plain = output.table(TITLES, rows, width=80)
    colour = output.table(TITLES, rows, width=80, colour=True)
    assert [line.replace("\x1b[32m", "").replace("\x1b[31m", "").replace("\x1b[0m", "") for line in colour] == plain
    assert "\x1b[31munreachable\x1b[0m" in colour[2]


def test_the_width_comes_from_columns_then_from_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "57")
    assert output.width_of(io.StringIO()) == 57
    monkeypatch.delenv("COLUMNS")
    assert output.width_of(io.StringIO()) > 10_000      # a pipe: grep wants whole lines


def test_json_is_ascii_so_that_no_terminal_obeys_it(capsys):
    output.write_json({"name": "\x1b[2J\x9b\u202e"})
    assert capsys.readouterr().out == '{\n  "name": "\\u001b[2J\\u009b\\u202e"\n}\n'


def test_output_survives_a_terminal_that_speaks_only_ascii(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    output.write("模型 ready")
    assert raw.getvalue() == b"?? ready\n"


def test_progress_prints_one_line_per_tenth_where_nobody_looks():
    stream = io.StringIO()
    progress = Progress("sending x", 1000, stream, quiet_seconds=0)
    for _ in range(1000):
        progress(1)
    progress.done()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 10 and lines[0] == "sending x: 10 % of 1.0 kB" and lines[-1].startswith("sending x: 100 %")


def test_progress_of_something_quick_is_two_lines():
    stream = io.StringIO()
    progress = Progress("sending x", 1000, stream, quiet_seconds=60)
    for _ in range(1000):
        progress(1)
    assert stream.getvalue() == "sending x: 10 % of 1.0 kB\nsending x: 100 % of 1.0 kB\n"


def test_progress_draws_a_bar_that_fits_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    stream = _Terminal()
    progress = Progress("sending " + "very-" * 20 + "long.gguf\x1b[2J", 1000, stream)
    progress.at(500)
    progress.at(1000)
    progress.done()
    text = stream.getvalue()
    assert text.endswith("100 % of 1.0 kB\n") and "\x1b" not in text
    assert all(len(part.rstrip("\n")) <= 40 for part in text.split("\r"))
