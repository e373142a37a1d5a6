"""What is installed for the engines that are Python programs."""
from __future__ import annotations

import pytest

from llmgw.domain.engine import DEFAULT_VERSIONS, PYTHON, SGLANG, TOOL_VERSIONS, VLLM
from llmgw.domain.errors import RequirementMissing
from llmgw.engines import recipes
from llmgw.engines.needs import NEEDS
from llmgw.parse import utc


def test_the_date_of_the_default_version_is_built_in():
    published = recipes.RECIPES[VLLM].published[DEFAULT_VERSIONS[VLLM]]
    assert utc.later(published, utc.DAY_SECONDS) == "2026-09-23T05:22:21Z"


def test_wheels_are_chosen_for_the_oldest_glibc_that_will_do():
    for name, recipe in recipes.RECIPES.items():
        if name in NEEDS:
            assert NEEDS[name].glibc == recipe.glibc


@pytest.mark.parametrize("arch, platform, uv", [
    ("x86_64", "x86_64-manylinux_2_31", "uv-x86_64-unknown-linux-musl.tar.gz"),
    ("arm64", "aarch64-manylinux_2_31", "uv-aarch64-unknown-linux-musl.tar.gz")])
def test_names_follow_the_processor(arch, platform, uv):
    assert recipes.platform(recipes.RECIPES[VLLM], arch) == platform
    assert recipes.uv_archive(arch) == uv
    assert recipes.platform(recipes.RECIPES[SGLANG], "x86_64") == "x86_64-manylinux_2_34"


def test_python_is_an_exact_patch():
    best, other = recipes.python_archives(TOOL_VERSIONS[PYTHON], "x86_64")
    assert best == "cpython-3.12.16+20261110-x86_64-unknown-linux-gnu-install_only_stripped.tar.gz"
    assert other.endswith("-install_only.tar.gz")


def test_a_processor_without_packages_is_refused():
    with pytest.raises(RequirementMissing, match="type riscv64"):
        recipes.uv_archive("riscv64")
