"""Points in time."""
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.domain.errors import ParseError
from llmgw.parse import utc


@pytest.mark.parametrize("text, normal", [
    ("2026-09-23T05:22:21Z", "2026-09-23T05:22:21Z"), ("2026-09-23", "2026-09-23T00:00:00Z"),
    ("2026-09-23T05:22:21.123Z", "2026-09-23T05:22:21Z"), ("2026-09-23T05:22:21+00:00", "2026-09-23T05:22:21Z")])
def test_a_full_time_or_a_date_becomes_a_full_time(text, normal):
    assert utc.normal(text) == normal


@pytest.mark.parametrize("text", ["", "yesterday", "2026-09-23T05:22:21", "2026-09-23T05:22:21+02:00", "2026-13-01",
                                  "2026-02-30", "2026-09-23 05:22:21Z", "2026-09-23T25:00:00Z", "2026-9-3", None])
def test_what_depends_on_where_one_is_and_what_is_none_is_refused(text):
    with pytest.raises(ParseError):
        utc.normal(text)


@given(st.integers(0, 4_000_000_000), st.integers(-10**6, 10**6))
def test_seconds_and_texts_stand_for_each_other(at, by):
    assert utc.seconds(utc.spell(at)) == at
    assert at + by < 0 or utc.later(utc.spell(at), by) == utc.spell(at + by)
