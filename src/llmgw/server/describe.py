"""What the files of a model say of themselves: its KV cache, its context, its projector, whether it is all there."""
from __future__ import annotations

import os
from dataclasses import replace
from typing import BinaryIO, Callable, Dict

from llmgw.domain.errors import ParseError
from llmgw.domain.model import Weights, WeightsFile
from llmgw.parse import gguf, safetensors
from llmgw.parse.gguf import GgufHeader, ReadAt

RAW = "raw"


def describe(weights: Weights, open_blob: Callable[[str], BinaryIO]) -> Weights:
    """Return ``weights`` with what the headers of its files tell; refuse what is damaged or incomplete.

    Weights of the format raw are taken as they are.
    """
    if weights.format == RAW:
        return weights
    headers: Dict[str, GgufHeader] = {}
    for file in weights.files:
        if file.name.endswith((".gguf", ".safetensors")):
            with open_blob(file.sha256) as source:
                _read(file, _reader(source), headers)
    if not headers:
        return weights
    projectors = sorted(name for name, header in headers.items() if header.is_projector)
    models = sorted(set(headers) - set(projectors))
    if not models:
        raise ParseError(f"model {weights.name}: {projectors[0]} is a projector, and there is no model beside it",
                         hint="import the model's GGUF together with it")
    if len(projectors) > 1:
        raise ParseError(f"model {weights.name}: it has {len(projectors)} projectors: {', '.join(projectors):.300}",
                         hint="import one of them only, mostly the F16 one")
    first = headers[models[0]]
    if first.split_count != len(models):
        raise ParseError(f"model {weights.name}: {models[0]} is one of {first.split_count} parts, "
                         f"and there are {len(models)} GGUF files",
                         hint="bring all parts of one model, called ...-00001-of-0000N.gguf, and no other model")
    return replace(weights, format="gguf", kv_bytes_per_token=first.kv_bytes_per_token,
                   context_train=first.context_length, projector=projectors[0] if projectors else "")


def _read(file: WeightsFile, read_at: ReadAt, headers: Dict[str, GgufHeader]) -> None:
    if file.name.endswith(".gguf"):
        headers[file.name] = gguf.read_header(read_at, file.size_bytes, file.name)
    else:
        safetensors.read_header(read_at, file.size_bytes, file.name)


def _reader(source: BinaryIO) -> ReadAt:
    def read_at(offset: int, count: int) -> bytes:
        return os.pread(source.fileno(), count, offset)
    return read_at
