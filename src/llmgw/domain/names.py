"""Which names people may give to clusters, nodes and models."""
from __future__ import annotations

import re

from llmgw.domain.errors import ParseError

NAME_RULE = "letters, digits and . _ : / - , not starting with - . or /, at most 200"
_NAME = re.compile(r"[A-Za-z0-9_:][A-Za-z0-9._:/-]{0,199}")


def check_name(text: str, what: str = "name") -> str:
    """Return ``text`` when it is a name: no name can become a flag, or climb out of a folder."""
    if not isinstance(text, str) or not _NAME.fullmatch(text) or ".." in text.split("/"):
        raise ParseError(f"{what} {text!r:.100} is not allowed", hint=f"use {NAME_RULE}")
    return text


def file_name(name: str) -> str:
    """Return a flat file name for ``name``, distinct for distinct names."""
    return name.replace("_", "__").replace("/", "_s").replace(":", "_c")
