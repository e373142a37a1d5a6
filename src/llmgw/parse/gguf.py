"""The header of a GGUF file: what a model is and what its KV cache costs.

Nothing in the file is believed: every count, length and offset is held against caps and
against the file's own size before it is used (CVE-2026-7482, CVE-2026-27940). Only the
header is read, through ``read_at``; arrays that are not needed are stepped over.
"""
from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Callable, Dict, List, NoReturn, Optional, Tuple, Union

from llmgw.domain.errors import ParseError

ReadAt = Callable[[int, int], bytes]

MAX_KEYS = 65_536
MAX_TENSORS = 1_000_000
MAX_STRING_BYTES = 64 << 20
MAX_HEADER_BYTES = 128 << 20
MAX_DIMENSIONS = 4
MAX_KEPT_TEXT = 512       # longer texts (chat templates, licences) are stepped over
MAX_KEPT_ITEMS = 4096     # of an array of numbers: one per layer, at most
MAX_LAYERS = 4096
MAX_NESTING = 4
_PIECE = 1 << 18

_U8, _I8, _U16, _I16, _U32, _I32, _F32, _BOOL, _STRING, _ARRAY, _U64, _I64, _F64 = range(13)
_FORMATS = {_U8: "B", _I8: "b", _U16: "H", _I16: "h", _U32: "I", _I32: "i", _F32: "f", _BOOL: "?",
            _U64: "Q", _I64: "q", _F64: "d"}
_SIZES = {kind: struct.calcsize("<" + letter) for kind, letter in _FORMATS.items()}

# ggml type: (values per block, bytes per block); ggml.c type_traits. Types that were removed are absent.
_BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 36),
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292),
    16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82),
    23: (256, 136), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2),
    34: (256, 54), 35: (256, 66), 39: (32, 17),
}

Value = Union[int, float, bool, str, Tuple[int, ...]]


@dataclass(frozen=True)
class GgufHeader:
    """What llmgw wants to know of a GGUF file. None: the file does not say."""

    version: int
    architecture: str
    kind: str = ""                             # model, mmproj, adapter ...; often empty
    name: str = ""
    file_type: Optional[int] = None
    block_count: Optional[int] = None
    context_length: Optional[int] = None
    kv_bytes_per_token: Optional[int] = None   # K and V as f16, every layer: an upper bound for sliding windows
    split_number: int = 0
    split_count: int = 1
    has_chat_template: bool = False
    tensor_count: int = 0
    size_bytes: int = 0                        # where the last tensor ends, as the header says

    @property
    def is_projector(self) -> bool:
        """Whether it is what a vision model sees with, and no model itself."""
        return self.architecture == "clip" or self.kind == "mmproj"


def read_header(read_at: ReadAt, size: int, name: str = "file") -> GgufHeader:
    """Return the header of the GGUF file of ``size`` bytes; ParseError for anything that cannot be one.

    ``read_at(offset, count)`` gives ``count`` bytes, fewer only at the file's end.
    """
    cursor = _Cursor(read_at, size, name)
    version = _magic(cursor)
    tensors = cursor.count(MAX_TENSORS, "tensors")
    keys = cursor.count(MAX_KEYS, "keys")
    values, lengths = _key_values(cursor, keys)
    end = _tensor_end(cursor, tensors, values)
    if end > size:
        cursor.fail(f"a tensor ends at byte {end}, the file has {size}",
                    "the file is cut off: fetch or copy it again")
    return _header(cursor, version, tensors, values, lengths, end)


def is_gguf(start: bytes) -> bool:
    """Whether a file that starts so means to be GGUF."""
    return start[:4] == b"GGUF"


class _Cursor:
    """Reads forward, buffered; refuses to pass the file's end or the header cap."""

    def __init__(self, read_at: ReadAt, size: int, name: str) -> None:
        self._read_at, self.size, self._name = read_at, size, name
        self.at = 0
        self._buffer, self._buffer_at = b"", 0

    def fail(self, what: str, hint: Optional[str] = None) -> NoReturn:
        raise ParseError(f"{self._name[-200:]}: not a usable GGUF file: {what}", hint=hint)

    def need(self, count: int) -> None:
        """Refuse unless ``count`` more bytes are there."""
        if count > self.size - self.at:
            self.fail(f"its header ends early at byte {self.size}", "the file is cut off: fetch or copy it again")
        if self.at + count > MAX_HEADER_BYTES:
            self.fail(f"a header of more than {MAX_HEADER_BYTES} bytes")

    def take(self, count: int) -> bytes:
        self.need(count)
        start = self.at - self._buffer_at
        if start < 0 or start + count > len(self._buffer):
            self._buffer_at = self.at
            self._buffer = self._read_at(self.at, min(max(count, _PIECE), self.size - self.at))
            start = 0
            if len(self._buffer) < count:
                self.fail(f"it ended at byte {self.at + len(self._buffer)} while it was read")
        self.at += count
        return self._buffer[start:start + count]

    def skip(self, count: int) -> None:
        self.need(count)
        self.at += count

    def number(self, kind: int) -> Union[int, float, bool]:
        value: Union[int, float, bool] = struct.unpack(
            "<" + _FORMATS[kind], self.take(_SIZES[kind]))[0] if kind != _BOOL else self.take(1) != b"\x00"
        return value

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def u64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def count(self, cap: int, what: str) -> int:
        found = self.u64()
        if found > cap:
            self.fail(f"it claims {found} {what}, at most {cap} are believed")
        return found

    def text(self, keep: int) -> Tuple[Optional[str], int]:
        """Return a string (None when longer than ``keep``) and its length."""
        length = self.count(MAX_STRING_BYTES, "bytes in a string")
        if length > keep:
            self.skip(length)
            return None, length
        return self.take(length).decode("utf-8", "replace"), length


def _magic(cursor: _Cursor) -> int:
    if cursor.size < 24 or not is_gguf(cursor.take(4)):
        cursor.fail("it does not start with GGUF" if cursor.size >= 24 else f"it has {cursor.size} bytes",
                    "give a model file in GGUF format")
    version = cursor.u32()
    if version in (2 << 24, 3 << 24):
        cursor.fail("it is big-endian", "convert the model for little-endian machines")
    if version not in (2, 3):
        cursor.fail(f"version {version} is unknown; 2 and 3 are known", "convert the model anew")
    return version


def _key_values(cursor: _Cursor, keys: int) -> Tuple[Dict[str, Value], Dict[str, int]]:
    """Return the scalar values and short arrays by key, and the lengths of the texts."""
    values: Dict[str, Value] = {}
    lengths: Dict[str, int] = {}
    for _ in range(keys):
        key, length = cursor.text(MAX_KEPT_TEXT)
        if not key or length > 65_535:
            cursor.fail(f"a key of {length} bytes")
        if key in lengths:
            cursor.fail(f"the key {key!r:.100} stands there twice")
        lengths[key] = 0
        kind = cursor.u32()
        if kind == _STRING:
            text, lengths[key] = cursor.text(MAX_KEPT_TEXT)
            if text is not None:
                values[key] = text
        elif kind == _ARRAY:
            items = _array(cursor, 1, key.endswith(".head_count_kv"))
            if items is not None:
                values[key] = items
        elif kind in _FORMATS:
            values[key] = cursor.number(kind)
        else:
            cursor.fail(f"the key {key!r:.100} has the unknown type {kind}")
    return values, lengths


def _array(cursor: _Cursor, depth: int, keep: bool) -> Optional[Tuple[int, ...]]:
    """Step over an array; return its numbers when asked to, and they are few and whole."""
    kind = cursor.u32()
    count = cursor.u64()
    if kind in _FORMATS:
        if not keep or count > MAX_KEPT_ITEMS or kind in (_F32, _F64):
            cursor.skip(count * _SIZES[kind])
            return None
        return tuple(int(cursor.number(kind)) for _ in range(count))
    if kind not in (_STRING, _ARRAY):
        cursor.fail(f"an array of the unknown type {kind}")
    smallest = 8 if kind == _STRING else 12
    cursor.need(count * smallest)
    if kind == _ARRAY and depth >= MAX_NESTING:
        cursor.fail(f"arrays nested more than {MAX_NESTING} deep")
    for _ in range(count):
        if kind == _STRING:
            cursor.text(0)
        else:
            _array(cursor, depth + 1, False)
    return None


def _tensor_end(cursor: _Cursor, tensors: int, values: Dict[str, Value]) -> int:
    """Return where the last tensor's bytes end, counted from the start of the file."""
    alignment = values.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        cursor.fail(f"its alignment is {alignment!r:.40}")
    ends: List[int] = [0]
    for index in range(tensors):
        cursor.text(0)
        dimensions = cursor.u32()
        if dimensions > MAX_DIMENSIONS:
            cursor.fail(f"tensor {index} has {dimensions} dimensions")
        count = 1
        for _ in range(dimensions):
            count *= cursor.u64()
        if count > 1 << 62:
            cursor.fail(f"tensor {index} has {count:.3e} values")
        ends.append(_end(cursor, index, cursor.u32(), cursor.u64(), count, alignment))
    data = -(-cursor.at // alignment) * alignment
    return data + max(ends) if tensors else cursor.at


def _end(cursor: _Cursor, index: int, kind: int, offset: int, count: int, alignment: int) -> int:
    if offset % alignment:
        cursor.fail(f"tensor {index} is not aligned")
    if kind not in _BLOCKS:
        return offset         # a quantization newer than this reader: its engine knows the size
    values, size = _BLOCKS[kind]
    if count % values:
        cursor.fail(f"tensor {index} does not fill its blocks")
    return offset + count // values * size


def _header(cursor: _Cursor, version: int, tensors: int, values: Dict[str, Value], lengths: Dict[str, int],
            end: int) -> GgufHeader:
    architecture = values.get("general.architecture", "")
    if not isinstance(architecture, str) or not architecture or len(architecture) > 64:
        cursor.fail("it names no architecture")
    blocks = _whole(values, f"{architecture}.block_count", MAX_LAYERS)
    name, sort = values.get("general.name", ""), values.get("general.type", "")
    return GgufHeader(
        version=version, architecture=architecture, kind=sort if isinstance(sort, str) else "",
        name=name if isinstance(name, str) else "",
        file_type=_whole(values, "general.file_type", 1 << 16), block_count=blocks,
        context_length=_whole(values, f"{architecture}.context_length", 1 << 31) or None,
        kv_bytes_per_token=_kv_bytes(values, architecture, blocks),
        split_number=_whole(values, "split.no", 1 << 16) or 0,
        split_count=_whole(values, "split.count", 1 << 16) or 1,
        has_chat_template=lengths.get("tokenizer.chat_template", 0) > 0,
        tensor_count=tensors, size_bytes=end)


def _kv_bytes(values: Dict[str, Value], architecture: str, blocks: Optional[int]) -> Optional[int]:
    """Return bytes of K and V per token in f16; None when the header does not tell.

    head_count_kv may be one number or one per layer. A layer with a sliding window keeps
    less than this, so that the result is an upper bound there.
    """
    heads = _whole(values, f"{architecture}.attention.head_count", 1 << 16)
    width = _whole(values, f"{architecture}.embedding_length", 1 << 24)
    rank = _whole(values, f"{architecture}.attention.kv_lora_rank", 1 << 16)
    rope = _whole(values, f"{architecture}.rope.dimension_count", 1 << 16)
    if blocks and rank and rope is not None:
        return 2 * blocks * (rank + rope)      # multi-head latent attention: one compressed row
    key = _whole(values, f"{architecture}.attention.key_length", 1 << 16)
    value = _whole(values, f"{architecture}.attention.value_length", 1 << 16)
    if (key is None or value is None) and heads and width:
        key = width // heads if key is None else key
        value = width // heads if value is None else value
    total = _kv_heads(values, architecture, blocks, heads)
    if total is None or key is None or value is None:
        return None
    return 2 * total * (key + value)


def _kv_heads(values: Dict[str, Value], architecture: str, blocks: Optional[int],
              heads: Optional[int]) -> Optional[int]:
    """Return the KV heads of all layers together."""
    found = values.get(f"{architecture}.attention.head_count_kv")
    if isinstance(found, tuple):
        usable = blocks is not None and 0 < len(found) <= MAX_LAYERS and all(0 <= item <= 1 << 16 for item in found)
        return sum(found) if usable else None
    per_layer = _whole(values, f"{architecture}.attention.head_count_kv", 1 << 16)
    per_layer = heads if per_layer is None else per_layer
    if not blocks or per_layer is None:
        return None
    return blocks * per_layer


def _whole(values: Dict[str, Value], key: str, high: int) -> Optional[int]:
    """Return a whole number in bounds; None when absent, of another type, or beyond belief."""
    found = values.get(key)
    if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found <= high:
        return None
    return found
