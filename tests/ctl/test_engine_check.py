"""`ctl engine-check`: against the real llama-server, against saved helps, and against programs that do not run."""
from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

DATA = pathlib.Path(__file__).resolve().parent.parent / "data"
LLAMA_HELP = DATA / "llamacpp" / "help-b10991.txt"
VLLM_HELP = DATA / "vllm" / "serve-help-all-0.30.0.txt"


@pytest.fixture
def check(tmp_path):
    """Run the command in an empty folder; return (exit code, JSON or lines, stderr)."""
    def run(*words, data=True):
        done = subprocess.run(
            [sys.executable, "-m", "llmgw", "ctl", "engine-check", *map(str, words), "--data-dir", str(tmp_path / "none")]
            + (["--json"] if data else []), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=300, check=False)
        return done.returncode, json.loads(done.stdout) if data and done.stdout else done.stdout.splitlines(), done.stderr
    return run


def statuses(found):
    return {flag["status"] for program in found["programs"] for flag in program["flags"]}


def test_the_real_llama_server_takes_every_flag(check, llama_server):
    code, found, _ = check("llama.cpp", "--binary", llama_server)
    assert code == 0 and found["ok"] and statuses(found) == {"accepted"}
    assert "build 10991" in found["version"] and found["devices"] == ["CPU"]
    assert [program["program"] for program in found["programs"]] == ["llama-server"]


def test_one_renamed_flag_of_its_saved_help_fails_alone(check, llama_server, tmp_path):
    saved = tmp_path / "help.txt"
    text = subprocess.run([llama_server, "--help"], stdout=subprocess.PIPE, text=True, timeout=60, check=True).stdout
    saved.write_text(text.replace("\n--metrics ", "\n--metrics-page ", 1))
    code, found, _ = check("llama.cpp", "--binary", llama_server, "--help-file", f"llama-server={saved}")
    wrong = [flag for program in found["programs"] for flag in program["flags"] if flag["status"] != "accepted"]
    assert code == 3 and not found["ok"]
    assert wrong == [{"flag": "--metrics", "status": "missing", "message": "llama-server has no --metrics"}]


def test_people_get_one_line_a_flag_and_a_summary(check):
    code, lines, _ = check("llama.cpp", "--help-file", f"llama-server={LLAMA_HELP}", data=False)
    flags = [line for line in lines if line.startswith("  ")]
    assert code == 0 and "  accepted  --port" in flags
    assert lines[-1] == f"{len(flags)} flags of 1 program: {len(flags)} accepted"


def test_a_help_cut_to_400_lines_warns_and_calls_nothing_missing(check, tmp_path):
    saved = tmp_path / "help.txt"
    saved.write_text("\n".join(LLAMA_HELP.read_text().splitlines()[:400]))
    code, found, _ = check("llama.cpp", "--help-file", f"llama-server={saved}")
    assert code == 0 and "missing" not in statuses(found) and "unclear" in statuses(found)
    assert "example-specific params" in found["programs"][0]["truncated"]


@pytest.mark.parametrize("script, words", [
    (None, "No such file"), ("#!/bin/sh\nexit 3\n", "code 3"), ("#!/bin/sh\necho 'no GPU here' >&2; exit 1\n", "no GPU here")])
def test_a_program_that_cannot_run_is_skipped_with_the_reason(check, tmp_path, script, words):
    path = tmp_path / "python"
    if script is not None:
        path.write_text(script)
        path.chmod(0o755)
    code, found, _ = check("vllm", "--python", path)
    assert code == 0 and words in found["programs"][-1]["skipped"] and "skipped" in found["summary"]


def test_args_of_server_yaml_are_checked_too(check, tmp_path):
    (tmp_path / "server.yaml").write_text(
        "engines: {vllm: {version: 0.30.0}}\nmodels:\n  - name: a\n    engine: vllm\n    weights: mirror:a\n"
        "    args: [--enable-prefix-caching, --not-a-flag]\n")
    code, found, _ = check("vllm", "--help-file", f"vllm serve={VLLM_HELP}")
    serve = next(program for program in found["programs"] if program["program"] == "vllm serve")
    by_flag = {flag["flag"]: flag for flag in serve["flags"]}
    assert code == 3 and by_flag["--enable-prefix-caching"]["status"] == "accepted"
    assert by_flag["--not-a-flag"]["status"] == "missing" and "args:" in by_flag["--not-a-flag"]["message"]


def test_a_help_of_an_unknown_program_or_a_path_of_the_wrong_kind_is_refused(check):
    assert check("llama.cpp", "--help-file", f"nothing={LLAMA_HELP}")[0] == 2
    assert check("llama.cpp", "--help-file", "llama-server=/no/such/file")[0] == 2
    assert check("llama.cpp", "--python", "/usr/bin/python3")[0] == 2
    assert check("vllm", "--binary", "/usr/bin/true")[0] == 2
