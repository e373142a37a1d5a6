"""Names of wheels, and which of an index's files are taken."""
from __future__ import annotations

import pytest

from llmgw.domain.errors import ParseError
from llmgw.parse import wheel
from llmgw.parse.lock import Pin

A, B = "a" * 64, "b" * 64


@pytest.mark.parametrize("name, fits", [
    ("idna-3.20-py3-none-any.whl", True), ("six-1.17.0-py2.py3-none-any.whl", True), ("x-1-py2-none-any.whl", False),
    ("numpy-2.3.5-cp312-cp312-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl", True),
    ("vllm-0.30.0-cp38-abi3-manylinux_2_28_x86_64.whl", True), ("llguidance-1.7.6-cp39-abi3-manylinux_2_31_x86_64.whl", True),
    ("sglang-0.5.23-cp312-cp312-manylinux_2_34_x86_64.whl", False), ("x-1-cp311-cp311-manylinux_2_17_x86_64.whl", False),
    ("x-1-cp313-abi3-manylinux_2_17_x86_64.whl", False), ("x-1-cp312-cp312-manylinux_2_17_aarch64.whl", False),
    ("x-1-cp312-cp312-manylinux2014_x86_64.whl", True), ("x-1-cp312-cp312-manylinux1_x86_64.whl", True),
    ("x-1-cp312-cp312-musllinux_1_1_x86_64.whl", False), ("x-1-cp312-cp312-win_amd64.whl", False),
    ("x-1-cp312-cp312t-manylinux_2_17_x86_64.whl", False), ("x-1.tar.gz", False), ("../x-1-py3-none-any.whl", False),
    ("torch-2.13.0-cp312-cp312-manylinux_2_28_x86_64.whl", True), ("x-1-2build-py3-none-any.whl", True),
    ("nvidia_x-13.0-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl", True)])
def test_a_wheel_fits_by_python_processor_and_glibc(name, fits):
    assert wheel.fits(name, "x86_64", (2, 31)) is fits


def test_the_files_that_the_list_names_and_that_fit_are_taken():
    files = wheel.listed({"files": [
        {"filename": "x-1-py3-none-any.whl", "url": "https://h/x-1-py3-none-any.whl", "hashes": {"sha256": A}, "size": 5},
        {"filename": "x-1.tar.gz", "url": "https://h/x-1.tar.gz", "hashes": {"sha256": B}},
        {"filename": "x-2-py3-none-any.whl", "url": "https://h/y", "hashes": {"sha256": "c" * 64}},
        {"filename": "../x-1-py3-none-any.whl", "url": "https://h/z", "hashes": {"sha256": A}}, {"filename": "x"}, 7]}, "x")
    assert [file.name for file in files] == ["x-1-py3-none-any.whl", "x-1.tar.gz", "x-2-py3-none-any.whl"]
    assert [file.name for file in wheel.choose(Pin("x", "1", (A, B)), files, "x86_64", (2, 31))] == ["x-1-py3-none-any.whl"]
    with pytest.raises(ParseError, match="x==1: the package index has no wheel of it for x86_64"):
        wheel.choose(Pin("x", "1", (B,)), files, "x86_64", (2, 31))
    with pytest.raises(ParseError) as withdrawn:
        wheel.choose(Pin("x", "1", ("d" * 64,)), files, "x86_64", (2, 31))
    assert withdrawn.value.hint == "it may have been withdrawn"


@pytest.mark.parametrize("data", [None, [], {}, {"files": 1}, "x"])
def test_what_is_no_list_of_files_is_refused(data):
    with pytest.raises(ParseError, match="no JSON list of the files of x"):
        wheel.listed(data, "x")
