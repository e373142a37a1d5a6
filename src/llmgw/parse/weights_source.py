"""Where a model's weights come from, as ``weights:`` spells it."""
from __future__ import annotations

import re
from dataclasses import dataclass

from llmgw.domain.errors import ParseError
from llmgw.domain.names import check_name

HINT = "write mirror:NAME, hf:ORG/REPO[@REV][:FILE] or file:/PATH"
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_HUB = re.compile(rf"({_PART}/{_PART})(?:@([A-Za-z0-9][A-Za-z0-9._/-]{{0,199}}))?(?::([^:\x00-\x1f]{{1,400}}))?")


@dataclass(frozen=True)
class HubSource:
    """``hf:ORG/REPO[@REV][:FILE]``; an empty ``file`` is the whole repository or its only GGUF."""

    repo: str
    revision: str = "main"
    file: str = ""


def check(text: str) -> str:
    """Return ``text`` when it names weights in one of the three ways."""
    kind, colon, rest = text.partition(":")
    if kind == "mirror" and colon:
        check_name(rest, "the name in the mirror")
    elif kind == "file" and colon:
        if not rest.startswith("/") or "\x00" in rest:
            raise ParseError(f"file: needs an absolute path, got {rest!r:.100}", hint=HINT)
    elif kind == "hf" and colon:
        hub(text)
    else:
        raise ParseError(f"not a source of weights: {text!r:.100}", hint=HINT)
    return text


def hub(text: str) -> HubSource:
    """Return the parts of a Hugging Face source; no part can climb out of a folder or an address."""
    match = _HUB.fullmatch(text[3:]) if text.startswith("hf:") else None
    parts = [] if match is None else [*(match.group(2) or "").split("/"), *(match.group(3) or "").split("/")]
    if match is None or ".." in text.split("/") or ".." in parts or (match.group(3) or "").startswith("/"):
        raise ParseError(f"not a Hugging Face source: {text!r:.100}", hint="write it as hf:ORG/REPO[@REV][:FILE]")
    return HubSource(match.group(1), match.group(2) or "main", match.group(3) or "")
