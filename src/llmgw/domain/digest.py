"""sha256 digests: the one place that decides what is one, and what path it means."""
from __future__ import annotations

import re

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
    """Return the relative path of a blob; the only function that turns a digest into a path."""
    return f"blobs/sha256/{sha256_hex(digest)}"
