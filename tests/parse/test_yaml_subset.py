"""The YAML subset: what it reads, what it refuses, and that PyYAML agrees."""
from __future__ import annotations

import time

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.domain.errors import ConfigError
from llmgw.parse import yaml_subset


def read(text):
    return yaml_subset.plain(yaml_subset.load(text.encode("utf-8"), "f.yaml"))


def refusal(data):
    data = data.encode("utf-8") if isinstance(data, str) else data
    with pytest.raises(ConfigError) as caught:
        yaml_subset.load(data, "f.yaml")
    return caught.value.message


ACCEPTED = {
    "map": ("a: 1\nb: two words\n", {"a": "1", "b": "two words"}),
    "scalars stay text": ("a: 0.30\nb: no\nc: 1_000\nd: 0o7\ne: .inf\nf: ~\n",
                          {"a": "0.30", "b": "no", "c": "1_000", "d": "0o7", "e": ".inf", "f": "~"}),
    "key without a value": ("a:\nb: 1\n", {"a": "", "b": "1"}),
    "nested": ("a:\n  b:\n    c: d\n  e: f\n", {"a": {"b": {"c": "d"}, "e": "f"}}),
    "list": ("- a\n- b\n", ["a", "b"]),
    "list at the key's indent": ("a:\n- b\n- c\nd: e\n", {"a": ["b", "c"], "d": "e"}),
    "list deeper": ("a:\n  - b\n  - c\nd: e\n", {"a": ["b", "c"], "d": "e"}),
    "maps in a list": ("m:\n  - name: a\n    x: 1\n  - name: b\n", {"m": [{"name": "a", "x": "1"}, {"name": "b"}]}),
    "map below a dash": ("-\n  a: b\n-\n", [{"a": "b"}, ""]),
    "list in a list": ("- - a\n  - b\n- c\n", [["a", "b"], "c"]),
    "flow": ("a: {b: c, d: [e, f,], g: {h: 'i'}}\n", {"a": {"b": "c", "d": ["e", "f"], "g": {"h": "i"}}}),
    "empty flow": ("a: {}\nb: []\nc: [ ]\n", {"a": {}, "b": [], "c": []}),
    "urls": ("a: https://x:1/y#z\nb: [https://x:1, http://y]\n",
             {"a": "https://x:1/y#z", "b": ["https://x:1", "http://y"]}),
    "flags": ("args: [--a, -b, --c=d]\nmore:\n  - --x\n", {"args": ["--a", "-b", "--c=d"], "more": ["--x"]}),
    "quotes": ("a: 'it''s'\nb: \"x\\n\\t\\\"\\u00e9\"\n'c d': \"\"\n", {"a": "it's", "b": "x\n\t\"é", "c d": ""}),
    "comments": ("# top\na: 1 # one\n  # odd\nb: 'x # y' # z\nc: # under\n  d: e#f\n",
                 {"a": "1", "b": "x # y", "c": {"d": "e#f"}}),
    "document start": ("# c\n--- # d\na: b\n", {"a": "b"}),
    "CRLF": ("a: b\r\nc:\r\n  - d\r\n", {"a": "b", "c": ["d"]}),
    "BOM": ("\ufeffa: b\n", {"a": "b"}),
    "unicode": ("näme: 日本 🙂\n", {"näme": "日本 🙂"}),
    "no newline at the end": ("a: b", {"a": "b"}),
    "spaces around": ("a :   b   \n'c'  : d\n", {"a": "b", "c": "d"}),
    "indented as a whole": ("  a: b\n  c: d\n", {"a": "b", "c": "d"}),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_it_reads_what_pyyaml_reads(name):
    text, expected = ACCEPTED[name]
    assert read(text) == expected
    assert yaml.load(text.encode("utf-8"), Loader=yaml.BaseLoader) == expected


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n", "---\n", "\ufeff"])
def test_an_empty_file_is_an_empty_map(text):
    assert read(text) == {}


REFUSED = [
    ("a: &x b\n", "f.yaml: line 1: a: anchors"),
    ("a: b\nc: *x\n", "f.yaml: line 2: c: aliases"),
    ("a: !!python/object x\n", "f.yaml: line 1: a: tags"),
    ("a: b\n<<: c\n", "f.yaml: line 2: merge keys"),
    ("a: {<<: c}\n", "f.yaml: line 1: a: merge keys"),
    ("a: |\n  b\n", "f.yaml: line 1: a: block scalars"),
    ("a: >-\n  b\n", "f.yaml: line 1: a: block scalars"),
    ("a:\n\tb: c\n", "f.yaml: line 2: a tab"),
    ("a: b\tc\n", "f.yaml: line 1: a tab"),
    ("a: 1\nb: 2\na: 3\n", "f.yaml: line 3: a: this key stands here a second time"),
    ("m:\n  - x: 1\n    x: 2\n", "f.yaml: line 3: m[0].x: this key stands here a second time"),
    ("a: {b: 1, b: 2}\n", "f.yaml: line 1: a.b: this key stands here a second time"),
    ("a: b\n---\nc: d\n", "f.yaml: line 2: more than one document"),
    ("---\n---\n", "f.yaml: line 2: more than one document"),
    ("a: b\n...\n", "f.yaml: line 2: more than one document"),
    ("--- a: b\n", "f.yaml: line 1: more than one document"),
    ("a: ${HOME}\n", "f.yaml: line 1: a: ${...} is not replaced"),
    ("a: '${HOME}'\n", "f.yaml: line 1: a: ${...} is not replaced"),
    ("a: x\n  y\n", "f.yaml: line 2: a: this line would continue"),
    ("a: 'x\n  y'\n", "f.yaml: line 1: a: a quote is not closed"),
    ("a: [x,\n  y]\n", "f.yaml: line 1: a[1]: expected a value here"),
    ("a: [x\n", "f.yaml: line 1: a: expected , or ]"),
    ("a: b: c\n", "f.yaml: line 1: a: a ':' before"),
    ("a: b:\n", "f.yaml: line 1: a: a ':' before"),
    ("a: - b\n", "f.yaml: line 1: a: a list item cannot stand here"),
    ("a: 1\n- b\n", "f.yaml: line 2: a list item where a key was expected"),
    ("- a\nb: c\n", "f.yaml: line 2: this line belongs to no block"),
    ("a:\n    b: 1\n  c: 2\n", "f.yaml: line 3: this line belongs to no block"),
    ("just text\n", "f.yaml: line 1: expected 'KEY: VALUE'"),
    ("a:b\n", "f.yaml: line 1: expected 'KEY: VALUE'"),
    ("? a\n: b\n", "f.yaml: line 1: explicit keys"),
    ("%YAML 1.1\na: b\n", "f.yaml: line 1: directives"),
    ("a: 'x' y\n", "f.yaml: line 1: a: unexpected text after the value"),
    ("a: [x] y\n", "f.yaml: line 1: a: unexpected text after the value"),
    ("a: {b}\n", "f.yaml: line 1: a: expected ': ' after the key"),
    ("a: {b: }\n", "f.yaml: line 1: a: the key 'b' has no value"),
    ("a: [,]\n", "f.yaml: line 1: a[0]: a plain value"),
    ("a: \"\\q\"\n", "f.yaml: line 1: a: unknown escape"),
    ("a: \"\\u0000\"\n", "f.yaml: line 1: a: the escape"),
    ("a: \"\\ud800\"\n", "f.yaml: line 1: a: the escape"),
    ("a: b\rc: d\n", "f.yaml: line 1: the character U+000D"),
    ("a: b\u2028c: d\n", "f.yaml: line 1: the character U+2028"),
    ("a: \x00\n", "f.yaml: line 1: the character U+0000"),
    (b"a: b\nc: \xff\n", "f.yaml: line 2: not UTF-8"),
    ("a: b\n".encode("utf-16"), "f.yaml: line 1: not UTF-8"),
    ("k" * 300 + ": b\n", "f.yaml: line 1: a key of more than"),
]


@pytest.mark.parametrize("data, start", REFUSED, ids=[repr(data)[:40] for data, _ in REFUSED])
def test_the_rest_of_yaml_is_refused_with_line_and_key(data, start):
    assert refusal(data).startswith(start)


def test_ten_megabytes_are_refused_at_once():
    started = time.process_time()
    assert "at most 1048576" in refusal(b"a: b\n" * (2 << 20))
    assert time.process_time() - started < 1


@pytest.mark.parametrize("text", ["a: " + "[" * 500_000, "- " * 500_000, "a: " + "{a: " * 200_000],
                         ids=lambda text: text[:6])
def test_deep_nesting_is_refused(text):
    assert "nested more than" in refusal(text)


def test_deep_blocks_are_refused():
    assert "nested more than" in refusal("".join(" " * level + "a:\n" for level in range(1000)))


@pytest.mark.parametrize("text", [
    "a: x" + " " * 1_000_000 + "y", "a: [" + "b," * 500_000 + "]", "a: '" + "''" * 500_000 + "'",
    "a: \"" + "\\\\" * 500_000 + "\"", "- a\n" * 250_000, "a: " + "x:" * 400_000 + "y",
    "a: 'b'" + " " * 1_000_000, "a: x" + " #" * 500_000, "\n" * 1_000_000, "- '" + "\\" * 1_000_000], ids=lambda text: text[:12].strip())
def test_a_megabyte_of_anything_takes_linear_time(text):
    """CPU time against that of a plain megabyte, as a ratio: a square of a megabyte would take hours."""
    plain = cpu_seconds("a: x" + " y" * 500_000)
    assert cpu_seconds(text[:yaml_subset.MAX_BYTES]) < 400 * max(plain, 0.01)


def cpu_seconds(text):
    started = time.process_time()
    try:
        read(text)
    except ConfigError:
        pass
    return time.process_time() - started


def test_every_key_has_its_line():
    node = yaml_subset.load(b"a: 1\n\n# c\nb:\n  - x: {y: z}\n", "f")
    assert node.lines == {"a": 1, "b": 4}
    inner = node.entries["b"].items[0].entries["x"]
    assert (inner.line, inner.lines) == (5, {"y": 5})


@given(st.binary(max_size=300))
def test_any_bytes_give_a_value_or_our_error(data):
    check(data)


YAMLISH = st.text(alphabet="ab1: -[]{},'\"#\n\\&*!|>%@`?~.$<=x\r\t\u00e9\u2028\ufeff", max_size=60)


@settings(max_examples=1500, deadline=None)
@given(YAMLISH)
def test_what_it_accepts_pyyaml_reads_the_same(text):
    check(text.encode("utf-8"))


PIECES = st.lists(st.sampled_from(
    ["a: ", "b: ", "- ", "\n", "\n  ", "\n    ", "[", "]", "{", "}", ", ", "'", '"', "x", "y z", ":", ": ", "#", " # c",
     "---", "--- ", "\\n", "''", "c:", "k: v\n", "- i\n", "  ", "http://a:1"]), max_size=25).map("".join)


@settings(max_examples=3000, deadline=None)
@given(PIECES)
def test_what_it_accepts_of_likely_pieces_pyyaml_reads_the_same(text):
    check(text.encode("utf-8"))


def check(data):
    try:
        node = yaml_subset.load(data, "f.yaml")
    except ConfigError as error:
        assert error.message.startswith("f.yaml: ") and len(error.message) <= 500
        return
    theirs = yaml.load(data, Loader=yaml.BaseLoader)
    assert yaml_subset.plain(node) == (theirs or {} if theirs in (None, "") else theirs)


TEXT = st.text(st.characters(blacklist_categories=("Cs", "Cc"), blacklist_characters="\u2028\u2029\ufeff\ufffe\uffff$"),
               max_size=20)
KEY = TEXT.filter(lambda key: key != "<<")
DATA = st.recursive(TEXT, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEY, inner, max_size=4),
                    max_leaves=20)


def quote(text):
    return "'" + text.replace("'", "''") + "'"


def dump(value, indent):
    if isinstance(value, dict) and value:
        return "".join(f"\n{' ' * indent}{quote(key)}: {dump(item, indent + 2)}" for key, item in value.items())
    if isinstance(value, list) and value:
        return "".join(f"\n{' ' * indent}- {dump(item, indent + 2)}" for item in value)
    return {"{}": "{}", "[]": "[]"}.get(repr(value), None) or quote(value)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(KEY, DATA, min_size=1, max_size=4))
def test_what_was_written_in_quotes_is_read_back(value):
    assert read(dump(value, 0)) == value
