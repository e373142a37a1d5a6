"""Where a replica goes, and every node's own words where it does not."""
from __future__ import annotations

import time
from dataclasses import replace

import pytest

from llmgw.decide import fit
from llmgw.decide.placement import Board, Need, Placed, Unplaced
from llmgw.domain.engine import EngineObserved, EnginePhase
from llmgw.domain.replica import GpuSlot, ShardState
from tests.decide.fleet import GIB, INSTALLED, ON_CUDA, SILENT, SUSPECT, VERSION, gpu, node, row, seen, spec, weights


def place(nodes, model=None, of=None, replicas=(), version=VERSION):
    model = model or spec(gpus=0)
    return Board(nodes, replicas).place(Need(model, version, of or weights(model.name)))


def where(found):
    assert isinstance(found, Placed), found
    return found.shards[0].node


def why(found, name):
    assert isinstance(found, Unplaced)
    return next(reason.partition(": ")[2] for reason in found.reasons if reason.startswith(f"{name}: "))


def test_the_tightest_node_that_does_is_taken():
    assert where(place([node("big", 64), node("small", 4), node("tiny", 1)])) == "small"


def test_a_node_that_holds_the_weights_comes_first():
    assert where(place([node("small", 4), node("big", 64, weights=["m"])])) == "big"


def test_replicas_of_one_model_spread_before_anything_else():
    nodes = [node("a", 8, weights=["m"]), node("b", 64)]
    assert where(place(nodes, replicas=[row("m-1", "a")])) == "b"


def test_the_same_input_gives_the_same_place_in_any_order():
    nodes = [node(name, 8) for name in "dbca"]
    assert where(place(nodes)) == where(place(list(reversed(nodes)))) == "a"


@pytest.mark.parametrize("refusing, words", [
    (node("a", liveness=SUSPECT), "no heartbeat for 16 s"),
    (node("a", liveness=SILENT), "no heartbeat for 61 s"),
    (node("a", draining=True), "it is being drained"),
    (node("a", probed=False, engines=()), "its first probe has not ended yet"),
    (node("a", engines=()), "llama.cpp b10991 is not installed"),
    (node("a", engines=[EngineObserved("llama.cpp", VERSION, EnginePhase.MISSING, "libgomp.so.1 is missing",
                                       "apt-get install libgomp1")]),
     "llama.cpp b10991: libgomp.so.1 is missing (try: apt-get install libgomp1)"),
    (node("a", engines=[EngineObserved("llama.cpp", VERSION, EnginePhase.DOWNLOADING, "40 MB of 100 MB")]),
     "llama.cpp b10991: 40 MB of 100 MB"),
    (node("a", engines=[replace(INSTALLED, version="b1")]), "llama.cpp b10991 is not installed"),
    (node("a", memory=1), "1.3 GiB of memory are needed, 1.0 GiB are free"),
    (node("a", disk=1), "1.0 GiB of disk are needed for the weights, 1.0 GiB are free, of which 51 MiB are kept"),
], ids=lambda value: value[:30] if isinstance(value, str) else "")
def test_a_node_refuses_in_its_own_words(refusing, words):
    assert why(place([refusing]), "a") == words


def test_labels_and_named_nodes_are_filters():
    nodes = [node("a", labels={"rack": "a"}), node("b", labels={"rack": "b"}), node("c")]
    assert where(place(nodes, spec(gpus=0, labels={"rack": "b"}))) == "b"
    refused = place(nodes[::2], spec(gpus=0, labels={"rack": "b"}))
    assert why(refused, "a") == "its label rack is a, not b"
    assert why(refused, "c") == "it has no label rack: b"
    assert where(place(nodes, spec(gpus=0, only_nodes=("c",)))) == "c"
    assert why(place(nodes[:1], spec(gpus=0, only_nodes=("c",))), "a") == "the model is placed on c only"


def test_memory_counts_weights_kv_cache_and_what_is_placed_already():
    model = spec(gpus=0, context_length=8192, parallel=4)
    needs = fit.memory_bytes(model, weights(size=1, kv=100_000))
    assert needs == int(1.05 * GIB) + 100_000 * 8192 * 4 + fit.OVERHEAD_BYTES
    assert isinstance(place([node("a", 4)], model, weights(size=1, kv=100_000)), Unplaced)
    assert where(place([node("a", 5)], model, weights(size=1, kv=100_000))) == "a"
    starting, running = row("x-1", "a", spec("x"), of=weights("x", 3)), node("a", 5, shards=[seen("x-1")])
    assert isinstance(place([node("a", 4)], replicas=[starting]), Unplaced)
    # of a running one only the mapped weights still look free
    assert where(place([running], replicas=[starting])) == "a"
    assert isinstance(place([node("a", 4, shards=[seen("x-1")])], replicas=[starting]), Unplaced)


def test_an_operator_s_own_engine_does_for_any_version():
    own = replace(INSTALLED, version="custom", source="operator")
    assert where(place([node("a", engines=[own])])) == "a"


def test_llama_cpp_takes_a_gpu_where_one_fits_and_the_cpu_where_none_does():
    with_gpu = node("g", gpus=[gpu(0)], engines=[ON_CUDA])
    found = place([node("c"), with_gpu], spec())
    assert found.shards[0].node == "g" and found.shards[0].gpus == (GpuSlot("GPU-x-0", 0),)
    taken = row("x-1", "g", spec("x"), gpus=[GpuSlot("GPU-x-0", 0)])
    assert place([node("c", 64), with_gpu], spec(), replicas=[taken]).shards[0].gpus == ()
    assert place([node("c"), with_gpu], spec(gpus=0)).shards[0].gpus == ()
    blind = node("g", gpus=[gpu(0)], engines=[INSTALLED])
    assert why(place([blind, node("c")], spec(gpus=1)), "g") == "its llama.cpp sees no GPU"
    assert why(place([blind, node("c")], spec(gpus=1)), "c") == "it has no GPU"


def test_whole_gpus_of_one_kind_are_taken_by_uuid():
    cards = [gpu(0, name="A"), gpu(1, name="B"), gpu(2, used=20, name="A"), gpu(3, name="A"), gpu(4, name="A", mig=True)]
    vllm = EngineObserved("vllm", "0.30.0", EnginePhase.INSTALLED, usable=True)
    model = spec(engine="vllm", gpus=2)
    found = place([node("a", gpus=cards, engines=[vllm])], model, version="0.30.0")
    assert [slot.index for slot in found.shards[0].gpus] == [0, 3]
    four = place([node("a", gpus=cards, engines=[vllm])], replace(model, gpus=4), version="0.30.0")
    assert why(four, "a") == ("2 of the 4 GPUs of one kind it needs can take it (GPU 2 is in use by another program "
                              "(20.0 GiB of 80.0 GiB); GPU 4 is split by MIG)")
    big = place([node("a", gpus=cards[:2], engines=[vllm])], model, weights(size=200), version="0.30.0")
    assert "GPU 0 has 80.0 GiB, 105.3 GiB are needed" in why(big, "a")
    assert why(place([node("a", gpus=cards[:1], engines=[vllm])], model, version="0.30.0"), "a") == \
        "1 of 1 GPUs are free, 2 are needed"


def test_a_gpu_whose_memory_is_unknown_is_not_refused():
    found = place([node("g", gpus=[gpu(0, size=None)], engines=[ON_CUDA])], spec(gpus=1))
    assert isinstance(found, Placed)


def test_no_gpu_is_given_twice():
    nodes = [node("g", gpus=[gpu(number) for number in range(8)], engines=[ON_CUDA])]
    board, taken = Board(nodes, []), []
    for number in range(8):
        found = board.place(Need(spec(f"m{number}", gpus=1), VERSION, weights(f"m{number}")))
        board.take(spec(f"m{number}"), weights(f"m{number}"), found.shards)
        taken += [slot.uuid for slot in found.shards[0].gpus]
    assert len(set(taken)) == 8
    assert isinstance(board.place(Need(spec("m9", gpus=1), VERSION, weights("m9"))), Unplaced)


def test_what_is_released_can_be_placed_again():
    held = row("x-1", "g", spec("x"), gpus=[GpuSlot("GPU-x-0", 0)])
    board = Board([node("g", gpus=[gpu(0, used=60)], engines=[ON_CUDA], shards=[seen("x-1")])], [held])
    assert isinstance(board.place(Need(spec(gpus=1), VERSION, weights(size=40))), Unplaced)
    board.release(held)
    assert isinstance(board.place(Need(spec(gpus=1), VERSION, weights(size=40))), Placed)


def test_an_unready_replica_keeps_its_memory():
    sick = row("x-1", "a", spec("x"), of=weights("x", 3))
    assert isinstance(place([node("a", 4, shards=[seen("x-1", ShardState.BACKOFF)])], replicas=[sick]), Unplaced)


def test_a_thousand_nodes_and_five_hundred_replicas_are_planned_in_a_second():
    nodes = [node(f"n{number}", 64 + number % 7, gpus=[gpu(card, node=str(number)) for card in range(8)]
                  if number % 2 else (), engines=[ON_CUDA if number % 2 else INSTALLED]) for number in range(1000)]
    started = time.process_time()
    board = Board(nodes, [])
    for number in range(500):
        model = spec(f"m{number % 100}", gpus=None if number % 3 else 0)
        found = board.place(Need(model, VERSION, weights(model.name, 8)))
        board.take(model, weights(model.name, 8), found.shards)
    assert time.process_time() - started < 1.0


def test_an_engine_that_is_made_for_gpus_runs_on_a_cpu_only_when_told_to_and_brought_for_it():
    ours = EngineObserved("vllm", "0.30.0", EnginePhase.INSTALLED, usable=True)
    brought = replace(ours, source="operator", devices=("CPU",))
    told = spec(engine="vllm", gpus=0)
    assert place([node("a", engines=[brought])], told, version="0.30.0").shards[0].gpus == ()
    assert why(place([node("a", engines=[ours])], told, version="0.30.0"), "a") == \
        "its vllm is not made for the CPU (one that is can be named under engines: in agent.yaml)"
    assert why(place([node("a", engines=[brought])], spec(engine="vllm"), version="0.30.0"), "a") == "it has no GPU"


def test_a_python_engine_needs_some_gigabytes_of_memory_on_a_cpu():
    brought = EngineObserved("vllm", "0.30.0", EnginePhase.INSTALLED, usable=True, source="operator", devices=("CPU",))
    small = node("a", memory=3, engines=[brought])
    assert "4.0 GiB of memory are needed" in why(place([small], spec(engine="vllm", gpus=0), weights(size=0.001), version="0.30.0"), "a")
