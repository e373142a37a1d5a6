"""Write small GGUF files by hand, good ones and bad ones, with nothing but struct."""
from __future__ import annotations

import struct

U32, STRING, ARRAY, U64, F32, BOOL = 4, 8, 9, 10, 6, 7


def text(value):
    data = value.encode("utf-8") if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def u32(key, value):
    return text(key) + struct.pack("<II", U32, value)


def f32(key, value):
    return text(key) + struct.pack("<If", F32, value)


def f32s(key, values):
    return text(key) + struct.pack("<IIQ", ARRAY, F32, len(values)) + struct.pack(f"<{len(values)}f", *values)


def flag(key, value):
    return text(key) + struct.pack("<IB", BOOL, value)


def string(key, value):
    return text(key) + struct.pack("<I", STRING) + text(value)


def strings(key, values):
    return text(key) + struct.pack("<IIQ", ARRAY, STRING, len(values)) + b"".join(text(item) for item in values)


def u32s(key, values):
    return text(key) + struct.pack("<IIQ", ARRAY, U32, len(values)) + struct.pack(f"<{len(values)}I", *values)


def tensor(name, dimensions, kind=0, offset=0):
    return text(name) + struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, kind, offset)


def build(pairs, tensors=(), *, version=3, data=b"", tensor_count=None, key_count=None, magic=b"GGUF", align=32):
    """Return a whole file: header, padding, tensor data."""
    head = magic + struct.pack("<IQQ", version, len(tensors) if tensor_count is None else tensor_count,
                               len(pairs) if key_count is None else key_count)
    head += b"".join(pairs) + b"".join(tensors)
    return head + b"\0" * (-len(head) % align) + data if data else head


def llama(*extra, layers=2, heads=4, kv_heads=2, width=64, context=2048):
    """Return the keys of a small llama."""
    kv = u32s("llama.attention.head_count_kv", kv_heads) if isinstance(kv_heads, list) else u32(
        "llama.attention.head_count_kv", kv_heads)
    return [string("general.architecture", "llama"), string("general.name", "tiny"), u32("general.file_type", 0),
            u32("llama.block_count", layers), u32("llama.context_length", context),
            u32("llama.embedding_length", width), u32("llama.attention.head_count", heads), kv, *extra]


def small_model():
    """Return the bytes of a file of about 4 KB with every shape of key in its header."""
    pairs = llama(strings("tokenizer.ggml.tokens", [f"<0x{code:02X}>" for code in range(256)]),
                  u32s("tokenizer.ggml.token_type", list(range(64))),
                  string("tokenizer.chat_template", "{{ messages }}"),
                  f32("llama.rope.scale", 1.5), flag("tokenizer.add_bos", True),
                  text("nested") + struct.pack("<IIQIQQ", ARRAY, ARRAY, 1, U64, 1, 7))
    return build(pairs, [tensor("a", [8, 2]), tensor("b", [32], kind=8, offset=64)], data=b"\x01" * 98)
