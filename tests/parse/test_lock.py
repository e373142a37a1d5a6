"""Lists of packages: what may stand in one, and how two differ."""
from __future__ import annotations

import pathlib
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.domain.errors import ParseError
from llmgw.parse import lock

SHIPPED = pathlib.Path(lock.__file__).parent.parent / "engines" / "locks"
A, B, C = "a" * 64, "b" * 64, "c" * 64
LIST = f"""# made by a program
idna==3.20 \\
    --hash=sha256:{A} \\
    --hash=sha256:{B}
    # via requests
Torch_Vision==0.28.0+cu130 ; python_version >= '3.9' and sys_platform == 'linux' --hash=sha256:{C}  # a comment
"""


def test_names_versions_markers_and_hashes_are_read_with_their_lines():
    idna, vision = lock.read(LIST, "list")
    assert (idna.name, idna.version, idna.hashes, idna.marker, idna.line) == ("idna", "3.20", (A, B), "", 2)
    assert (vision.name, vision.version, vision.line) == ("torch-vision", "0.28.0+cu130", 6)
    assert vision.marker == "python_version >= '3.9' and sys_platform == 'linux'"


@pytest.mark.parametrize("line, number", [
    ("--index-url https://example.org/simple", 2), ("-i https://example.org/simple", 2), ("--find-links /tmp/wheels", 2),
    ("--extra-index-url=https://example.org", 2), ("-f .", 2), ("-r other.txt", 2), ("-c other.txt", 2), ("-e .", 2),
    ("--editable git+https://example.org/x", 2), ("--no-binary :all:", 2), ("--pre", 2), ("--trusted-host example.org", 2),
    (f"idna @ https://example.org/idna.whl --hash=sha256:{A}", 2), (f"./idna.whl --hash=sha256:{A}", 2),
    (f"https://example.org/idna.whl --hash=sha256:{A}", 2), ("idna==3.20", 2), ("idna", 2), (f"idna>=3 --hash=sha256:{A}", 2),
    (f"idna==3.* --hash=sha256:{A}", 2), (f"idna[all]==3.20 --hash=sha256:{A}", 2), ("idna==3.20 --hash=md5:abc", 2),
    (f"idna==3.20 --hash=sha256:{A[:-1]}", 2), (f"idna==3.20 --hash=sha256:{A}0", 2), (f"idna==3.20 --hash=sha512:{A}{A}", 2),
    (f"idna==3.20 ; x --index-url y --hash=sha256:{A}", 2), (f"idna==3.20 --hash=sha256:{A} --index-url https://x", 2),
    (f"idna==3.20 --hash=sha256:{A} \\\n  --find-links /x", 2), (f"idna==3.20 --hash=sha256:{A.upper()}", 2),
    (f"idna==3.20 --hash=sha256:{A} other==1 --hash=sha256:{B}", 2), (f"-==1 --hash=sha256:{A}", 2),
    (f"idna==3.20 --hash=sha256:{A} \\\n#\\\n-i x", 2), (f"idna==3.20 --hash=sha256:{A}\v--index-url x", 2),
    (f"idna\u2028==3 --hash=sha256:{A}", 2), (f"idna==3.20 --hash=sha256:{A}\x00", 2)])
def test_everything_else_is_refused_with_its_line(line, number):
    with pytest.raises(ParseError) as refused:
        lock.read(f"certifi==1 --hash=sha256:{A}\n{line}\n", "the list of the fleet")
    assert refused.value.message.startswith(f"the list of the fleet: line {number}: ")


def test_a_package_that_comes_twice_is_refused():
    with pytest.raises(ParseError, match="line 2: a-b is named twice"):
        lock.read(f"a-b==1 --hash=sha256:{A}\nA_B==2 --hash=sha256:{A}\n", "list")


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n", "x" * (lock.MAX_BYTES + 1)])
def test_a_list_of_nothing_or_too_much_is_refused(text):
    with pytest.raises(ParseError):
        lock.read(text, "list")


def test_differences_name_the_lines():
    ours = lock.read(f"idna==3.20 --hash=sha256:{A} --hash=sha256:{B}\nnumpy==2.3.5 --hash=sha256:{A}\nuvloop==1 --hash=sha256:{A}\n"
                     f"new==1 --hash=sha256:{A}\n", "ours")
    theirs = lock.read(f"idna==3.20 --hash=sha256:{A} --hash=sha256:{C}\nnumpy==2.3.6 --hash=sha256:{B}\nevil==1 --hash=sha256:{B}\n"
                       f"uvloop==1 --hash=sha256:{A}\n", "theirs")
    assert lock.differences(theirs, ours) == (
        "line 3: evil==1 is not what this node finds: no such package is needed",
        "line 1: idna==3.20: this node finds no file with sha256 cccccccccccccccc…",
        "line 1: idna==3.20: the file with sha256 bbbbbbbbbbbbbbbb… is not listed",
        "line 2: numpy==2.3.6, this node finds 2.3.5",
        "new==1 is not in the list")
    assert lock.differences(ours, ours) == ()


def test_many_differences_are_counted():
    assert lock.sentence(["a", "b"]) == "a; b"
    assert lock.sentence([str(n) for n in range(9)]) == "0; 1; 2; 3; 4; and 4 more"


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.txt")), ids=lambda path: path.name)
def test_a_shipped_list_is_a_list_and_says_what_it_is(path):
    text = path.read_text(encoding="ascii")
    pins = lock.read(text, path.name)
    engine, _, version = path.stem.rpartition("-")
    assert next(pin.version for pin in pins if pin.name == engine) == version
    assert text.startswith(f"# The packages of {engine} {version}") and "as of " in text.splitlines()[0]
    body = "".join(line + "\n" for line in text.splitlines() if not line.startswith("#"))
    assert body == lock.write(pins)               # nothing stands there that is not in the list


def test_the_shipped_list_of_vllm_has_its_196_packages():
    pins = lock.read((SHIPPED / "vllm-0.30.0.txt").read_text(encoding="ascii"), "list")
    assert len(pins) == 196 and {"torch", "triton", "transformers"} <= {pin.name for pin in pins}


names = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,8}[a-z0-9])?", fullmatch=True).map(lambda text: "-".join(filter(None, text.split("-"))))
pins = st.lists(st.builds(
    lock.Pin, names, st.from_regex(r"[0-9]{1,3}(\.[0-9]{1,3}){0,3}", fullmatch=True),
    st.lists(st.text("0123456789abcdef", min_size=64, max_size=64), min_size=1, max_size=3, unique=True).map(lambda h: tuple(sorted(h))),
    st.sampled_from(["", "python_version >= '3.9'", 'sys_platform == "linux"'])),
    min_size=1, max_size=6, unique_by=lambda pin: (pin.name, pin.marker))


def bare(found):
    return [(pin.name, pin.version, pin.hashes, pin.marker) for pin in found]


@given(pins)
def test_what_is_written_is_read_back(made):
    text = lock.write(made)
    found = lock.read(text, "list")
    assert bare(found) == sorted(bare(made), key=lambda item: (item[0], item[3]))
    assert lock.write(found) == text and lock.digest(found) == lock.digest(reversed(found))
    assert lock.differences(found, found) == ()


@given(pins, pins)
def test_lists_differ_exactly_when_their_texts_do(one, other):
    assert bool(lock.differences(one, other)) == (lock.write(one) != lock.write(other))


@given(pins, st.text(string.printable + "\u2028\x85", min_size=1, max_size=60), st.data())
def test_whatever_is_put_into_a_list_is_refused_or_is_a_package_or_a_comment(made, foreign, data):
    lines = lock.write(made).split("\n")
    at = data.draw(st.integers(0, len(lines)))
    try:
        found = lock.read("\n".join([*lines[:at], foreign, *lines[at:]]), "list")
    except ParseError:
        return
    written = lock.write(found)                   # what reaches uv: only this
    for line in written.splitlines():
        assert line.startswith("    --hash=sha256:") or (line[0].isalnum() and "==" in line and " -" not in line)
