"""/proc/cpuinfo: the processor, and which vector instructions it offers."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, Tuple

# the kernel's word -> ours; the order is the one shown
_EXTENSIONS = {
    "avx": "avx", "avx2": "avx2", "fma": "fma", "f16c": "f16c", "avx_vnni": "avx_vnni",
    "avx512f": "avx512f", "avx512_vnni": "avx512_vnni", "avx512_bf16": "avx512_bf16",
    "amx_tile": "amx_tile", "amx_int8": "amx_int8", "amx_bf16": "amx_bf16",
    "asimd": "neon", "neon": "neon", "asimddp": "dotprod", "i8mm": "i8mm", "sve": "sve", "sve2": "sve2",
    "sme": "sme"}


@dataclass(frozen=True)
class Cpu:
    """``model`` is empty on processors whose kernel names none."""

    model: str
    count: int
    vector_extensions: Tuple[str, ...]


def cpuinfo(data: bytes) -> Cpu:
    """Return what the file says of the first processor, and how many there are."""
    first: Dict[str, str] = {}
    count = 0
    for line in data.decode("utf-8", "replace").splitlines():
        name, separator, value = line.partition(":")
        if not separator:
            continue
        name = name.strip().lower()
        count += name == "processor" and value.strip().isdigit()
        first.setdefault(name, value.strip())
    words = set((first.get("flags") or first.get("features") or "").split())
    found = dict.fromkeys(ours for word, ours in _EXTENSIONS.items() if word in words)
    return Cpu(model=first.get("model name") or first.get("cpu") or first.get("hardware", ""),
               count=count, vector_extensions=tuple(found))
