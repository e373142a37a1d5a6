"""One cluster under fire for all modules of it; and nothing of any cluster may outlive the session."""
from __future__ import annotations

import pytest

from tests.whole.cluster import processes_of, until
from tests.whole.fire import Fire, Hang


@pytest.fixture(scope="session", autouse=True)
def nothing_survives(tmp_path_factory):
    """Fail when a process of ours is left that works in any folder of this session."""
    yield
    folder = tmp_path_factory.getbasetemp()

    def left():
        return {pid: words for pid, words in processes_of(f"{folder}/").items()
                if "llmgw" in words or "llama-server" in words}
    until(f"nothing is left of the session: {left()}", lambda: not left(), 30)


@pytest.fixture(scope="session")
def fire(request, pyz, llama_archive, gemma, qa_template, tmp_path_factory):
    """Two nodes with two replicas each of two models; at the end nothing of it may be left."""
    made = Fire(pyz, tmp_path_factory.mktemp("fire"), qa_template, llama_archive, gemma)
    try:
        made.set_up()
        yield made
        if not made.ended and not request.session.testsfailed:       # a test that failed may have left anything
            assert made.end() == {}, "the orderly end left these"
    finally:
        made.close()


@pytest.fixture
def calm(fire):
    """Every test finds, and leaves, two ready replicas and no request in flight."""
    fire.calm()
    yield
    if not fire.ended:
        fire.calm()


@pytest.fixture(scope="session")
def hang(fire):
    """Begins with the first module that names it; by the rules it lasts two minutes, in which other tests run."""
    return Hang(fire)
