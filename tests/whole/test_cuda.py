"""A GPU node as nvidia-smi would describe it, and a CUDA build that cannot use a GPU: nothing runs there quietly."""
from __future__ import annotations

import pathlib

import pytest

from tests.fakes.cuda_archive import cuda_archives, nvidia_smi
from tests.whole.cluster import MODEL, Cluster, until

pytestmark = pytest.mark.slow
MISMATCH = pathlib.Path(__file__).parent.parent / "data" / "nvidia_smi" / "driver-mismatch.stdout"


@pytest.fixture
def cluster(pyz, qa_template, tmp_path):
    """A control plane and one node that believes it has a GPU."""
    (tmp_path / "cluster").mkdir()
    made = Cluster(pyz, tmp_path / "cluster", qa_template)
    made.env["LLMGW_REHEARSE_NVIDIA_PATH"] = str(tmp_path / "smi")
    try:
        made.start_server()
        yield made
    finally:
        made.close()


def engine(cluster, check, seconds=90):
    """Wait until the node says something of its engine that ``check`` likes; return that."""
    def found():
        cluster.check()
        seen = [item for node in cluster.items("nodes") for item in node["engines"] if item["name"] == "llama.cpp"]
        return seen and check(seen[0]) and seen[0]
    return until("the engine", found, seconds)


def why_not(cluster):
    return " ".join(cluster.items("models")[0]["why_not"])


def bring(cluster, *archives):
    for archive in archives:
        cluster.ctl("mirror", "import-engine", archive.path, "--sha256", archive.sha256)


def test_stand_in_a_cuda_build_that_sees_no_device_is_no_candidate_until_the_cpu_build_is_asked_for(
        cluster, release_archive, gemma, tmp_path):
    nvidia_smi(tmp_path / "smi")
    bring(cluster, *cuda_archives(tmp_path, release_archive))
    cluster.ctl("mirror", "import", gemma, "--name", MODEL)
    cluster.start_agent()
    seen = engine(cluster, lambda item: item["phase"] in ("failed", "missing", "installed"))
    sentence = ("llama.cpp b10991: the CUDA build sees no device: its libggml-cuda.so cannot be loaded: "
                "it is no whole library")
    assert seen["phase"] == "failed" and not seen["usable"] and seen["message"].startswith(sentence)
    assert not (cluster.dir("node-1") / "engines" / "llama.cpp" / "b10991").exists()
    until("placement says why", lambda: "the CUDA build sees no device" in why_not(cluster))
    assert cluster.items("replicas") == []
    assert sentence in " ".join(cluster.ctl("nodes").split())
    bring(cluster, release_archive)
    cluster.config.write_text(cluster.config.read_text().replace("{version: b10991}", "{version: b10991, cpu: true}"))
    seen = engine(cluster, lambda item: item["usable"])
    assert seen["phase"] == "installed" and "build 10991" in seen["message"]


def test_stand_in_a_node_whose_driver_waits_for_a_reboot_installs_no_cpu_build_meanwhile(cluster, release_archive, tmp_path):
    nvidia_smi(tmp_path / "smi", MISMATCH.read_text(), 18)
    bring(cluster, release_archive)
    cluster.start_agent()
    seen = engine(cluster, lambda item: item["phase"] in ("failed", "missing", "installed"))
    assert seen["phase"] == "missing" and "driver and library versions differ" in seen["message"]
    assert seen["hint"] == "reboot the node"
    shown = " ".join(cluster.ctl("nodes").split())
    assert "NVIDIA GPUs cannot be used" in shown and "reboot the node" in shown


def test_stand_in_a_release_without_a_cuda_build_is_a_refusal_on_a_gpu_node(cluster, release_archive, tmp_path):
    nvidia_smi(tmp_path / "smi")
    bring(cluster, release_archive)
    cluster.start_agent()
    seen = engine(cluster, lambda item: item["phase"] in ("failed", "missing", "installed"))
    assert seen["phase"] == "missing" and "there is no CUDA archive for" in seen["message"]
    assert "cpu: true" in seen["hint"]
