"""llmgw.pyz is the same file wherever and however it is built, and holds nothing compiled."""
from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests import interpreters
from tests.conftest import ROOT, load_script

BYTE_BUDGET = 700_000       # of which 172 kB are the hashes of the default vLLM: they do not compress


def build(tree: Path, output: Path, *, python: str = sys.executable, umask: int = 0o022, **environment: str) -> str:
    """Build from ``tree`` and return the sha256 of what came out."""
    env = {**os.environ, **environment}
    env.pop("PYTHONPATH", None)
    run = subprocess.run(["/bin/sh", "-c", f'umask {umask:03o}; exec "$@"', "sh", python, str(tree / "build_pyz.py"),
                          "--output", str(output)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                         text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stdout
    return hashlib.sha256(output.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A still copy of what the build reads."""
    return copy_of_tree(ROOT, tmp_path_factory.mktemp("tree") / "llmgw")


def copy_of_tree(source: Path, target: Path) -> Path:
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
    shutil.copytree(source / "src", target / "src", ignore=ignore)
    shutil.copytree(source / "scripts" / "pyz", target / "scripts" / "pyz")
    shutil.copy(source / "build_pyz.py", target)
    return target


@pytest.fixture(scope="module")
def digest(tree, tmp_path_factory):
    return build(tree, tmp_path_factory.mktemp("first") / "llmgw.pyz")


def test_another_folder_umask_and_timezone_give_the_same_bytes(tree, digest, tmp_path):
    other = copy_of_tree(tree, tmp_path / "elsewhere")
    for path in other.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    assert build(other, tmp_path / "llmgw.pyz", umask=0o077, TZ="Asia/Tokyo", SOURCE_DATE_EPOCH="1700000000") == digest


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.9", "3.11", "3.13"])
def test_another_python_gives_the_same_bytes(version, tree, digest, tmp_path, bring):
    assert build(tree, tmp_path / "llmgw.pyz", python=python_with_shiv(version, bring)) == digest


def python_with_shiv(version: str, bring) -> str:
    """Return the python of a kept virtual environment of ``version`` that has shiv."""
    base = interpreters.need(version)
    folder = bring.cache_dir() / f"shiv-{version}"
    python = folder / "bin" / "python"
    with bring.hold(bring.make(bring.cache_dir()) / "shiv.lock"):
        if not (folder / ".whole").exists() or subprocess.run([str(python), "-c", ""], check=False).returncode:
            shutil.rmtree(folder, ignore_errors=True)
            subprocess.run([base, "-m", "venv", str(folder)], check=True, timeout=300)
            pip = subprocess.run([str(python), "-m", "pip", "install", "-q", "shiv==1.0.8"], timeout=600,
                                 stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
            if pip.returncode:
                pytest.fail(f"cannot fetch shiv for Python {version}: pip needs a package index\n{pip.stdout}")
            (folder / ".whole").touch()
    return str(python)


def test_the_sum_beside_the_file_is_right_and_in_the_form_of_sha256sum(pyz):
    digest = hashlib.sha256(pyz.read_bytes()).hexdigest()
    assert pyz.with_name("llmgw.pyz.sha256").read_text() == f"{digest}  llmgw.pyz\n"


def test_the_file_holds_no_compiled_member_and_keeps_its_byte_budget(pyz):
    with zipfile.ZipFile(pyz) as archive:
        assert archive.testzip() is None
        names = archive.namelist()
        packed = sum(member.compress_size for member in archive.infolist() if "/locks/" not in member.filename)
    compiled = load_script(ROOT / "build_pyz.py").COMPILED
    assert [name for name in names if Path(name).suffix in compiled or "__pycache__" in name] == []
    assert packed <= BYTE_BUDGET


def test_the_file_holds_the_package_with_its_data_files_and_nothing_of_the_build_machine(tree, digest, tmp_path):
    other = copy_of_tree(tree, tmp_path / "tree")
    package = other / "src" / "llmgw"
    (package / "server" / "static").mkdir(exist_ok=True)
    (package / "server" / "static" / "page-of-test.html").write_text("<p>")
    (package / "leftover.py~").write_text("old")
    (package / ".hidden").write_text("x")
    output = tmp_path / "llmgw.pyz"
    build(other, output)
    with zipfile.ZipFile(output) as archive:
        names = set(archive.namelist())
    assert {"__main__.py", "environment.json", "site-packages/llmgw/__init__.py", "site-packages/llmgw/cli.py",
            "site-packages/llmgw/server/static/page-of-test.html"} <= names
    assert not [name for name in names if name.endswith("~") or ".hidden" in name or "dist-info" in name]
    assert str(tmp_path).encode() not in output.read_bytes()


def test_a_compiled_file_in_the_tree_stops_the_build(tree, tmp_path):
    other = copy_of_tree(tree, tmp_path / "tree")
    (other / "src" / "llmgw" / "fast.so").write_bytes(b"\x7fELF")
    with pytest.raises(AssertionError, match="fast.so is compiled"):
        build(other, tmp_path / "llmgw.pyz")


@pytest.mark.parametrize("name", load_script(ROOT / "build_pyz.py").REPLACED)
def test_a_shiv_without_one_of_the_names_we_replace_is_refused(name, monkeypatch):
    build_pyz = load_script(ROOT / "build_pyz.py")
    import shiv.builder
    monkeypatch.delattr(shiv.builder, name)          # shiv's, not ours
    with pytest.raises(SystemExit, match=name):
        build_pyz.teach_shiv("0" * 64)


def test_another_version_of_shiv_is_refused(monkeypatch):
    import shiv
    monkeypatch.setattr(shiv, "__version__", "1.0.9")
    with pytest.raises(SystemExit, match="shiv is 1.0.9, expected 1.0.8"):
        load_script(ROOT / "build_pyz.py").teach_shiv("0" * 64)
