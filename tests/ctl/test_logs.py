"""Following a log through windows on its end."""
from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmgw.ctl.logs import added


@given(st.text("ab\n", max_size=300), st.text("ab\n", max_size=100), st.integers(130, 400))
def test_what_two_windows_on_one_log_share_is_not_shown_twice(log, more, window):
    before, whole = log[-window:], log + more
    now = whole[-window:]
    new = added(before, now)
    assert now.endswith(new)
    if len(whole) <= window:                   # the window held everything both times: no guess at all
        assert new == more
    else:
        assert len(new) <= len(now)


def test_a_log_that_began_anew_is_shown_whole():
    assert added("old lines\n", "new lines\n") == "new lines\n"
    assert added("", "first\n") == "first\n"
    assert added("same\n", "same\n") == ""
