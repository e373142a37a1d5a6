"""Names in an archive: which are safe to write below one folder, and which links may be made there."""
from __future__ import annotations

from typing import Tuple

from llmgw.domain.errors import UnsafeArchive

MAX_NAME_BYTES = 1024
MAX_DEPTH = 32


def member_path(name: str) -> Tuple[str, ...]:
    """Return the parts of a member's name; empty for the folder itself. Refuse what climbs or starts at /."""
    parts = _parts(name, "the archive holds")
    if ".." in parts:
        raise UnsafeArchive(f"the archive holds a name that climbs out of its folder: {name!r:.200}")
    if len(parts) > MAX_DEPTH:
        raise UnsafeArchive(f"the archive holds a name of more than {MAX_DEPTH} folders: {name!r:.200}")
    return parts


def link_target(link: Tuple[str, ...], target: str) -> str:
    """Return the target of a symbolic link as it may be written; ``link`` is where it will lie.

    Only leading ``..`` are let through, and no more than there are folders above
    the link. A ``..`` behind a name could pass another link and then climb out,
    however harmless each looks by itself (CVE-2025-4517).
    """
    parts = _parts(target, f"link {'/'.join(link)!r:.200} points to")
    up = 0
    while up < len(parts) and parts[up] == "..":
        up += 1
    if up > len(link) - 1 or ".." in parts[up:]:
        raise UnsafeArchive(f"link {'/'.join(link)!r:.200} points outside the archive: {target!r:.200}")
    return "/".join(parts) or "."


def _parts(name: str, what: str) -> Tuple[str, ...]:
    if not name or "\0" in name or len(name.encode("utf-8", "surrogatepass")) > MAX_NAME_BYTES:
        raise UnsafeArchive(f"{what} a name that cannot be one: {name!r:.200}")
    if name.startswith("/"):
        raise UnsafeArchive(f"{what} an absolute path: {name!r:.200}")
    return tuple(part for part in name.split("/") if part not in ("", "."))
