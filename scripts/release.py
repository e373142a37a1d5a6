"""Make a release in dist/: llmgw.pyz built twice and compared, the onboarding files, SHA256SUMS, a manifest, the notes.

    python scripts/release.py [--output DIR]     the version is src/llmgw's own; CHANGELOG.md has its notes

What is checked of the file before anything is written: both builds are the same bytes, no member is a program of one
kind of machine, it runs from a folder that is not the source's, and it says its version.
"""
from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Dict, List

ROOT = Path(__file__).resolve().parent.parent
ONBOARDING = ("join.sh", "uninstall.sh", "llmgw-agent.service", "llmgw-router.service", "llmgw-server.service")
MACHINE_CODE = (b"\x7fELF", b"\xcf\xfa\xed\xfe", b"MZ\x90\x00")
MIN_PYTHON = "3.9"


class CannotRelease(Exception):
    """Something is not as a release must be; the text says what."""


def release(output: Path) -> List[Path]:
    """Write the release into ``output``, whole or not at all; return its files."""
    version = own_version()
    notes = notes_of(version)
    scratch = output.with_name(f".{output.name}.tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        build_twice(scratch / "llmgw.pyz")
        check_members(scratch / "llmgw.pyz")
        check_runs(scratch / "llmgw.pyz", version)
        for name in ONBOARDING:
            shutil.copyfile(ROOT / "onboarding" / name, scratch / name)
            (scratch / name).chmod(0o755 if name.endswith(".sh") else 0o644)
        files = ["llmgw.pyz", *ONBOARDING]
        sums = {name: sha256_of(scratch / name) for name in files}
        (scratch / "SHA256SUMS").write_text("".join(f"{sums[name]}  {name}\n" for name in files), encoding="ascii")
        (scratch / "manifest.json").write_text(json.dumps(manifest(version, sums), indent=1, sort_keys=True) + "\n",
                                               encoding="utf-8")
        (scratch / "notes.md").write_text(notes, encoding="utf-8")
        shutil.rmtree(output, ignore_errors=True)
        os.replace(scratch, output)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return sorted(output.iterdir())


def own_version() -> str:
    text = (ROOT / "src" / "llmgw" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([0-9][^"]*)"$', text, re.MULTILINE)
    if found is None:
        raise CannotRelease("src/llmgw/__init__.py names no version")
    return found.group(1)


def notes_of(version: str) -> str:
    """Return the part of CHANGELOG.md about this version."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    for part in re.split(r"(?m)^(?=## )", text):
        if re.match(rf"## {re.escape(version)}(\s|$)", part):
            return part.rstrip() + "\n"
    raise CannotRelease(f"CHANGELOG.md has no part about {version}: add '## {version}'")


def build_twice(path: Path) -> None:
    """Build from two folders with two umasks; the bytes must be the same."""
    with tempfile.TemporaryDirectory(prefix="llmgw-release-") as folder:
        other = Path(folder) / "another place"
        for name in ("src", "scripts"):
            shutil.copytree(ROOT / name, other / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "build_pyz.py", other / "build_pyz.py")
        second = Path(folder) / "second.pyz"
        for source, built, umask in ((ROOT, path, 0o022), (other, second, 0o077)):
            run([sys.executable, str(source / "build_pyz.py"), "--output", str(built)], f"the build in {source}", umask)
        if path.read_bytes() != second.read_bytes():
            raise CannotRelease(f"two builds differ: {sha256_of(path)} and {sha256_of(second)}")
    path.with_name(path.name + ".sha256").unlink(missing_ok=True)


def check_members(path: Path) -> None:
    """Refuse a file with a member that runs on one kind of machine only."""
    with zipfile.ZipFile(path) as whole:
        for member in whole.infolist():
            with whole.open(member) as source:
                if source.read(4).startswith(MACHINE_CODE):
                    raise CannotRelease(f"{member.filename} is compiled for one kind of machine")


def check_runs(path: Path, version: str) -> None:
    with tempfile.TemporaryDirectory(prefix="llmgw-release-") as folder:
        copy = Path(folder) / "llmgw.pyz"
        shutil.copyfile(path, copy)
        said = run(["sh", str(copy), "--version"], "llmgw.pyz --version", folder=folder).strip()
    if said != f"llmgw {version}":
        raise CannotRelease(f"llmgw.pyz says {said!r:.200}, not llmgw {version}")


def manifest(version: str, sums: Dict[str, str]) -> Dict[str, object]:
    """Return what a program has to know of this release."""
    return {"version": version, "sha256": sums, "min_python": MIN_PYTHON, "engines": default_engines(),
            "checked_with": {"python": [MIN_PYTHON, f"{sys.version_info[0]}.{sys.version_info[1]}"]}}


def default_engines() -> Dict[str, str]:
    """Return the engines' default versions as the source has them."""
    tree = ast.parse((ROOT / "src" / "llmgw" / "domain" / "engine.py").read_text(encoding="utf-8"))
    names = {node.targets[0].id: node.value for node in tree.body
             if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)}
    table = names.get("DEFAULT_VERSIONS")
    if not isinstance(table, ast.Dict):
        raise CannotRelease("domain/engine.py has no DEFAULT_VERSIONS")
    return {_text(key, names): _text(value, names) for key, value in zip(table.keys, table.values)}


def _text(node: "ast.expr | None", names: Dict[str, ast.expr]) -> str:
    return str(ast.literal_eval(names[node.id] if isinstance(node, ast.Name) else node))  # type: ignore[arg-type]


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def run(words: List[str], what: str, umask: int = 0o022, folder: str = "") -> str:
    before = os.umask(umask)
    try:
        done = subprocess.run(words, cwd=folder or None, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              timeout=600, check=False)
    finally:
        os.umask(before)
    if done.returncode:
        raise CannotRelease(f"{what} failed: {(done.stderr or done.stdout).strip()[-500:]}")
    return done.stdout


def main(words: List[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    options = parser.parse_args(words)
    try:
        for path in release(options.output.resolve()):
            print(path)
    except CannotRelease as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
