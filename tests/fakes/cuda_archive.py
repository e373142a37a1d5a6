"""Archives that are named like a CUDA build and its runtime, and are not: their CUDA backend cannot be loaded."""
from __future__ import annotations

import hashlib
import io
import tarfile
import types

GPU = "0, GPU-00000000-0000-0000-0000-000000000000, NVIDIA H200, 590.48.01, 9.0, Disabled, 143771 MiB, 0 MiB"


def cuda_archives(folder, archive, label="12.8"):
    """Return (build, runtime) made of a real archive; each has .path, .sha256 and .name."""
    name = archive.name.replace("-ubuntu-", f"-ubuntu-cuda-{label}-")
    runtime = f"cudart-{name}"
    with tarfile.open(archive.path) as source, tarfile.open(folder / name, "w:gz", compresslevel=1) as target:
        for member in source.getmembers():
            target.addfile(member, source.extractfile(member) if member.isreg() else None)
            if member.name.endswith("/llama-server"):
                _add(target, member.name.replace("llama-server", "libggml-cuda.so"), b"\x7fELF, and nothing more")
    with tarfile.open(folder / runtime, "w:gz") as target:
        for library in ("libcudart.so.12", "libcublas.so.12", "libcublasLt.so.12"):
            _add(target, f"{runtime[:-len('.tar.gz')]}/{library}", b"not a library")
    return tuple(types.SimpleNamespace(path=folder / each, name=each, sha256=hashlib.sha256(
        (folder / each).read_bytes()).hexdigest()) for each in (name, runtime))


def nvidia_smi(folder, text=GPU, code=0):
    """Write a program that stands for nvidia-smi into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\ncat <<'X'\n{text}\nX\nexit {code}\n")
    path.chmod(0o755)
    return path


def _add(target, name, data):
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(data), 0o755
    target.addfile(member, io.BytesIO(data))
