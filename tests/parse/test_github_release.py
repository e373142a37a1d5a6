"""A release's JSON, and the asset that fits a node."""
from __future__ import annotations

import json
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.domain.engine import Asset
from llmgw.domain.errors import ParseError, RequirementMissing
from llmgw.parse import github_release

DATA = pathlib.Path(__file__).resolve().parents[1] / "data" / "github"
HEX = "ab" * 32


def entry(name, **changes):
    return {"name": name, "size": 10, "digest": f"sha256:{HEX}", "state": "uploaded",
            "browser_download_url": f"https://github.example/{name}", **changes}


def release(*entries, tag="b11434"):
    return json.dumps({"tag_name": tag, "assets": list(entries)}).encode()


def names_of(tag, cpu=("x64", "arm64", "s390x"), cuda=("12.8-x64", "13.4-x64", "13.4-arm64")):
    return ([f"llama-{tag}-bin-ubuntu-{arch}.tar.gz" for arch in cpu]
            + [f"llama-{tag}-bin-ubuntu-cuda-{label}.tar.gz" for label in cuda]
            + [f"cudart-llama-{tag}-bin-ubuntu-cuda-{label}.tar.gz" for label in cuda]
            + [f"llama-{tag}-bin-ubuntu-vulkan-x64.tar.gz", f"llama-{tag}-bin-ubuntu-rocm-7.2-x64.tar.gz",
               f"llama-{tag}-bin-macos-arm64.tar.gz", "cudart-llama-bin-win-cuda-12.8-x64.zip"])


def assets(*names):
    return tuple(Asset(name, 10, HEX) for name in names)


B11434 = assets(*names_of("b11434"))


def test_an_asset_in_githubs_own_words_is_read():
    sample = json.loads((DATA / "asset_synthetic.json").read_text())
    found = github_release.parse(json.dumps({"tag_name": "b10991", "assets": [sample]}).encode(), "b10991")
    assert found.assets == (Asset("llama-b10991-bin-ubuntu-x64.tar.gz", 12345678, sample["digest"][7:]),)
    assert found.urls[found.assets[0].name] == sample["browser_download_url"]


@pytest.mark.parametrize("missing", [None, "absent"])
def test_a_file_without_a_digest_is_left_out_and_named(missing):
    old = entry("old.tar.gz", digest=None)
    if missing == "absent":
        del old["digest"]
    found = github_release.parse(release(old, entry("new.tar.gz")), "b11434")
    assert [asset.name for asset in found.assets] == ["new.tar.gz"] and found.undigested == ("old.tar.gz",)


def test_a_release_without_any_digest_is_refused_with_a_way_out():
    with pytest.raises(ParseError, match="none of its 2 files has a sha256 digest") as caught:
        github_release.parse(release(entry("a", digest=None), entry("b", digest=None)), "b11434")
    assert "import-engine" in caught.value.hint


def test_a_file_that_is_still_uploading_or_oddly_named_is_left_out():
    data = release(entry("a", state="starter"), entry("../b"), entry("-c"), entry("d e"), entry("f"))
    assert [asset.name for asset in github_release.parse(data, "b11434").assets] == ["f"]


BAD = {
    "not JSON": b"<html>", "a list": b"[]", "another tag": release(tag="b1"), "no list": b'{"tag_name":"b11434"}',
    "entry a text": release("x"), "md5": release(entry("a", digest="md5:" + HEX)),
    "digest a path": release(entry("a", digest="sha256:../../etc")), "digest a number": release(entry("a", digest=3)),
    "size negative": release(entry("a", size=-1)), "size a float": release(entry("a", size=1.5)),
    "size true": release(entry("a", size=True)), "size 2^63": release(entry("a", size=1 << 63)),
    "no address": release(entry("a", browser_download_url=None)),
    "a file address": release(entry("a", browser_download_url="file:///etc/passwd")),
    "a name twice": release(entry("a"), entry("a")), "too many": release(*[entry(f"a{n}") for n in range(1001)]),
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("name", BAD)
def test_a_lying_answer_is_refused(name):
    with pytest.raises(ParseError, match="release b11434: |not a sha256 digest"):
        github_release.parse(BAD[name], "b11434")


@pytest.mark.parametrize("arch, name", [("x86_64", "x64"), ("aarch64", "arm64"), ("s390x", "s390x")])
def test_a_node_without_gpu_gets_the_cpu_archive_of_its_processor(arch, name):
    picked = github_release.pick(B11434, "b11434", arch, None, False)
    assert (picked.binary.name, picked.runtime, picked.cuda) == (f"llama-b11434-bin-ubuntu-{name}.tar.gz", None, "")


@pytest.mark.parametrize("driver, label", [("570.26", "12.8"), ("580.126.09", "12.8"), ("595.80", "12.8"),
                                           ("616.00", "13.4"), ("620.57.04", "13.4")])
def test_a_gpu_node_gets_the_newest_flavour_its_driver_supports_with_the_same_runtime(driver, label):
    picked = github_release.pick(B11434, "b11434", "x86_64", driver, False)
    assert picked.binary.name == f"llama-b11434-bin-ubuntu-cuda-{label}-x64.tar.gz"
    assert picked.runtime.name == f"cudart-llama-b11434-bin-ubuntu-cuda-{label}-x64.tar.gz"
    assert picked.cuda == label


def test_flavours_are_compared_as_numbers():
    listed = assets(*names_of("b1", cuda=("12.8-x64", "12.10-x64")))
    assert github_release.pick(listed, "b1", "x86_64", "620.1", False).cuda == "12.10"


def test_a_gpu_that_cuda_13_has_dropped_gets_cuda_12():
    assert github_release.pick(B11434, "b11434", "x86_64", "620.1", False, "6.1").cuda == "12.8"
    assert github_release.pick(B11434, "b11434", "x86_64", "620.1", False, "7.5").cuda == "13.4"


@pytest.mark.parametrize("newest, label", [("12.8", "12.8"), ("13.0", "12.8"), ("13.4", "13.4"), ("14.0", "13.4")])
def test_a_node_may_ask_for_no_newer_cuda_build(newest, label):
    assert github_release.pick(B11434, "b11434", "x86_64", "620.1", False, cuda=newest).cuda == label


def test_a_release_without_so_old_a_cuda_build_says_which_it_has():
    error = refusal(B11434, "b11434", "x86_64", "620.1", False, None, "11.8")
    assert error.message.endswith("it has no build for CUDA 11.8 or older, only for 12.8, 13.4")


def test_the_older_cuda_builds_of_a_release_can_be_told():
    newest, oldest = (github_release.pick(B11434, "b11434", "x86_64", driver, False) for driver in ("620.1", "570.26"))
    assert github_release.older_cuda(B11434, newest) == ("12.8",) and github_release.older_cuda(B11434, oldest) == ()
    assert github_release.older_cuda(B11434, github_release.pick(B11434, "b11434", "x86_64", None, False)) == ()


def refusal(*words):
    with pytest.raises(RequirementMissing) as caught:
        github_release.pick(*words)
    return caught.value


def test_a_gpu_node_is_never_quietly_given_the_cpu_build():
    old = assets(*names_of("b10353", cuda=()))
    error = refusal(old, "b10353", "x86_64", "580.126", False)
    assert "no CUDA archive for x64" in error.message and "b11026 or newer" in error.hint and "cpu: true" in error.hint
    assert github_release.pick(old, "b10353", "x86_64", "580.126", True).binary.name.endswith("ubuntu-x64.tar.gz")
    assert "b11026" not in refusal(assets(*names_of("b11500", cuda=())), "b11500", "x86_64", "580.126", False).hint


def test_a_driver_that_is_too_old_is_named_with_the_one_that_is_needed():
    error = refusal(B11434, "b11434", "x86_64", "550.1", False)
    assert error.message.endswith("driver 550.1 supports none of its CUDA builds (12.8, 13.4)")
    assert "570.26 or newer" in error.hint
    assert "616.00 or newer" in refusal(B11434, "b11434", "aarch64", "580.1", False).hint


def test_an_archive_without_its_runtime_is_refused():
    listed = tuple(asset for asset in B11434 if not asset.name.startswith("cudart"))
    assert "no CUDA runtime beside it" in refusal(listed, "b11434", "x86_64", "620.1", False).message


def test_other_processors_and_other_versions_are_refused():
    assert "processors of type riscv64" in refusal(B11434, "b11434", "riscv64", None, False).message
    assert "no CPU archive for x64" in refusal(B11434, "b11433", "x86_64", None, False).message
    assert "no CPU archive for x64" in refusal((), "b11434", "x86_64", None, False).message


@given(st.one_of(st.binary(max_size=200), st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
        st.sampled_from(["tag_name", "assets", "name", "size", "digest", "state", "browser_download_url"]), inner,
        max_size=6), max_leaves=20).map(lambda value: json.dumps(value).encode())))
def test_any_bytes_give_a_release_or_our_error(data):
    try:
        github_release.parse(data, "b1")
    except ParseError as error:
        assert len(error.message) <= 500


@given(st.lists(st.sampled_from(names_of("b1") + names_of("b2")), unique=True), st.sampled_from(["x86_64", "aarch64"]),
       st.one_of(st.none(), st.from_regex(r"[0-9]{3}(\.[0-9]{1,3}){0,2}", fullmatch=True)), st.booleans())
def test_what_is_picked_is_in_the_list_and_of_one_flavour(names, arch, driver, cpu):
    try:
        picked = github_release.pick(assets(*names), "b1", arch, driver, cpu)
    except RequirementMissing as error:
        assert error.hint
        return
    assert picked.binary.name in names and "-b1-" in picked.binary.name
    assert (picked.runtime is None) == (cpu or not driver)
    if picked.runtime:
        assert picked.runtime.name == "cudart-" + picked.binary.name and picked.runtime.name in names
