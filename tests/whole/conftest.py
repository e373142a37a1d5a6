"""The cluster under fire, one per module; and nothing of any cluster may outlive the session."""
from __future__ import annotations

import pytest

from tests.whole.cluster import processes_of, until
from tests.whole.fire import Fire, entry


@pytest.fixture(scope="session", autouse=True)
def nothing_survives(tmp_path_factory):
    """Fail when a process of ours is left that works in any folder of this session."""
    yield
    folder = tmp_path_factory.getbasetemp()

    def left():
        return {pid: words for pid, words in processes_of(f"{folder}/").items()
                if "llmgw" in words or "llama-server" in words}
    until(f"nothing is left of the session: {left()}", lambda: not left(), 30)


@pytest.fixture(scope="module")
def fire(request, pyz, llama_archive, gemma, qa_template, tmp_path_factory):
    """Two nodes with two replicas, and what the module's MORE adds; at the end nothing of it may be left."""
    made = Fire(pyz, tmp_path_factory.mktemp("fire"), qa_template, llama_archive, gemma)
    try:
        made.set_up(entry(), *getattr(request.module, "MORE", ()))
        yield made
        left = made.end()
        assert left == {}, "the orderly end of a module left these"
    finally:
        made.close()
