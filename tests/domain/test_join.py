"""The join string: whole, or with a sentence for what befell it."""
from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.domain import join
from llmgw.domain.errors import ParseError
from llmgw.domain.join import JoinString
from llmgw.domain.secret import Secret

PIN = hashlib.sha256(b"a CA").hexdigest()
SECRET = "s3cret_-" * 5 + "abc"
WHOLE = join.write(JoinString(PIN, "abcdEFGH", Secret(SECRET)))
LETTERS = st.sampled_from("ABCabc019_-")


def test_it_comes_back_as_it_was():
    assert join.read(WHOLE) == JoinString(PIN, "abcdEFGH", Secret(SECRET))
    assert len(WHOLE) == join.LETTERS and WHOLE.startswith("llmgw1.")
    assert join.read(WHOLE).token.reveal() == f"llmgw_join_abcdEFGH_{SECRET}"


@given(st.binary(min_size=32, max_size=32), st.text(LETTERS, min_size=43, max_size=43))
def test_every_string_comes_back(pin, secret):
    made = JoinString(pin.hex(), "abcdEFGH", Secret(secret))
    assert join.read(join.write(made)) == made


@pytest.mark.parametrize("text", [f" {WHOLE}\n", f"'{WHOLE}'", f'"{WHOLE}" ', f"\t{WHOLE}\r\n"])
def test_what_a_copy_takes_along_at_its_ends_does_no_harm(text):
    assert join.read(text).id == "abcdEFGH"


@pytest.mark.parametrize("text, words", [
    ("", "is empty"),
    ("  \n", "is empty"),
    (WHOLE[:60] + "\n" + WHOLE[60:], "a space or a line break in it"),
    (WHOLE[:60] + " " + WHOLE[60:], "a space or a line break in it"),
    ("llmgw2" + WHOLE[6:], r"another version of llmgw \(llmgw2, this one reads llmgw1\)"),
    ("hello", "not a join string"),
    ("llmgw_node_abcdefgh_" + "x" * 43, "not a join string"),
    (WHOLE[:-1], f"cut off: it has {join.LETTERS - 1} of {join.LETTERS} letters"),
    (WHOLE[:20], "cut off: it has 20"),
    (WHOLE + "x", "too long"),
    (WHOLE.replace("s3cret", "s4cret", 1), "changed on the way"),
    (WHOLE[:-1] + ("0" if WHOLE[-1] != "0" else "1"), "changed on the way"),
])
def test_each_damage_has_its_sentence(text, words):
    with pytest.raises(ParseError, match=words) as caught:
        join.read(text)
    assert caught.value.hint and "s3cret" not in caught.value.message + caught.value.hint


@given(st.integers(0, join.LETTERS - 1), st.characters(min_codepoint=33, max_codepoint=0x17f))
def test_no_changed_letter_gets_through(place, letter):
    changed = WHOLE[:place] + letter + WHOLE[place + 1:]
    if changed != WHOLE and changed.strip("'\"") != WHOLE:
        with pytest.raises(ParseError):
            join.read(changed)


@given(st.text())
def test_anything_else_is_refused_in_words(text):
    if join.VERSION not in text:
        with pytest.raises(ParseError):
            join.read(text)


def test_a_pin_may_be_hex_or_base64url():
    assert join.read_pin("sha256:" + PIN.upper()) == PIN
    assert join.read_pin("sha256:" + WHOLE.split(".")[1]) == PIN
    for text in ("", "sha256:", "md5:" + PIN, PIN, "sha256:" + PIN[1:]):
        with pytest.raises(ParseError):
            join.read_pin(text)


def test_the_secret_prints_as_nothing():
    assert SECRET not in repr(join.read(WHOLE)) and SECRET not in str(join.read(WHOLE).token)
