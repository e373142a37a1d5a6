"""Times as people write them for tokens."""
from __future__ import annotations

import pytest

from llmgw.ctl.token import seconds
from llmgw.domain.errors import UsageError


@pytest.mark.parametrize("text, number", [("30s", 30), ("30m", 1800), ("24h", 86400), ("7d", 604800)])
def test_a_time_is_a_number_and_a_unit(text, number):
    assert seconds(text) == number


@pytest.mark.parametrize("text", ["", "24", "h", "0h", "-1h", "1.5h", "1w", "24 h", "9" * 10 + "d"])
def test_anything_else_is_refused_with_an_example(text):
    with pytest.raises(UsageError, match="not a time") as caught:
        seconds(text)
    assert "24h" in caught.value.hint
