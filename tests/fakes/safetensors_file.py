"""Write small safetensors files by hand, good ones and bad ones."""
from __future__ import annotations

import json
import struct


def build(tensors, *, data=b"", notes=None, header=None):
    """Return a whole file; ``tensors`` is {name: (dtype, shape, first, end)}."""
    if header is None:
        entries = {} if notes is None else {"__metadata__": notes}
        entries.update({name: {"dtype": dtype, "shape": shape, "data_offsets": [first, end]}
                        for name, (dtype, shape, first, end) in tensors.items()})
        header = json.dumps(entries).encode()
    return struct.pack("<Q", len(header)) + header + data


def model(size=4096):
    """Return a file with one tensor of ``size`` bytes."""
    return build({"weight": ("U8", [size], 0, size)}, data=bytes(range(256)) * (size // 256) + b"x" * (size % 256),
                 notes={"format": "pt"})
