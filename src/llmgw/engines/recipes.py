"""How the engines come to a node that are Python programs: packages, tools, and what is checked afterwards."""
from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Dict, FrozenSet, Mapping, Tuple

from llmgw.domain.engine import LLAMA_CPP, PYTHON, SGLANG, UV, VLLM
from llmgw.domain.errors import RequirementMissing
from llmgw.engines import sglang, vllm

# A .pth file runs at every start of Python, so each is looked at by a person: these are of uv, of setuptools, and of
# nvidia-cutlass-dsl, which puts a folder of its own on the path.
_PTH = frozenset(("_virtualenv.pth", "distutils-precedence.pth", "nvidia_cutlass_dsl_packages.pth"))
# vLLM does not bring it; launch_mode: ray starts it on each node. An older one knows no token, and lets everybody in.
MIN_RAY = "2.52"
RAY_PACKAGE = "ray"
RAY = f"{RAY_PACKAGE}[default]>={MIN_RAY}"
_RAY_LIST = "-ray"
ARCHES = ("x86_64", "aarch64")
_SPELLINGS = {**{arch: arch for arch in ARCHES}, "amd64": "x86_64", "arm64": "aarch64"}


@dataclass(frozen=True)
class Recipe:
    """What is installed for one engine. ``version_words`` after its Python print the version as their last line."""

    package: str
    repository: str                        # whose releases say when a version was published
    version_words: Tuple[str, ...]
    glibc: str                             # wheels are chosen for it, on every node: lists are equal then
    published: Mapping[str, str] = field(default_factory=dict)     # version -> when, for those known here
    without_gpu: Mapping[str, str] = field(default_factory=dict)   # environment to run it where no accelerator is
    pth: FrozenSet[str] = _PTH
    download_bytes: int = 0                # about
    runs: str = ""                         # a program that must be in the environment


RECIPES: Dict[str, Recipe] = {
    VLLM: Recipe(
        package="vllm", repository="vllm-project/vllm", version_words=("-m", vllm.MODULE, "--version"),
        # its own wheel asks for 2.28, but llguidance has none for less than 2.31
        glibc="2.31", published={"0.30.0": "2026-09-22T05:22:21Z"}, without_gpu={"VLLM_TARGET_DEVICE": "cpu"},
        download_bytes=3_500_000_000),
    SGLANG: Recipe(
        package="sglang", repository="sgl-project/sglang",
        version_words=("-c", f"import {sglang.MODULE.partition('.')[0]} as e; print(e.__version__)"),
        glibc="2.34", download_bytes=4_000_000_000),
}


# Where the archives of the others come from.
REPOSITORIES = {LLAMA_CPP: "ggml-org/llama.cpp", UV: "astral-sh/uv", PYTHON: "astral-sh/python-build-standalone"}


def release(name: str, version: str) -> Tuple[str, str]:
    """Return (repository, tag) of a version of an engine or a tool on GitHub; KeyError when it has no releases."""
    if name in RECIPES:
        return RECIPES[name].repository, f"v{version}"
    # builds of Python are tagged by their date only
    return REPOSITORIES[name], version.partition("+")[2] if name == PYTHON else version


def machine(arch: str) -> str:
    """Return the processor type as wheels and releases spell it; RequirementMissing when they know none such."""
    try:
        return _SPELLINGS[arch]
    except KeyError:
        raise RequirementMissing(f"there are no packages for processors of type {arch or 'unknown'}",
                                 hint="bring an environment of your own: engines in agent.yaml") from None


def platform(recipe: Recipe, arch: str) -> str:
    """Return the platform that wheels are chosen for, as uv spells it; lists are kept by it."""
    return f"{machine(arch)}-manylinux_{recipe.glibc.replace('.', '_')}"


def list_name(platform: str, with_ray: bool) -> str:
    """Return what the fleet's list of packages is kept by: with Ray it is another one."""
    return platform + (_RAY_LIST if with_ray else "")


def requirements(recipe: Recipe, version: str, with_ray: bool) -> Tuple[str, ...]:
    """Return what is resolved, all at once: Ray has to fit to the rest."""
    return (f"{recipe.package}=={version}",) + ((RAY,) if with_ray else ())


def ray_is_too_old(version: str) -> bool:
    """Whether Ray of this version lets in whoever has no token."""
    return tuple(int(part) for part in re.findall(r"[0-9]{1,9}", version)[:2]) < tuple(map(int, MIN_RAY.split(".")))


def uv_archive(arch: str) -> str:
    """Return the name of uv's release archive: the static build, which runs on every Linux."""
    return f"uv-{machine(arch)}-unknown-linux-musl.tar.gz"


def python_archives(version: str, arch: str) -> Tuple[str, ...]:
    """Return the names of the archives that hold Python ``version``, the best first."""
    stem = f"cpython-{version}-{machine(arch)}-unknown-linux-gnu"
    return (f"{stem}-install_only_stripped.tar.gz", f"{stem}-install_only.tar.gz")
