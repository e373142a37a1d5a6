"""What each engine needs of a node (numbers and their sources: docs/engines.md)."""
from __future__ import annotations

import re
from dataclasses import replace
from typing import Dict, Tuple

from llmgw.domain.engine import LLAMA_CPP, SGLANG, TRTLLM, VLLM
from llmgw.domain.requirement import Needs

# A torch for CUDA 13, which needs the driver that came with it.
_CUDA_13 = Needs(processors=("x86_64", "aarch64"), gpu=True, driver="580", compute_capability="7.5",
                 free_bytes=25 * 10**9, compiler=True)

# By engine: (from this version on, what it needs), the oldest first.
BY_VERSION: Dict[str, Tuple[Tuple[str, Needs], ...]] = {
    # The CPU archive is 18 MB and unpacks to 100 MB; the CUDA build and its runtime are 770 MB and 2 GB.
    LLAMA_CPP: (("", Needs(processors=("x86_64", "amd64", "aarch64", "arm64", "s390x"), free_bytes=500 * 10**6,
                           free_bytes_with_gpu=4 * 10**9, avx2=True,
                           libraries=("libgomp.so.1", "libstdc++.so.6", "libgcc_s.so.1"),
                           own=("libggml", "libllama", "libmtmd"))),),
    # 0.22.0, 0.30.0 and 0.33.0 ask for the same. Their wheels take glibc 2.28, but llguidance has none for less
    # than 2.31.
    VLLM: (("", replace(_CUDA_13, glibc="2.31")),),
    # 0.5.10 brings a torch for CUDA 12.8; from 0.5.11 on it is one for CUDA 13. The wheels of 0.5.23 ask for glibc
    # 2.34, and nodes take all of one engine for one glibc.
    SGLANG: (("", replace(_CUDA_13, driver="570", glibc="2.34")), ("0.5.11", replace(_CUDA_13, glibc="2.34"))),
    TRTLLM: (("", Needs(gpu=True)),),
}
NEEDS: Dict[str, Needs] = {name: rows[-1][1] for name, rows in BY_VERSION.items()}      # of the newest versions


def needs_of(name: str, version: str) -> Needs:
    """Return what an engine needs at a version; what the newest ones need where the version is none."""
    if not re.match("[0-9]", version):
        return NEEDS.get(name, Needs())
    found = [needs for first, needs in BY_VERSION.get(name, ()) if _numbers(first) <= _numbers(version)]
    return found[-1] if found else Needs()


def _numbers(version: str) -> Tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"[0-9]{1,9}", version)[:3])
