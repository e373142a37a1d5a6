"""Bring uv and a build of Python into the user's cache folder, in the shape of their releases on GitHub, for the tests.

uv's static build comes as a wheel through pip; the Python is one of this machine, packed as builds of Python are.
"""
from __future__ import annotations

import io
import os
import platform
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import bring

UV = "0.13.9"
BUILD = "20240107"                # a date, as builds of Python have one
LEFT_OUT = ("test", "idlelib", "turtledemo", "ensurepip", "lib2to3", "tkinter", "__pycache__")


def uv_archive() -> bring.Archive:
    """Return uv as its release has it: one top folder with the program."""
    name = f"uv-{_machine()}-unknown-linux-musl.tar.gz"
    path = bring.cache_dir() / f"uv-{UV}" / name
    if not bring.is_whole(path):
        bring.locked(path, _bring_uv)
    return bring.Archive(path, bring.record_of(path)["sha256"], name)


def python_archive(interpreter: str) -> "tuple[str, bring.Archive]":
    """Return (version+date, archive) of the Python that ``interpreter`` belongs to."""
    ask = "import sys, platform; print(platform.python_version(), sys.base_prefix)"
    told = subprocess.run([interpreter, "-c", ask],
                          stdout=subprocess.PIPE, text=True, timeout=60, check=True).stdout
    version, prefix = told.strip().split(" ", 1)
    if prefix in ("/", "/usr", "/usr/local"):
        raise bring.CannotBring(f"Python {version} is a part of this system ({prefix}) and cannot be packed alone")
    name = f"cpython-{version}+{BUILD}-{_machine()}-unknown-linux-gnu-install_only_stripped.tar.gz"
    path = bring.cache_dir() / f"cpython-{version}-movable" / name
    if not bring.is_whole(path):
        bring.locked(path, lambda target: _pack_python(target, Path(prefix)))
    return f"{version}+{BUILD}", bring.Archive(path, bring.record_of(path)["sha256"], name)


def _movable(program: bytes, prefix: Path) -> bytes:
    """Return the program looking for its library beside itself, as builds of Python do, and not where it was made."""
    old, new = f"{prefix}/lib\0".encode(), b"$ORIGIN/../lib\0"
    return program.replace(old, new.ljust(len(old), b"\0"), 1) if len(new) <= len(old) else program


def _machine() -> str:
    machine = platform.machine()
    if sys.platform != "linux" or machine not in ("x86_64", "aarch64"):
        raise bring.CannotBring(f"no uv archive for {sys.platform} on {machine}")
    return machine


def _bring_uv(path: Path) -> None:
    run = subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:",
                          "--platform", f"musllinux_1_1_{_machine()}", "--dest", str(path.parent), f"uv=={UV}"],
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600, check=False)
    wheels = sorted(path.parent.glob(f"uv-{UV}-*.whl"))
    if run.returncode or not wheels:
        raise bring.CannotBring(f"pip does not bring uv {UV}: {run.stdout.strip()[-300:]}")
    scratch = path.with_name(path.name + ".tmp")
    with zipfile.ZipFile(wheels[-1]) as wheel, tarfile.open(scratch, "w:gz", compresslevel=1) as target:
        member = tarfile.TarInfo(f"{path.name[:-len('.tar.gz')]}/uv")
        info = next(each for each in wheel.infolist() if each.filename.endswith("/scripts/uv"))
        member.size, member.mode = info.file_size, 0o755
        with wheel.open(info) as source:
            target.addfile(member, source)
    wheels[-1].unlink()
    bring.give_name(scratch, path)


def _pack_python(path: Path, prefix: Path) -> None:
    def kept(member: tarfile.TarInfo):
        parts = member.name.split("/")
        if any(part in LEFT_OUT for part in parts) or member.name.endswith(".a"):
            return None
        if "site-packages" in parts and not member.isdir():
            return None
        return member

    scratch = path.with_name(path.name + ".tmp")
    with tarfile.open(scratch, "w:gz", compresslevel=1) as target:
        for name in ("bin", "lib", "include"):
            if os.path.isdir(prefix / name):
                target.add(prefix / name, f"python/{name}", filter=kept)
        program = next(each for each in sorted((prefix / "bin").glob("python3.*")) if not each.is_symlink())
        member = target.gettarinfo(str(program), f"python/bin/{program.name}")       # in place of the one from above
        data = _movable(program.read_bytes(), prefix)
        member.size = len(data)
        target.addfile(member, io.BytesIO(data))
    bring.give_name(scratch, path)
