"""A real vision projector for the real gemma-3-270m: the shapes that llama.cpp's clip.cpp asks for, and random weights."""
from __future__ import annotations

import random
import struct
import zlib

from tests.fakes import gguf_file as gguf

WIDTH, INNER, PATCH, SIDE, TEXT_WIDTH = 32, 64, 14, 112, 640      # the last is the text model's
IMAGE_TOKENS = (SIDE // PATCH // 4) ** 2                          # gemma3 takes four by four patches as one


def build():
    """Return the bytes of a GGUF: one layer of a SigLIP, 200 KB."""
    pairs = [gguf.string("general.architecture", "clip"), gguf.string("general.type", "mmproj"),
             gguf.string("general.name", "tiny projector"), gguf.u32("general.file_type", 0),
             gguf.flag("clip.has_vision_encoder", True), gguf.flag("clip.use_gelu", True),
             gguf.string("clip.projector_type", "gemma3"),
             gguf.f32("clip.vision.attention.layer_norm_epsilon", 1e-6),
             gguf.f32s("clip.vision.image_mean", [0.5] * 3), gguf.f32s("clip.vision.image_std", [0.5] * 3)]
    pairs += [gguf.u32(f"clip.vision.{key}", value) for key, value in {
        "image_size": SIDE, "patch_size": PATCH, "embedding_length": WIDTH, "feed_forward_length": INNER,
        "projection_dim": TEXT_WIDTH, "block_count": 1, "attention.head_count": 2}.items()]
    tensors, data, chosen = [], b"", random.Random(1)
    for name, shape in _shapes().items():
        count = 1
        for length in shape:
            count *= length
        tensors.append(gguf.tensor(name, shape, offset=len(data)))
        data += struct.pack(f"<{count}f", *(chosen.uniform(-0.1, 0.1) for _ in range(count)))
        data += b"\0" * (-len(data) % 32)
    return gguf.build(pairs, tensors, data=data)


def _shapes():
    shapes = {"v.patch_embd.weight": [PATCH, PATCH, 3, WIDTH], "v.patch_embd.bias": [WIDTH],
              "v.position_embd.weight": [WIDTH, (SIDE // PATCH) ** 2], "v.post_ln.weight": [WIDTH], "v.post_ln.bias": [WIDTH],
              "mm.input_projection.weight": [TEXT_WIDTH, WIDTH], "mm.soft_emb_norm.weight": [WIDTH],
              "v.blk.0.ffn_up.weight": [WIDTH, INNER], "v.blk.0.ffn_up.bias": [INNER],
              "v.blk.0.ffn_down.weight": [INNER, WIDTH], "v.blk.0.ffn_down.bias": [WIDTH]}
    for part in ("attn_q", "attn_k", "attn_v", "attn_out", "ln1", "ln2"):
        shapes[f"v.blk.0.{part}.weight"] = [WIDTH, WIDTH] if part.startswith("attn") else [WIDTH]
        shapes[f"v.blk.0.{part}.bias"] = [WIDTH]
    return shapes


def red_square():
    """Return the bytes of a PNG."""
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    rows = b"".join(b"\0" + b"\xff\0\0" * 32 for _ in range(32))
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 32, 32, 8, 2, 0, 0, 0)) +
            chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))
