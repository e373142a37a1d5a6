"""Names, digests, secrets and errors."""
import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.domain import errors
from llmgw.domain.command import Command
from llmgw.domain.digest import blob_path, sha256_hex
from llmgw.domain.errors import LlmgwError, ParseError
from llmgw.domain.names import check_name, file_name
from llmgw.domain.secret import Secret

HEX = "0123456789abcdef" * 4


@pytest.mark.parametrize("text", [HEX, f"sha256:{HEX}", f"sha256-{HEX}"])
def test_a_digest_is_known_in_its_three_spellings(text):
    assert sha256_hex(text) == HEX
    assert blob_path(text) == f"blobs/sha256/{HEX}"


@pytest.mark.parametrize("text", [
    "", HEX[:-1], HEX + "0", HEX.upper(), "sha256:../../../../etc/ld.so.preload", f"sha512:{HEX}",
    f"sha256:{HEX}\n", f"{HEX}/../x", f" {HEX}", None, 5])
def test_what_is_no_digest_never_becomes_a_path(text):
    with pytest.raises(ParseError):
        blob_path(text)


@pytest.mark.parametrize("name", ["a", "gemma-3-270m", "meta/llama:70b", "node_1.lan", "_x", ":x"])
def test_names_that_people_use_are_allowed(name):
    assert check_name(name) == name


@pytest.mark.parametrize("name", ["", "-x", "--port", ".hidden", "/etc", "../x", "a/../b", "a b", "ä",
                                  "a\n", "<script>", "x" * 201, None])
def test_names_that_could_be_a_flag_a_path_or_markup_are_refused(name):
    with pytest.raises(ParseError):
        check_name(name)


@given(st.text("a_s/c:.", min_size=1, max_size=6), st.text("a_s/c:.", min_size=1, max_size=6))
def test_distinct_names_have_distinct_flat_file_names(one, other):
    assert "/" not in file_name(one)
    assert (file_name(one) == file_name(other)) == (one == other)


def test_a_secret_cannot_be_printed_by_accident():
    secret = Secret("hush")

    assert "hush" not in f"{secret} {secret!r} {[secret]}"
    assert secret.reveal() == "hush"
    assert secret and not Secret("")


def test_a_command_is_shown_without_its_secrets():
    command = Command(("vllm", "serve", "a b"), {"LANG": "C"}, {"VLLM_API_KEY": "hush"})

    assert str(command) == "LANG=C VLLM_API_KEY=*** vllm serve 'a b'"
    assert "hush" not in repr(command)


def test_every_error_has_a_reason_of_its_own():
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, LlmgwError)]
    reasons = [kind.reason for kind in kinds]

    assert len(set(reasons)) == len(reasons)
    assert all(reason.isalpha() and reason[0].isupper() for reason in reasons)
