"""sha256 digests: the one place that decides what is one, and what path it means."""
from __future__ import annotations

import hashlib
import re
from typing import Iterable, Tuple

from llmgw.domain.errors import ParseError

_SHA256 = re.compile(r"(?:sha256[:-])?([0-9a-f]{64})")


def sha256_hex(text: str) -> str:
    """Return the 64 hex digits of ``HEX``, ``sha256:HEX`` or ``sha256-HEX``; refuse all else.

    ollama CVE-2024-37032: a digest that was never checked became a path.
    """
    match = _SHA256.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ParseError(f"not a sha256 digest: {text!r:.100}")
    return match.group(1)


def blob_path(digest: str) -> str:
    """Return the relative path of a blob; only here does a digest become a path."""
    return f"blobs/sha256/{sha256_hex(digest)}"


def ollama_blob_path(digest: str) -> str:
    """Return the relative path of a blob in Ollama's folder of models."""
    return f"blobs/sha256-{sha256_hex(digest)}"


def fingerprint(files: Iterable[Tuple[str, int, str]]) -> str:
    """Return the digest of a manifest: of its files' names, sizes and sha256, in any order."""
    lines = sorted(f"{sha256_hex(digest)} {size_bytes} {name}\n" for name, size_bytes, digest in files)
    return hashlib.sha256("".join(lines).encode("utf-8")).hexdigest()
