"""scripts/python.sh finds a real interpreter behind shims, and says what is wrong with what it found."""
from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import ROOT

SCRIPT = str(ROOT / "scripts" / "python.sh")
VERSION = "%d.%d" % sys.version_info[:2]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "bin").mkdir()
    return tmp_path


def find(folder, *words):
    return subprocess.run(["/bin/sh", SCRIPT, *words], env={"PATH": str(folder / "bin"), "HOME": str(folder)},
                          capture_output=True, text=True, timeout=60, check=False)


def program(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_a_shim_that_fails_is_passed_over_and_the_interpreter_itself_is_named(folder):
    program(folder / "bin" / f"python{VERSION}", "echo 'command not found' >&2; exit 127")
    program(folder / "bin" / "python3", f'exec "{sys.executable}" "$@"')
    found = find(folder)
    assert (found.returncode, found.stdout) == (0, sys.executable + "\n")


def test_a_pyenv_version_is_found_where_pyenv_keeps_it(folder):
    kept = folder / ".pyenv" / "versions" / f"{VERSION}.1" / "bin"
    kept.mkdir(parents=True)
    program(kept / f"python{VERSION}", f'exec "{sys.executable}" "$@"')
    assert find(folder).stdout == sys.executable + "\n"
    assert find(folder, "3.1").returncode == 1


def test_no_python_says_what_to_install(folder):
    found = find(folder)
    assert found.returncode == 1 and found.stdout == ""
    assert "no Python 3.9 to 3.13 found" in found.stderr and "apt-get install" in found.stderr


def test_a_python_without_venv_is_named_with_the_package_it_lacks(folder):
    program(folder / "bin" / "python3", 'case "$2" in *ensurepip*) exit 1;; esac\n' f'exec "{sys.executable}" "$@"')
    found = find(folder)
    assert found.returncode == 1 and sys.executable in found.stderr and "python3-venv" in found.stderr
