"""/etc/os-release: which system this is. Nothing in it is ever executed."""
from __future__ import annotations

import re
from typing import Dict

from llmgw.domain.node import OsRelease

MAX_LINES = 1000
_LINE = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*)=(.*)")
_ESCAPE = re.compile(r"\\(.)")


def os_release(data: bytes) -> OsRelease:
    """Return what the file says; lines that are not assignments are passed over."""
    values: Dict[str, str] = {}
    for line in data.decode("utf-8", "replace").splitlines()[:MAX_LINES]:
        match = _LINE.fullmatch(line)
        if match:
            values[match.group(1)] = _unquoted(match.group(2).strip())
    return OsRelease(id=values.get("ID", "").lower(),
                     id_like=tuple(values.get("ID_LIKE", "").lower().split()),
                     version_id=values.get("VERSION_ID", ""),
                     pretty_name=values.get("PRETTY_NAME") or values.get("NAME", ""))


def _unquoted(text: str) -> str:
    if len(text) >= 2 and text[0] == text[-1] == "'":
        return text[1:-1]
    if len(text) >= 2 and text[0] == text[-1] == '"':
        text = text[1:-1]
    return _ESCAPE.sub(r"\1", text)
