"""Build llmgw.pyz and llmgw.pyz.sha256, bit for bit the same from any folder, umask and Python.

shiv packs a staged copy of src/llmgw; we give it our launcher (scripts/pyz/launcher.sh) for the
shebang, our start (scripts/pyz/main.py) for __main__, sorted bootstrap files and plain file modes:
it has no option for any of them. Why each is needed: docs/decisions/0003-one-file.md.
"""
from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import stat
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Iterator, List, Optional

ROOT = Path(__file__).resolve().parent
SHIV = "1.0.8"
REPLACED = ("MAIN_TEMPLATE", "iter_package_files", "write_file_prefix", "write_to_zipapp")
COMPILED = {".pyc", ".pyo", ".so", ".pyd", ".dylib", ".a", ".o"}


class PlainFile:
    """Stands for the stat result of every member: umask and checkout leave no trace."""

    st_mode = stat.S_IFREG | 0o644


def stage(source: Path, target: Path) -> str:
    """Copy the package; return the sha256 of its names and bytes. Compiled files are refused."""
    digest = hashlib.sha256()
    for path in wanted(source):
        name = (Path("llmgw") / path.relative_to(source)).as_posix()
        if path.suffix in COMPILED:
            raise SystemExit(f"build_pyz: {path} is compiled: it would run on one kind of machine only")
        data = path.read_bytes()
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
        copy = target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(data)
    for folder in [target, *target.rglob("*")]:
        folder.chmod(0o755 if folder.is_dir() else 0o644)
    return digest.hexdigest()


def wanted(source: Path) -> Iterator[Path]:
    """Yield the files to pack: no caches, nothing hidden, no editor's leftovers."""
    for path in sorted(source.rglob("*"), key=lambda path: path.as_posix()):
        parts = path.relative_to(source).parts
        if path.is_file() and "__pycache__" not in parts and not any(part.startswith(".") for part in parts) \
                and not path.name.endswith(("~", ".orig", ".rej", ".swp")):
            yield path


def teach_shiv(build: str) -> None:
    """Replace what shiv would write by ours; refuse a shiv that does not have these names."""
    try:
        import shiv
        from shiv import builder
    except ImportError:
        raise SystemExit(f"build_pyz: needs shiv=={SHIV}: pip install 'shiv=={SHIV}', or `make pyz`") from None
    gone = [name for name in REPLACED if not hasattr(builder, name)]
    if gone or shiv.__version__ != SHIV:
        raise SystemExit(f"build_pyz: shiv is {shiv.__version__}, expected {SHIV}"
                         + (f"; it has no {', '.join(gone)}" if gone else ""))
    launcher = (ROOT / "scripts" / "pyz" / "launcher.sh").read_bytes()
    start = (ROOT / "scripts" / "pyz" / "main.py").read_text(encoding="utf-8")
    package_files, write_entry = _shivs_own(builder)
    builder.MAIN_TEMPLATE = start.replace("@BUILD@", build).replace("{", "{{").replace("}", "}}")
    builder.iter_package_files = lambda package: sorted(package_files(package), key=lambda entry: entry[1])
    builder.write_file_prefix = lambda out, interpreter: out.write(launcher)
    builder.write_to_zipapp = lambda archive, name, data, date, compression, stat=None: write_entry(
        archive, name, data, date, compression, stat=PlainFile)


def _shivs_own(builder, kept: dict = {}):  # noqa: B006 - kept on purpose: the second build must not wrap the first's
    if not kept:
        kept["both"] = builder.iter_package_files, builder.write_to_zipapp
    return kept["both"]


def build(source: Path, folder: Path) -> Path:
    """Stage ``source`` and build in ``folder``; return the file."""
    tree, target = folder / "stage", folder / "llmgw.pyz"
    teach_shiv(stage(source, tree))
    from shiv import cli
    os.environ.pop("SOURCE_DATE_EPOCH", None)      # it would enter the file
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)   # shiv 1.0.8 calls datetime.utcfromtimestamp
        cli.main(["-e", "llmgw.cli:main", "--site-packages", str(tree), "--reproducible", "-o", str(target)],
                 standalone_mode=False)
    return target


def main(words: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(description="Build llmgw.pyz and its .sha256.")
    parser.add_argument("--output", type=Path, default=ROOT / "llmgw.pyz", help="default: %(default)s")
    output: Path = parser.parse_args(words).output.absolute()
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        first = build(ROOT / "src" / "llmgw", Path(one))
        second = build(Path(one) / "stage" / "llmgw", Path(other))     # an edit in between is no difference
        data = first.read_bytes()
        if data != second.read_bytes():
            shutil.copy(first, f"{output}.first")
            shutil.copy(second, f"{output}.second")
            raise SystemExit(f"build_pyz: two builds differ; compare {output}.first and {output}.second")
    digest = hashlib.sha256(data).hexdigest()
    put(output, data, 0o755)
    put(output.with_name(output.name + ".sha256"), f"{digest}  {output.name}\n".encode(), 0o644)
    print(f"{output}: {len(data)} bytes, sha256 {digest}")
    return 0


def put(path: Path, data: bytes, mode: int) -> None:
    """Write beside ``path`` and rename: a running llmgw.pyz keeps its file."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    scratch.write_bytes(data)
    scratch.chmod(mode)
    os.replace(scratch, path)


if __name__ == "__main__":
    sys.exit(main())
