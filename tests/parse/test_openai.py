"""Request bodies: what the router reads of them, and the one edit it makes."""
from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.parse.openai import PREFIX_CHARACTERS, BadBody, read_request, with_model


def body(**more):
    return json.dumps({"model": "m", **more}).encode()


def refusal(data):
    with pytest.raises(BadBody) as caught:
        read_request(data)
    assert len(caught.value.message) < 500
    return caught.value


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'"m"', b"null", b"{}", b'{"model":1}', b'{"model":""}', b'{"model":null}',
                                  b'\xef\xbb\xbf{"model":"m"}', '{"model":"m"}'.encode("utf-16"), b'{"model":"\xff"}',
                                  b'{"model":"m"} x', b'{"model":"m",}', b"[" * 200000, b'{"model":"m","a":' + b"[" * 200000])
def test_what_is_no_request_is_refused(data):
    refusal(data)


@pytest.mark.parametrize("data", [b'{"model":"m","model":"n"}', b'{"model":"m","mod\\u0065l":"n"}',
                                  b'{"mod\\u0065l":"m","\\u006dodel":"n"}'])
def test_two_models_are_refused_however_they_are_spelled(data):
    assert refusal(data).code == "duplicate_model"


def test_the_word_model_deeper_down_or_as_a_value_is_none():
    assert read_request(b'{"model":"m","messages":[{"model":"x"},{"model":"y"}]}').model == "m"
    assert read_request(b'{"x":"model","model":"m"}').model == "m"


@pytest.mark.parametrize("data", [b'{"model":"m","prompt_embeds":"x"}', b'{"model":"m","prompt_embed\\u0073":"x"}',
                                  b'{"model":"m","n_discard":-1}', b'{"model":"m","n_discard":-1,"n_discard":1}',
                                  b'{"model":"m","n_discard":1,"n_discard":-1}', b'{"model":"m","n_discard":"-1"}',
                                  b'{"model":"m","n_discard":-1.0}', b'{"model":"m","n_discard":true}'])
def test_the_short_deny_list(data):
    assert refusal(data).code == "refused_parameter"


def test_a_prompt_that_speaks_of_the_deny_list_passes():
    assert read_request(body(prompt='what is "prompt_embeds" and n_discard: -1?', n_discard=3)).model == "m"


@pytest.mark.parametrize("more, prefix", [
    ({"messages": [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}, {"role": "user", "content": "no"}]},
     "be\nhi"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}, {"text": "b"}]}]}, "ab"),
    ({"messages": [3, {"role": "user", "content": None}]}, ""), ({"messages": "x"}, ""), ({"prompt": "abc"}, "abc"),
    ({"prompt": [1, 2]}, "[1, 2]"), ({"input": "x"}, ""), ({"prompt": {"a": 1}}, "")])
def test_the_beginning_of_the_prompt(more, prefix):
    assert read_request(body(**more)).prefix == prefix


def test_the_prefix_is_bounded():
    long = "x" * (PREFIX_CHARACTERS * 3)
    assert len(read_request(body(prompt=long)).prefix) == PREFIX_CHARACTERS
    assert len(read_request(body(messages=[{"role": "user", "content": long}])).prefix) == PREFIX_CHARACTERS


def test_a_user_named_inside_the_prompt_changes_nothing():
    one = read_request(body(messages=[{"role": "user", "content": '"user": "a"'}], user="1"))
    two = read_request(body(messages=[{"role": "user", "content": '"user": "a"'}], user="2"))
    assert one.prefix == two.prefix


@pytest.mark.parametrize("data, edited", [
    (b'{"model":"m","k":12345678901234567890,"f":1.50,"g":1e400}', b'{"model":"n/\\"q","k":12345678901234567890,"f":1.50,"g":1e400}'),
    (b'{ "a" : "\\ud800" , "model" :\t"m" }', b'{ "a" : "\\ud800" , "model" :\t"n/\\"q" }'),
    (b'{"x":{"model":"m"},"model":"m","y":[{"model":"z"}]}', b'{"x":{"model":"m"},"model":"n/\\"q","y":[{"model":"z"}]}'),
    (b'{"mod\\u0065l":"m","x":1}', b'{"mod\\u0065l":"n/\\"q","x":1}'),
    (b'{"a":"\\"model\\":\\"x\\"","model":"m"}', b'{"a":"\\"model\\":\\"x\\"","model":"n/\\"q"}'),
    ('{"a":"北","model":"é"}'.encode(), '{"a":"北","model":"n/\\"q"}'.encode())])
def test_the_edit_changes_the_model_and_no_other_byte(data, edited):
    read_request(data)
    assert with_model(data, 'n/"q') == edited


VALUES = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
                      lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
                          st.sampled_from(["model", "a", "é", "n_discards"]) | st.text(max_size=3), inner, max_size=3),
                      max_leaves=8)


@given(st.dictionaries(st.text(max_size=6), VALUES, max_size=4), st.text(min_size=1, max_size=8), st.booleans(),
       st.sampled_from([None, 1]))
def test_any_body_keeps_everything_but_its_model(more, model, ascii_only, indent):
    data = {**more, "model": model}
    try:
        text = json.dumps(data, ensure_ascii=ascii_only, indent=indent).encode()
    except UnicodeEncodeError:
        return
    try:
        assert read_request(text).model == model
    except BadBody as error:
        assert error.code == "refused_parameter"
        return
    assert json.loads(with_model(text, "other")) == {**data, "model": "other"}


@given(st.binary(max_size=100))
def test_no_bytes_make_it_fail_otherwise(data):
    try:
        read_request(data)
    except BadBody:
        pass
