"""A GitHub release of llama.cpp: its files with digests, and the one that fits a node.

Names are matched, never composed: flavours and their order have changed between releases.
"""
from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Sequence, Tuple

from llmgw.domain.digest import sha256_hex
from llmgw.domain.engine import Asset
from llmgw.domain.errors import ParseError, RequirementMissing
from llmgw.parse import utc

MAX_BYTES = 16 << 20
MAX_ASSETS = 1000         # GitHub takes no more
FIRST_CUDA_BUILD = 11026  # the oldest tag seen with Linux CUDA archives

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,199}")
_URL = re.compile(r"https?://[^\s\x00-\x1f]{1,2000}")
_CPU = re.compile(r"llama-(b[0-9]+)-bin-ubuntu-(x64|arm64|s390x)\.tar\.gz")
_CUDA = re.compile(r"llama-(b[0-9]+)-bin-ubuntu-cuda-([0-9]{1,3})\.([0-9]{1,3})-(x64|arm64)\.tar\.gz")
_ARCHES = {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64", "arm64": "arm64", "s390x": "s390x"}

# The Linux driver that came with each CUDA toolkit (NVIDIA's release notes). An older driver of the same
# major runs its machine code but not its PTX, and llama.cpp ships PTX for several GPUs (A100, H100, T4).
_DRIVERS = {
    (12, 0): "525.60.13", (12, 1): "530.30.02", (12, 2): "535.54.03", (12, 3): "545.23.06",
    (12, 4): "550.54.14", (12, 5): "555.42.02", (12, 6): "560.28.03", (12, 8): "570.26", (12, 9): "575.51.03",
    (13, 0): "580.65.06", (13, 1): "590.44.01", (13, 2): "595.45.04", (13, 3): "610.43.02", (13, 4): "616.00",
}
_FIRST_OF_CUDA_13 = (7, 5)  # compute capability; CUDA 13 dropped the older GPUs


@dataclass(frozen=True)
class Release:
    """The usable files of a release, where they are, and the names of those without a digest."""

    tag: str
    assets: Tuple[Asset, ...]
    urls: Dict[str, str]
    undigested: Tuple[str, ...] = ()
    published_at: str = ""    # UTC


@dataclass(frozen=True)
class Picked:
    """The archive for a node, and the CUDA runtime whose files belong beside its programs."""

    binary: Asset
    runtime: Optional[Asset] = None
    cuda: str = ""            # "12.8"; empty: the CPU build


def parse(data: bytes, tag: str) -> Release:
    """Return the release in GitHub's JSON; ParseError when it is not ``tag``, or has no file with a sha256."""
    return _release(tag, _decoded(data, tag)["assets"])


def dated(data: bytes, tag: str) -> Release:
    """Return when the release in GitHub's JSON was published, and none of its files: they come from elsewhere."""
    found = _decoded(data, tag)
    if found.get("draft"):
        raise ParseError(f"release {tag}: it is not published yet")
    try:
        return Release(tag, (), {}, published_at=utc.normal(found.get("published_at") or ""))
    except ParseError:
        raise ParseError(f"release {tag}: the answer does not say when it was published") from None


def _decoded(data: bytes, tag: str) -> Dict[str, Any]:
    if len(data) > MAX_BYTES:
        raise ParseError(f"release {tag}: an answer of {len(data)} bytes")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        raise ParseError(f"release {tag}: the answer is not JSON") from None
    if not isinstance(found, dict) or found.get("tag_name") != tag or not isinstance(found.get("assets"), list):
        raise ParseError(f"release {tag}: the answer does not describe this release")
    if len(found["assets"]) > MAX_ASSETS:
        raise ParseError(f"release {tag}: it lists {len(found['assets'])} files")
    return found


def _release(tag: str, entries: List[Any]) -> Release:
    assets: Dict[str, Asset] = {}
    urls: Dict[str, str] = {}
    undigested: List[str] = []
    for entry in entries:
        asset, url = _asset(entry, tag, undigested)
        if asset is None:
            continue
        if asset.name in assets:
            raise ParseError(f"release {tag}: two files are named {asset.name}")
        assets[asset.name], urls[asset.name] = asset, url
    if not assets and undigested:
        raise ParseError(f"release {tag}: none of its {len(undigested)} files has a sha256 digest to check it by",
                         hint="name a newer version, or bring the archive with: ctl mirror import-engine")
    return Release(tag, tuple(assets.values()), urls, tuple(undigested))


def _asset(entry: Any, tag: str, undigested: List[str]) -> Tuple[Optional[Asset], str]:
    """Return a usable file and its address; None for one that is still uploading or has no digest."""
    if not isinstance(entry, dict):
        raise ParseError(f"release {tag}: an entry of its file list is {type(entry).__name__}")
    name, size, digest = entry.get("name"), entry.get("size"), entry.get("digest")
    url = entry.get("browser_download_url")
    if not isinstance(name, str) or not _NAME.fullmatch(name) or entry.get("state", "uploaded") != "uploaded":
        return None, ""
    if not isinstance(size, int) or isinstance(size, bool) or not 0 < size < 1 << 45:
        raise ParseError(f"release {tag}: {name} has the size {size!r:.40}")
    if not isinstance(url, str) or not _URL.fullmatch(url):
        raise ParseError(f"release {tag}: {name} has no address")
    if digest is None:        # GitHub has none for uploads before June 2025
        undigested.append(name)
        return None, ""
    return Asset(name, size, _digest(digest, tag, name)), url


def _digest(digest: Any, tag: str, name: str) -> str:
    if not isinstance(digest, str) or not digest.startswith("sha256:"):
        raise ParseError(f"release {tag}: {name} has the digest {digest!r:.100}, not a sha256")
    return sha256_hex(digest)


def pick(assets: Sequence[Asset], version: str, arch: str, cuda_driver: Optional[str], cpu: bool,
         compute_capability: Optional[str] = None, cuda: str = "") -> Picked:
    """Return the archive of llama.cpp ``version`` for a node; RequirementMissing says why there is none.

    ``arch`` is as uname says. ``cuda_driver`` is the NVIDIA driver's version on a node whose GPUs are
    to be used. Such a node gets the newest CUDA build that its driver supports, never quietly the
    CPU build; ``cpu`` asks for that one, ``cuda`` ("12.8") for no newer CUDA build than this.
    """
    ours = _ARCHES.get(arch)
    if ours is None:
        raise RequirementMissing(f"llama.cpp {version}: no archive is made for processors of type {arch or 'unknown'}",
                                 hint="bring a program of your own: engines in agent.yaml")
    if cpu or not cuda_driver:
        return Picked(_cpu_build(assets, version, ours))
    return _cuda_build(assets, version, ours, cuda_driver, compute_capability, cuda)


def _cpu_build(assets: Sequence[Asset], version: str, arch: str) -> Asset:
    for asset in assets:
        match = _CPU.fullmatch(asset.name)
        if match and match.groups() == (version, arch):
            return asset
    raise RequirementMissing(f"llama.cpp {version}: there is no CPU archive for {arch}",
                             hint="name another version, or bring the archive with: ctl mirror import-engine")


def _cuda_build(assets: Sequence[Asset], version: str, arch: str, driver: str,
                capability: Optional[str], newest: str) -> Picked:
    flavours = _flavours(assets, version, arch)
    if not flavours:
        raise RequirementMissing(
            f"llama.cpp {version}: there is no CUDA archive for {arch}, and this node has an NVIDIA GPU",
            hint=f"name {_known_with_cuda(version)}, or take the CPU build with cpu: true under engines:")
    names = {asset.name: asset for asset in assets}
    if newest and not any(cuda <= numbers(newest) for cuda in flavours):
        raise RequirementMissing(f"llama.cpp {version}: it has no build for CUDA {newest} or older, only for "
                                 f"{_spell(sorted(flavours))}", hint="change cuda: under engines:, or leave it out")
    if newest:
        flavours = {cuda: asset for cuda, asset in flavours.items() if cuda <= numbers(newest)}
    old_gpu = bool(capability) and numbers(capability or "") < _FIRST_OF_CUDA_13
    usable = [cuda for cuda in flavours
              if numbers(driver) >= numbers(needed_driver(cuda)) and not (old_gpu and cuda[0] >= 13)]
    if not usable:
        least = min(cuda for cuda in flavours)
        what = (f"compute capability {capability} and driver {driver}" if old_gpu else f"driver {driver}")
        raise RequirementMissing(
            f"llama.cpp {version}: {what} supports none of its CUDA builds ({_spell(sorted(flavours))})",
            hint=f"update the NVIDIA driver to {needed_driver(least)} or newer, or take the CPU build with cpu: true")
    best = max(usable)
    binary = flavours[best]
    return Picked(binary, names.get(f"cudart-{binary.name}") or _no_runtime(version, binary), _spell([best]))


def _flavours(assets: Sequence[Asset], version: str, arch: str) -> Dict[Tuple[int, int], Asset]:
    found = {}
    for asset in assets:
        match = _CUDA.fullmatch(asset.name)
        if match and (match.group(1), match.group(4)) == (version, arch):
            found[int(match.group(2)), int(match.group(3))] = asset
    return found


def _no_runtime(version: str, binary: Asset) -> Asset:
    raise RequirementMissing(f"llama.cpp {version}: {binary.name} has no CUDA runtime beside it, cudart-{binary.name}",
                             hint="bring both archives, or take the CPU build with cpu: true under engines:")


def _known_with_cuda(version: str) -> str:
    build = int(version[1:]) if re.fullmatch(r"b[0-9]{1,9}", version) else 0
    if build >= FIRST_CUDA_BUILD:
        return "another version"
    return f"b{FIRST_CUDA_BUILD} or newer, the first known to have one"


def older_cuda(assets: Sequence[Asset], picked: Picked) -> Tuple[str, ...]:
    """Return the CUDA versions of the same release and processor that are older than the picked one, oldest first."""
    match = _CUDA.fullmatch(picked.binary.name)
    if not match:
        return ()
    flavours = _flavours(assets, match.group(1), match.group(4))
    return tuple(_spell([cuda]) for cuda in sorted(flavours) if cuda < numbers(picked.cuda))


def needed_driver(cuda: Tuple[int, int]) -> str:
    """Return the driver version that supports all of a CUDA version."""
    if cuda in _DRIVERS:
        return _DRIVERS[cuda]
    older = [known for known in _DRIVERS if known < cuda]
    newer = [known for known in _DRIVERS if known > cuda]
    if newer:                 # between two known ones, or before them all: the next is surely enough
        return _DRIVERS[min(newer)]
    return str(numbers(_DRIVERS[max(older)])[0] + 1)


def numbers(version: str) -> Tuple[int, ...]:
    """Return the numbers of a dotted version; versions are never compared as texts."""
    return tuple(int(part) for part in re.findall(r"[0-9]{1,9}", version)[:4]) or (0,)


def _spell(flavours: Sequence[Tuple[int, int]]) -> str:
    return ", ".join(f"{major}.{minor}" for major, minor in flavours)
