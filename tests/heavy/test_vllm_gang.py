"""The real vLLM 0.30.0 over two nodes (two agents of this machine, on the CPU): ready, answered, a rank lost, all of it restarted."""
from __future__ import annotations

import time

import pytest

from tests import interpreters
from tests.whole import gang
from tests.whole.cluster import until

pytestmark = [pytest.mark.heavy, pytest.mark.slow]
SECONDS = 900.0


@pytest.fixture(scope="module")
def cluster(pyz, bring, bring_vllm, qa_template, tmp_path_factory):
    try:
        python = bring_vllm.environment(interpreters.need("3.11"))
        model = bring_vllm.tiny_model(python)
    except bring.CannotBring as error:
        pytest.skip(str(error))
    made = gang.start(pyz, tmp_path_factory.mktemp("gang"), qa_template, python, model)
    yield made
    made.close()


def test_two_real_programs_serve_as_one_and_are_restarted_together(cluster):
    since = time.monotonic()
    cluster.wait_ready(gang.MODEL, SECONDS)
    print(f"\ntwo nodes ready in {time.monotonic() - since:.1f} s", flush=True)
    since = time.monotonic()
    answer = until("it answers", lambda: gang.ask(cluster))
    assert answer["usage"]["completion_tokens"] == 4
    print(f"4 tokens in {time.monotonic() - since:.1f} s", flush=True)
    since = time.monotonic()
    now = gang.losing_rank_1_restarts_all(cluster, SECONDS)
    print(f"rank 1 killed, ready and answered again in {time.monotonic() - since:.1f} s: {now}", flush=True)
    since = time.monotonic()
    gang.nothing_left_when_unwanted(cluster, SECONDS)
    print(f"nothing left after {time.monotonic() - since:.1f} s", flush=True)
    assert not gang.ranks(cluster)
