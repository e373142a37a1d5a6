"""A release, verified from the outside."""
from __future__ import annotations

import json
import subprocess
import sys
import zipfile

import pytest

from tests.conftest import ROOT, load_script

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("release") / "dist"
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "release.py"), "--output", str(folder)],
                          capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def script():
    return load_script(ROOT / "scripts" / "release.py")


def test_the_checksums_hold_and_name_every_file_that_is_installed(made):
    done = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=made, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
    assert {line.split(":")[0] for line in done.stdout.splitlines()} == {
        "llmgw.pyz", "join.sh", "uninstall.sh", "llmgw-agent.service", "llmgw-router.service", "llmgw-server.service"}
    assert sorted(path.name for path in made.iterdir() if path.name not in done.stdout) == [
        "SHA256SUMS", "manifest.json", "notes.md"]


def test_the_manifest_says_what_is_in_it(made, pyz):
    from llmgw import __version__
    from llmgw.domain.engine import DEFAULT_VERSIONS
    known = json.loads((made / "manifest.json").read_text())
    assert (known["version"], known["min_python"], known["engines"]) == (__version__, "3.9", dict(DEFAULT_VERSIONS))
    assert f"{known['sha256']['llmgw.pyz']}  llmgw.pyz" in (made / "SHA256SUMS").read_text()
    assert (made / "llmgw.pyz").read_bytes() == pyz.read_bytes(), "a third build from here is the same too"
    assert __version__ in (made / "notes.md").read_text().splitlines()[0]


def test_no_member_is_a_program_of_one_kind_of_machine(made, script, tmp_path):
    script.check_members(made / "llmgw.pyz")
    with zipfile.ZipFile(tmp_path / "bad.pyz", "w") as bad:
        bad.writestr("fast.py", b"\x7fELF\x02")
    with pytest.raises(script.CannotRelease, match="fast.py is compiled"):
        script.check_members(tmp_path / "bad.pyz")


def test_a_version_without_notes_and_a_file_that_says_another_are_refused(made, script):
    with pytest.raises(script.CannotRelease, match="no part about 9.9.9"):
        script.notes_of("9.9.9")
    with pytest.raises(script.CannotRelease, match="not llmgw 9.9.9"):
        script.check_runs(made / "llmgw.pyz", "9.9.9")
