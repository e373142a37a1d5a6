"""What each engine needs of a node (numbers and their sources: docs/engines.md)."""
from __future__ import annotations

from typing import Dict

from llmgw.domain.engine import LLAMA_CPP, SGLANG, TRTLLM, VLLM
from llmgw.domain.requirement import Needs

NEEDS: Dict[str, Needs] = {
    # The CPU archive is 18 MB and unpacks to 100 MB; the CUDA build and its runtime are 770 MB and 2 GB.
    LLAMA_CPP: Needs(processors=("x86_64", "amd64", "aarch64", "arm64", "s390x"), free_bytes=500 * 10**6,
                     free_bytes_with_gpu=4 * 10**9, avx2=True,
                     libraries=("libgomp.so.1", "libstdc++.so.6", "libgcc_s.so.1"),
                     own=("libggml", "libllama", "libmtmd")),
    # 0.30.0 is built for CUDA 13. Its own wheel asks for glibc 2.28, but llguidance has none for less than 2.31.
    VLLM: Needs(processors=("x86_64", "aarch64"), gpu=True, driver="580", compute_capability="7.5",
                free_bytes=25 * 10**9, glibc="2.31", compiler=True),
    # 0.5.23 brings a torch for CUDA 13, and its own wheels ask for glibc 2.34.
    SGLANG: Needs(processors=("x86_64", "aarch64"), gpu=True, driver="580", compute_capability="7.5",
                  free_bytes=25 * 10**9, glibc="2.34", compiler=True),
    TRTLLM: Needs(gpu=True),
}
