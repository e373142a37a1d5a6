"""An engine, wanted and observed."""
from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Optional, Tuple

LLAMA_CPP = "llama.cpp"
VLLM = "vllm"
SGLANG = "sglang"
TRTLLM = "trtllm"
ENGINES = (LLAMA_CPP, VLLM, SGLANG, TRTLLM)
DEFAULT_VERSIONS = {LLAMA_CPP: "b10991", VLLM: "0.30.0"}   # what this release was checked against


class EnginePhase(str, enum.Enum):
    """Where convergence on one engine version stands. Use ``.value`` at every border."""

    WANTED = "wanted"
    RESOLVING = "resolving"
    DOWNLOADING = "downloading"
    VERIFYING = "verifying"
    UNPACKING = "unpacking"
    INSTALLING_PACKAGES = "installing packages"
    CHECKING = "checking"
    INSTALLED = "installed"
    SKIPPED = "skipped"       # not a fault
    MISSING = "missing"       # something a person must bring
    FAILED = "failed"         # will be tried again


@dataclass(frozen=True)
class Asset:
    """One file of a release, as the control plane holds or can fetch it."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class EngineWanted:
    """Desired: this engine at this version. ``assets`` is the release's own list."""

    name: str
    version: str
    assets: Tuple[Asset, ...] = ()
    assets_problem: str = ""  # why there is no list (yet), in the control plane's words
    cpu: bool = False         # take the CPU build on purpose
    cuda: str = ""            # take no build for a newer CUDA than this


@dataclass(frozen=True)
class EngineObserved:
    """Observed: what one node says of one engine version."""

    name: str
    version: str
    phase: EnginePhase
    message: str = ""         # the node's own sentence, carried unchanged everywhere
    hint: str = ""
    usable: bool = False      # installed and seen to run, or named in agent.yaml
    source: str = "archive"   # or "operator"
    done_bytes: Optional[int] = None
    total_bytes: Optional[int] = None
    devices: Tuple[str, ...] = ()
    since: float = 0.0        # wall clock of the node, for display only
