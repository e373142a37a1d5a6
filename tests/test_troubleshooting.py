"""docs/troubleshooting.md quotes the product: every quoted sentence still is one that the source can say."""
from __future__ import annotations

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
FOREIGN = ("llama_server: exiting due to model loading error",)      # words of an engine, at the end of ours
BEGIN = r"(?:^|(?<=: )|(?<=; )|(?<=  )|(?<=\(try: )|(?=; ))"      # a sentence does not begin in the middle of another
SHORTEST = 10                     # letters of ours that a template must have to prove anything


def sentences():
    """Return every text in src, with a NUL where a value is filled in."""
    found = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(re.sub(r"%[-.\d]*[sdfrg]", "\0", node.value))
            elif isinstance(node, ast.JoinedStr):
                found.add("".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values))
    return found


SENTENCES = sentences()
TEMPLATES = [text.strip().split("\0") for text in SENTENCES
             if len(text.replace("\0", "").strip()) >= SHORTEST and " " in text and "\n" not in text]


def is_said(words):
    """Whether src has a text that, filled in, is a part of ``words``; a short one must be its whole end."""
    if words.rpartition(": ")[2] in SENTENCES:
        return True
    return any(max(parts, key=len) in words and re.search(BEGIN + ".+?".join(map(re.escape, parts)), words)
               for parts in TEMPLATES)


def quoted():
    """Return (line, what is quoted there) for every line of a block of output and every sentence of a table."""
    lines, inside = [], False
    for number, line in enumerate(PAGE.splitlines(), 1):
        if line.startswith("```"):
            inside = line == "```text"
        elif inside:
            lines.append((number, line))
        elif line.startswith("| 4") or line.startswith("| 5"):
            lines += [(number, part) for part in re.findall(r"`([a-z][^`]* [^`]*)`", line.split("|")[2])]
    return lines


@pytest.mark.parametrize("number, line", quoted(), ids=lambda value: str(value)[:60])
def test_a_quoted_sentence_is_one_that_the_source_says(number, line):
    words = re.sub(r"^(llmgw: |  try: )", "", line).strip()
    for foreign in FOREIGN:
        words = words.replace(foreign, "")
    assert is_said(words), f"line {number}: nothing in src says {line!r}"


def test_the_page_is_short_enough_to_be_read_and_every_block_is_closed():
    assert PAGE.count("```") % 2 == 0 and len(PAGE.splitlines()) < 300
    assert all(len(line) < 240 for line in PAGE.splitlines() if not line.startswith(("llmgw", "  ", "WARN", "ERR", "|")))


def test_a_sentence_that_nobody_says_would_be_noticed():
    assert is_said("/var/lib/llmgw/server/llmgw.db: the database is damaged: file is not a database")
    assert not is_said("/var/lib/llmgw/server/llmgw.db: the database is spoiled: file is not a database")
    assert not is_said("the flux capacitor of node-1 is out of plutonium")
