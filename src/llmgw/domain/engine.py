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
PYTHON_ENGINES = (VLLM, SGLANG)      # an environment of packages, made on the node
BESIDE = "; new packages: "           # in the sentence of one that serves while its packages are replaced
CPU = "CPU"                          # among the devices of a build that runs without a GPU
UV, PYTHON = "uv", "python"
TOOLS = (UV, PYTHON)                 # what makes such an environment; releases of their own
DEFAULT_VERSIONS = {LLAMA_CPP: "b10991", VLLM: "0.30.0"}   # what this release was checked against
# An exact patch of Python: an environment of "3.12" would link to a name that moves.
TOOL_VERSIONS = {UV: "0.13.9", PYTHON: "3.12.16+20261110"}
OLDEST_UV = "0.11.15"                # older ones write outside of an environment what a wheel tells them to


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
class Tool:
    """What makes environments: one of TOOLS at a version, with the files of its release."""

    name: str
    version: str
    assets: Tuple[Asset, ...] = ()
    problem: str = ""         # why there is no list (yet), in the control plane's words
    server_cannot: bool = False   # as of an engine's archives


@dataclass(frozen=True)
class EngineWanted:
    """Desired: this engine at this version. ``assets`` is the release's own list.

    A Python engine has ``tools`` instead, ``as_of`` (UTC) when its packages are taken from, and
    the sha256 of the fleet's list of packages by platform: empty text where a new one is to be made.
    ``vouched`` are those of lists that came with llmgw, or from an admin; ``assets`` the wheels
    that the mirror holds: from these two it can be installed without any index.
    """

    name: str
    version: str
    assets: Tuple[Asset, ...] = ()
    assets_problem: str = ""  # why there is no list (yet), in the control plane's words
    cpu: bool = False         # take the CPU build on purpose
    cuda: str = ""            # take no build for a newer CUDA than this
    as_of: str = ""
    tools: Tuple[Tool, ...] = ()
    locks: Tuple[Tuple[str, str], ...] = ()
    vouched: Tuple[str, ...] = ()
    with_ray: bool = False    # Ray is among its packages: launch_mode: ray
    allow_insecure: bool = False      # versions with known holes are run on purpose
    server_cannot: bool = False   # the control plane does not reach the release: a node may ask for it itself


@dataclass(frozen=True)
class EngineObserved:
    """Observed: what one node says of one engine version."""

    name: str
    version: str
    phase: EnginePhase
    message: str = ""         # the node's own sentence, carried unchanged everywhere
    hint: str = ""
    usable: bool = False      # installed and seen to run, or named in agent.yaml
    source: str = "archive"   # or "packages", or "operator"
    done_bytes: Optional[int] = None
    total_bytes: Optional[int] = None
    devices: Tuple[str, ...] = ()
    since: float = 0.0        # wall clock of the node, for display only

    @property
    def is_plain(self) -> bool:
        """Whether it serves, and there is no more to say of it."""
        return self.usable and BESIDE not in self.message

    @property
    def sentence(self) -> str:
        """The node's sentence with the engine's name before it, once."""
        head = f"{self.name} {self.version}: "
        said = self.message or self.phase.value
        return said if said.startswith(head) else head + said


@dataclass(frozen=True)
class PackageList:
    """The packages of an engine as a node found them itself, offered as the fleet's list."""

    node: str
    as_of: str
    text: str
