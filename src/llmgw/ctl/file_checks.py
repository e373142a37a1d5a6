"""Look at model files before a byte is sent: are they what they claim, all of it, and no program?"""
from __future__ import annotations

import json
import os
import re
from typing import BinaryIO, Dict, Iterable, List, Sequence, Tuple

from llmgw.domain.errors import ParseError, UsageError
from llmgw.parse import gguf, safetensors
from llmgw.parse.gguf import GgufHeader, ReadAt
from llmgw.system import files

GGUF, SAFETENSORS, RAW = "gguf", "safetensors", "raw"
INDEX = "model.safetensors.index.json"
MAX_INDEX_BYTES = 64 << 20
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.(gguf|safetensors)")
_PICKLE_NAMES = re.compile(r".*\.(pt|pth|pkl|pickle|ckpt|joblib)|(pytorch_)?model.*\.bin", re.IGNORECASE)
Named = Tuple[str, str]           # (path here, name in the mirror)


def format_of(sources: Sequence[Named]) -> str:
    """Return gguf, safetensors or raw; refuse files that are damaged, or not all of a model."""
    headers: Dict[str, GgufHeader] = {}
    kinds = set()
    for path, name in sources:
        if name.lower().endswith(".gguf"):
            headers[name] = _gguf(path)
            kinds.add(GGUF)
        elif name.lower().endswith(".safetensors"):
            _safetensors(path)
            kinds.add(SAFETENSORS)
    if GGUF in kinds:
        _check_ggufs(headers)
        return GGUF
    if SAFETENSORS in kinds:
        _check_folder(sources)
        return SAFETENSORS
    return RAW


def _check_ggufs(headers: Dict[str, GgufHeader]) -> None:
    """Refuse parts without the others, and what is only a projector."""
    models = sorted(name for name, header in headers.items() if not header.is_projector)
    if not models:
        raise UsageError(f"{', '.join(headers)}: a projector, and no model beside it",
                         hint="name the model's GGUF and its projector together")
    count = headers[models[0]].split_count
    if count != len(models):
        raise UsageError(f"{models[0]}: one of {count} parts, and {len(models)} GGUF files are named",
                         hint="name all parts of one model, or their folder")


def _check_folder(sources: Sequence[Named]) -> None:
    """Refuse safetensors without their configuration, or with a file missing that their index names."""
    paths = {name: path for path, name in sources}
    if "config.json" not in paths:
        raise UsageError("safetensors without their config.json",
                         hint="name the whole folder of the model, or take the files as they are with --raw")
    if INDEX in paths:
        missing = sorted(set(_indexed(paths[INDEX])) - set(paths))
        if missing:
            raise UsageError(f"{INDEX} names {missing[0]:.100}, which is not there",
                             hint="fetch the rest of the model first")


def _indexed(path: str) -> List[str]:
    data = files.read_bytes(path, MAX_INDEX_BYTES)
    try:
        return [str(name) for name in json.loads(data or b"")["weight_map"].values()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ParseError(f"{path}: not an index of safetensors files") from None


def check_split(names: Iterable[str]) -> None:
    """Refuse a split model of which a part is not named."""
    known = set(names)
    for match in filter(None, map(_PART.fullmatch, sorted(known))):
        stem, total, kind = match.group(1), int(match.group(3)), match.group(4)
        missing = next((part for part in (f"{stem}-{at:05d}-of-{total:05d}.{kind}" for at in range(1, total + 1))
                        if part not in known), None)
        if missing is not None:
            raise UsageError(f"{match.group(0)}: part of a split model, and {missing} is not named",
                             hint="name all its parts, or their folder")


def _gguf(path: str) -> GgufHeader:
    with files.storing("read", path), open(path, "rb") as source:
        start = source.read(4)
        if not gguf.is_gguf(start):
            raise ParseError(f"{path}: not a GGUF file: it starts with {start!r}",
                             hint="download it again; a web page or a Git LFS pointer looks like this")
        return gguf.read_header(_reader(source), os.path.getsize(path), path)


def _safetensors(path: str) -> None:
    with files.storing("read", path), open(path, "rb") as source:
        safetensors.read_header(_reader(source), os.path.getsize(path), path)


def _reader(source: BinaryIO) -> ReadAt:
    def read_at(offset: int, count: int) -> bytes:
        source.seek(offset)
        return source.read(count)
    return read_at


def refuse_pickle(path: str) -> None:
    """Refuse Python pickles: loading one runs whatever its author wrote."""
    with files.storing("read", path), open(path, "rb") as source:
        head = source.read(256)
    zipped = head.startswith(b"PK\x03\x04") and b"data.pkl" in head
    protocol = len(head) > 1 and head[0] == 0x80 and 2 <= head[1] <= 5
    if zipped or protocol or _PICKLE_NAMES.fullmatch(os.path.basename(path)):
        raise ParseError(f"{path}: a Python pickle, which can run any code when it is loaded",
                         hint="take the model's safetensors or GGUF files, or insist with --allow-pickle")
