"""Points in time as text, always UTC and always to the second: a bare date means something else to every program."""
from __future__ import annotations

import datetime
import re

from llmgw.domain.errors import ParseError

DAY_SECONDS = 86400
_FORM = re.compile(r"([0-9]{4}-[0-9]{2}-[0-9]{2})(?:T([0-9]{2}:[0-9]{2}:[0-9]{2})(?:\.[0-9]{1,9})?(?:Z|\+00:00))?")
_EPOCH = datetime.datetime(1970, 1, 1)


def normal(text: str) -> str:
    """Return ``YYYY-MM-DDTHH:MM:SSZ`` of such a text; a bare date is its midnight."""
    match = _FORM.fullmatch(text) if isinstance(text, str) else None
    if match is not None:
        try:
            return spell(_seconds(f"{match.group(1)}T{match.group(2) or '00:00:00'}Z"))
        except ValueError:
            pass
    raise ParseError(f"not a point in time: {text!r:.60}",
                     hint="write it in UTC, as 2026-09-23T05:22:21Z or 2026-09-23")


def seconds(text: str) -> int:
    """Return the seconds since 1970 of a point in time."""
    return _seconds(normal(text))


def spell(since_1970: float) -> str:
    """Return the text of a point in time."""
    return (_EPOCH + datetime.timedelta(seconds=int(since_1970))).strftime("%Y-%m-%dT%H:%M:%SZ")


def later(text: str, by_seconds: int) -> str:
    """Return the point in time so much later."""
    return spell(seconds(text) + by_seconds)


def _seconds(text: str) -> int:
    return int((datetime.datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ") - _EPOCH).total_seconds())
