"""What Hugging Face says of a repository: its commit, its files, and which of them a source means."""
from __future__ import annotations

import fnmatch
import json
import re
from dataclasses import dataclass
from typing import Any, Optional, Sequence, Tuple

from llmgw.domain.digest import sha256_hex
from llmgw.domain.errors import NotFound, ParseError
from llmgw.parse.weights_source import HubSource

MAX_BYTES = 32 << 20
MAX_SMALL_BYTES = 64 << 20    # of a file that git itself holds
MAX_FILES = 1000              # of one model
_COMMIT = re.compile(r"[0-9a-f]{40}")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,199}")
_SPLIT = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf")
_NEXT = re.compile(r'<([^<>\s]{1,2000})>\s*;\s*rel="next"')
_SNAPSHOT = (".safetensors", ".json", ".jinja", ".model", ".txt", ".tiktoken", ".py")


@dataclass(frozen=True)
class HubFile:
    """A file at a commit. ``sha256`` is known for large files, ``git_oid`` for the others."""

    path: str
    size_bytes: int
    sha256: str = ""
    git_oid: str = ""

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


def commit(data: bytes, repo: str) -> str:
    """Return the commit that a revision means."""
    found = _json(data, repo)
    sha = found.get("sha") if isinstance(found, dict) else None
    if not isinstance(sha, str) or not _COMMIT.fullmatch(sha):
        raise ParseError(f"hf:{repo}: the answer names no commit")
    return sha


def files(data: bytes, repo: str) -> Tuple[HubFile, ...]:
    """Return the files of one page of a tree; one with a name that is no plain name is left out."""
    found = _json(data, repo)
    if not isinstance(found, list):
        raise ParseError(f"hf:{repo}: the answer is not a list of files")
    listed = [_file(entry, repo) for entry in found]
    return tuple(file for file in listed if file is not None)


def next_page(link: str) -> str:
    """Return the address of the next page in a Link header, empty when there is none."""
    match = _NEXT.search(link[:8192])
    return match.group(1) if match else ""


def choose(listed: Sequence[HubFile], source: HubSource) -> Tuple[Tuple[HubFile, ...], str]:
    """Return the files that ``source`` means and their format: gguf or safetensors."""
    ggufs = sorted((file for file in listed if file.path.lower().endswith(".gguf")), key=lambda file: file.path)
    if is_glob(source.file):
        return _matching(listed, source)
    if source.file:
        return _named(listed, ggufs, source), "gguf" if source.file.lower().endswith(".gguf") else "raw"
    whole = [file for file in ggufs if "mmproj" not in file.name.lower()]
    if len(whole) == 1:
        return (whole[0],), "gguf"
    if len({_stem(file.path) for file in whole}) == 1:
        return _parts(whole, whole[0], source), "gguf"
    if whole:
        raise NotFound(f"hf:{source.repo} holds {len(whole)} GGUF files: {_choices(whole)}",
                       hint=f"name one: hf:{source.repo}:{whole[0].path}")
    return _snapshot(listed, source), "safetensors"


def is_glob(text: str) -> bool:
    """Whether a source's file stands for several."""
    return any(mark in text for mark in "*?[")


def _matching(listed: Sequence[HubFile], source: HubSource) -> Tuple[Tuple[HubFile, ...], str]:
    chosen = sorted((file for file in listed if fnmatch.fnmatchcase(file.path, source.file)),
                    key=lambda file: file.path)
    if not chosen:
        raise NotFound(f"hf:{source.repo} has no file like {source.file!r:.200}; it has: {_choices(listed)}",
                       hint="check how it is spelled")
    if len(chosen) > MAX_FILES:
        raise ParseError(f"hf:{source.repo}: a model of {len(chosen)} files")
    kinds = {file.name.lower().rpartition(".")[2] for file in chosen}
    return tuple(chosen), "gguf" if "gguf" in kinds else "safetensors" if "safetensors" in kinds else "raw"


def _named(listed: Sequence[HubFile], ggufs: Sequence[HubFile], source: HubSource) -> Tuple[HubFile, ...]:
    for file in listed:
        if file.path == source.file:
            return _parts(ggufs, file, source) if _SPLIT.fullmatch(file.path) else (file,)
    raise NotFound(f"hf:{source.repo} has no file {source.file!r:.200}; it has: {_choices(ggufs or listed)}",
                   hint="check how it is spelled")


def _parts(ggufs: Sequence[HubFile], first: HubFile, source: HubSource) -> Tuple[HubFile, ...]:
    """Return every part of the split model that ``first`` belongs to, in order."""
    match = _SPLIT.fullmatch(first.path)
    assert match is not None
    count = int(match.group(3))
    parts = [file for file in ggufs if _stem(file.path) == _stem(first.path)]
    wanted = [f"{match.group(1)}-{number:05d}-of-{count:05d}.gguf" for number in range(1, min(count, MAX_FILES) + 1)]
    if [file.path for file in parts] != wanted:
        raise NotFound(f"hf:{source.repo} holds {len(parts)} of the {count} parts of {first.name:.200}",
                       hint="choose another file, or wait until all parts are there")
    return tuple(parts)


def _stem(path: str) -> str:
    match = _SPLIT.fullmatch(path)
    return f"{match.group(1)}/of-{match.group(3)}" if match else path


def _snapshot(listed: Sequence[HubFile], source: HubSource) -> Tuple[HubFile, ...]:
    """Return what an engine loads of a repository in Hugging Face's own layout."""
    chosen = [file for file in listed if "/" not in file.path and file.name.endswith(_SNAPSHOT)]
    names = {file.name for file in chosen}
    if "config.json" not in names or not any(name.endswith(".safetensors") for name in names):
        raise NotFound(f"hf:{source.repo} holds no GGUF file, and no config.json with safetensors",
                       hint="choose a repository with one of them")
    if len(chosen) > MAX_FILES:
        raise ParseError(f"hf:{source.repo}: a model of {len(chosen)} files")
    return tuple(sorted(chosen, key=lambda file: file.path))


def _choices(listed: Sequence[HubFile]) -> str:
    shown = ", ".join(file.path for file in listed[:20])
    return f"{shown:.1500}{', ...' if len(listed) > 20 else ''}" or "nothing"


def _file(entry: Any, repo: str) -> Optional[HubFile]:
    if not isinstance(entry, dict):
        raise ParseError(f"hf:{repo}: an entry of its file list is {type(entry).__name__}")
    path, size = entry.get("path"), entry.get("size")
    if entry.get("type") != "file" or not isinstance(path, str):
        return None
    if len(path) > 500 or not all(_NAME.fullmatch(part) for part in path.split("/")):
        return None
    lfs = entry.get("lfs")
    if lfs is not None:
        if not isinstance(lfs, dict):
            raise ParseError(f"hf:{repo}: {path} has no digest")
        return HubFile(path, _size(lfs.get("size"), path, repo), sha256=sha256_hex(lfs.get("oid") or ""))
    oid = entry.get("oid")
    if not isinstance(oid, str) or not _COMMIT.fullmatch(oid):
        raise ParseError(f"hf:{repo}: {path} has no digest")
    return HubFile(path, _size(size, path, repo), git_oid=oid)


def _size(size: Any, path: str, repo: str) -> int:
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < 1 << 45:
        raise ParseError(f"hf:{repo}: {path} has the size {size!r:.40}")
    return size


def _json(data: bytes, repo: str) -> Any:
    if len(data) > MAX_BYTES:
        raise ParseError(f"hf:{repo}: an answer of {len(data)} bytes")
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise ParseError(f"hf:{repo}: the answer is not JSON") from None
