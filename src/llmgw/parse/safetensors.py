"""The header of a safetensors file: that it is one, whole, and what it holds.

The format is eight bytes of length, a JSON object, and the tensors' bytes without gap or overlap.
Nothing is believed: lengths and offsets are held against caps and against the file's own size.
"""
from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, NoReturn, Optional, Tuple

from llmgw.domain.errors import ParseError

ReadAt = Callable[[int, int], bytes]

MAX_HEADER_BYTES = 32 << 20       # as JSON it takes about ten times this; large models are split into files
MAX_TENSORS = 1_000_000
MAX_DIMENSIONS = 64
MAX_SIZE = 1 << 60
_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
         "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
         "C64": 64, "F64": 64, "I64": 64, "U64": 64}
_CUT = "the file is cut off, or not what its name says: fetch or copy it again"


@dataclass(frozen=True)
class SafetensorsHeader:
    """What a file holds, as its header says."""

    tensor_count: int
    parameters: int
    dtypes: Tuple[str, ...]


def read_header(read_at: ReadAt, size: int, name: str = "file") -> SafetensorsHeader:
    """Return the header of the safetensors file of ``size`` bytes; ParseError for anything that cannot be one.

    ``read_at(offset, count)`` gives ``count`` bytes, fewer only at the file's end.
    """
    reader = _Reader(name)
    if size < 10:
        reader.fail(f"it has {size} bytes", _CUT)
    length = int.from_bytes(reader.whole(read_at, 0, 8), "little")
    if length > size - 8:
        reader.fail(f"its header claims {length} bytes, the file has {size}", _CUT)
    if length > MAX_HEADER_BYTES:
        reader.fail(f"a header of {length} bytes, at most {MAX_HEADER_BYTES} are read")
    return _header(reader, reader.json(reader.whole(read_at, 8, length)), size - 8 - length)


class _Reader:
    def __init__(self, name: str) -> None:
        self._name = name

    def fail(self, what: str, hint: Optional[str] = None) -> NoReturn:
        raise ParseError(f"{self._name[-200:]}: not a usable safetensors file: {what}", hint=hint)

    def whole(self, read_at: ReadAt, offset: int, count: int) -> bytes:
        data = read_at(offset, count)
        if len(data) != count:
            self.fail(f"it ended at byte {offset + len(data)} while it was read", _CUT)
        return data

    def json(self, data: bytes) -> Dict[str, Any]:
        """Return the object in ``data``; a key that stands there twice is refused."""
        if data[:1] != b"{":
            self.fail(f"its header starts with {data[:8]!r}", _CUT)
        try:
            found = json.loads(data.decode("utf-8"), object_pairs_hook=self._distinct, parse_constant=self._constant)
        except (ValueError, RecursionError):
            self.fail("its header is not JSON", _CUT)
        assert isinstance(found, dict)
        return found

    def _distinct(self, pairs: List[Tuple[str, Any]]) -> Dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            self.fail("its header names something twice")
        return found

    def _constant(self, text: str) -> NoReturn:
        self.fail(f"its header holds {text}")


def _header(reader: _Reader, found: Dict[str, Any], data_bytes: int) -> SafetensorsHeader:
    notes = found.pop("__metadata__", {})
    if not isinstance(notes, dict) or not all(isinstance(value, str) for value in notes.values()):
        reader.fail("its notes are not texts")
    if len(found) > MAX_TENSORS:
        reader.fail(f"it claims {len(found)} tensors, at most {MAX_TENSORS} are believed")
    spans, parameters, dtypes = [], 0, set()
    for key, entry in found.items():
        dtype, count, span = _tensor(reader, key, entry)
        parameters += count
        dtypes.add(dtype)
        spans.append(span)
    _check_spans(reader, spans, data_bytes)
    return SafetensorsHeader(len(found), parameters, tuple(sorted(dtypes)))


def _tensor(reader: _Reader, key: str, entry: Any) -> Tuple[str, int, Tuple[int, int]]:
    if not isinstance(entry, dict):
        reader.fail(f"the tensor {key!r:.100} is no object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or len(dtype) > 20:
        reader.fail(f"the tensor {key!r:.100} has no type")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(map(_is_size, shape)):
        reader.fail(f"the tensor {key!r:.100} has no shape")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        reader.fail(f"the tensor {key!r:.100} has no place")
    count = 1
    for dimension in shape:
        count *= dimension
        if count > MAX_SIZE:
            reader.fail(f"the tensor {key!r:.100} is too large to be true")
    bits = _BITS.get(dtype)           # of a type newer than this reader only the place is checked
    if offsets[0] > offsets[1] or (bits is not None and count * bits != (offsets[1] - offsets[0]) * 8):
        reader.fail(f"the tensor {key!r:.100} does not fill its place")
    return dtype, count, (offsets[0], offsets[1])


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_SIZE


def _check_spans(reader: _Reader, spans: List[Tuple[int, int]], data_bytes: int) -> None:
    at = 0
    for first, end in sorted(spans):
        if first != at:
            reader.fail(f"its tensors leave out, or share, the bytes at {min(first, at)}")
        at = end
    if at != data_bytes:
        reader.fail(f"its tensors end at byte {at} of {data_bytes}", _CUT)
