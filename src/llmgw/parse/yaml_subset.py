"""A small, strict part of YAML with line numbers: bytes -> nodes whose scalars are still text.

Block maps and lists, one-line flow lists and maps, comments, plain and quoted scalars.
What is accepted here, PyYAML reads the same; everything else of YAML is refused with
its line, because each of those features has made a file mean what nobody wrote.
"""
from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Dict, List, NoReturn, Optional, Tuple, Union

from llmgw.domain.errors import ConfigError

MAX_BYTES = 1 << 20
MAX_DEPTH = 24
MAX_KEY = 200             # as written; PyYAML refuses more than 1024

# Line breaks of YAML 1.1 that editors do not show as such, and what no YAML stream may hold.
_FORBIDDEN = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
_COLON = re.compile(r":(?= |$)")
_FLOW_END = re.compile(r"[,\[\]{}?]|:(?=[ ,\[\]{}]|$)| #")
_DOUBLE = re.compile(r'"((?:[^"\\]|\\.)*)"')
_SINGLE = re.compile(r"'((?:[^']|'')*)'")
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|(.))")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", '"': '"', "\\": "\\", "/": "/"}
_FITS_NOWHERE = "this line belongs to no block above it; check its indentation"
_REFUSED_START = {
    "&": "anchors (&) are not supported", "*": "aliases (*) are not supported",
    "!": "tags (!) are not supported", "|": "block scalars (|) are not supported",
    ">": "block scalars (>) are not supported", "%": "directives (%) are not supported",
    "@": "a plain value cannot start with @", "`": "a plain value cannot start with `",
    "?": "explicit keys (?) are not supported", ":": "a plain value cannot start with :",
    ",": "a plain value cannot start with a comma",
    "]": "there is a ] too much", "}": "there is a } too much",
}


@dataclass(frozen=True)
class Scalar:
    """A text. ``quoted`` tells ``""`` from a key without a value."""

    text: str
    line: int
    quoted: bool = False


@dataclass(frozen=True)
class ListNode:
    """Items in the order of the file."""

    items: Tuple[Node, ...]
    line: int


@dataclass(frozen=True)
class MapNode:
    """Keys in the order of the file; ``lines`` has the line of each key."""

    entries: Dict[str, Node]
    lines: Dict[str, int]
    line: int


Node = Union[Scalar, ListNode, MapNode]


@dataclass(frozen=True)
class _Line:
    number: int
    indent: int
    text: str                 # without the indent; never empty, never only a comment


def load(data: bytes, name: str) -> Node:
    """Return the map or list in ``data`` (an empty map for an empty file); ConfigError names line and key."""
    lines = _lines(data, name)
    if not lines:
        return MapNode({}, {}, 1)
    parser = _Parser(name, lines)
    node = parser.block(lines[0].indent, "", 0)
    if parser.at < len(lines):
        parser.fail_at("", _FITS_NOWHERE)
    return node


def error(name: str, line: int, key: str, what: str, hint: Optional[str] = None) -> ConfigError:
    """Return the one form of configuration error: ``FILE: line N: KEY: what``."""
    where = f"{key:.120}: " if key else ""
    return ConfigError(f"{name}: line {line}: {where}{what}", hint=hint)


def plain(node: Node) -> Any:
    """Return ``node`` as dicts, lists and texts."""
    if isinstance(node, Scalar):
        return node.text
    if isinstance(node, ListNode):
        return [plain(item) for item in node.items]
    return {key: plain(value) for key, value in node.entries.items()}


def _lines(data: bytes, name: str) -> List[_Line]:
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{name}: {len(data)} bytes; a configuration file has at most {MAX_BYTES}",
                          hint="check that this is the right file")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as bad:
        number = data.count(b"\n", 0, bad.start) + 1
        raise error(name, number, "", "not UTF-8", "save the file as UTF-8") from None
    text = text[1:] if text.startswith("\ufeff") else text
    found = []
    for number, raw in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        _check_characters(raw, name, number)
        body = raw.lstrip(" ")
        if body and not body.startswith("#"):
            found.append(_Line(number, len(raw) - len(body), body))
    if found and found[0].indent == 0 and found[0].text[:_code_end(found[0].text, 0)].rstrip(" ") == "---":
        del found[0]
    for line in found:
        if _is_marker(line, "---") or _is_marker(line, "..."):
            raise error(name, line.number, "", "more than one document",
                        f"remove the line that starts with {line.text[:3]}")
    return found


def _check_characters(raw: str, name: str, number: int) -> None:
    bad = _FORBIDDEN.search(raw)
    if bad is None:
        return
    if bad.group() == "\t":
        raise error(name, number, "", "a tab", 'indent with spaces; inside a value write "\\t"')
    raise error(name, number, "", f"the character U+{ord(bad.group()):04X} is not allowed",
                "remove it, or write it as an escape in double quotes")


def _is_marker(line: _Line, marker: str) -> bool:
    return line.indent == 0 and (line.text == marker or line.text.startswith(marker + " "))


class _Parser:
    """Reads logical lines top-down; ``at`` is the next one."""

    def __init__(self, name: str, lines: List[_Line]) -> None:
        self._name, self._lines, self.at = name, lines, 0

    def fail(self, line: int, key: str, what: str, hint: Optional[str] = None) -> NoReturn:
        raise error(self._name, line, key, what, hint)

    def fail_at(self, key: str, what: str) -> NoReturn:
        self.fail(self._lines[self.at].number, key, what)

    def block(self, indent: int, key: str, depth: int) -> Node:
        """Return the list or map whose first line is next."""
        if depth >= MAX_DEPTH:
            self.fail_at(key, f"nested more than {MAX_DEPTH} deep")
        if _is_item(self._lines[self.at].text):
            return self._list(indent, key, depth)
        return self._map(indent, key, depth)

    def _list(self, indent: int, key: str, depth: int) -> ListNode:
        first = self._lines[self.at].number
        items: List[Node] = []
        while self._next_is(indent, key) and _is_item(self._lines[self.at].text):
            line = self._lines[self.at]
            where = f"{key}[{len(items)}]"
            rest = line.text[1:].lstrip(" ")
            if not rest or rest.startswith("#"):
                items.append(self._nested(indent, where, depth, line.number, same_indent=False))
            elif _is_item(rest) or self._key_end(rest, line.number, where) is not None:
                inner = indent + len(line.text) - len(rest)
                self._lines[self.at] = _Line(line.number, inner, rest)
                items.append(self.block(inner, where, depth + 1))
            else:
                items.append(self._inline(rest, line, where, depth))
        return ListNode(tuple(items), first)

    def _map(self, indent: int, key: str, depth: int) -> MapNode:
        first = self._lines[self.at].number
        entries: Dict[str, Node] = {}
        lines: Dict[str, int] = {}
        while self._next_is(indent, key):
            line = self._lines[self.at]
            end = None if _is_item(line.text) else self._key_end(line.text, line.number, key)
            if end is None:
                self._no_key(line, key)
            name = self._key(line.text[:end], line.number, key, entries)
            where = f"{key}.{name}" if key else name
            rest = line.text[end + 1:].lstrip(" ")
            lines[name] = line.number
            if not rest or rest.startswith("#"):
                entries[name] = self._nested(indent, where, depth, line.number, same_indent=True)
            else:
                entries[name] = self._inline(rest, line, where, depth)
        return MapNode(entries, lines, first)

    def _next_is(self, indent: int, key: str) -> bool:
        """Whether the next line belongs to the block at ``indent``; refuses one that fits nowhere."""
        if self.at >= len(self._lines) or self._lines[self.at].indent < indent:
            return False
        if self._lines[self.at].indent > indent:
            self.fail_at(key, _FITS_NOWHERE)
        return True

    def _nested(self, indent: int, key: str, depth: int, line: int, *, same_indent: bool) -> Node:
        """Return the block below a key or dash without a value of its own, or the empty scalar."""
        self.at += 1
        if self.at < len(self._lines):
            following = self._lines[self.at]
            listed = same_indent and following.indent == indent and _is_item(following.text)
            if following.indent > indent or listed:
                return self.block(following.indent, key, depth + 1)
        return Scalar("", line)

    def _inline(self, text: str, line: _Line, key: str, depth: int) -> Node:
        """Return the value that stands whole on this line."""
        node, end = self._value(text, 0, line.number, key, depth, flow=False)
        left = text[end:_code_end(text, end)]
        if left.strip(" "):
            self.fail(line.number, key, f"unexpected text after the value: {left.strip(' ')!r:.60}",
                      "put the whole value in quotes")
        self.at += 1
        if self.at < len(self._lines) and self._lines[self.at].indent > line.indent:
            self.fail_at(key, "this line would continue the value above; a value is one line")
        return node

    def _value(self, text: str, at: int, line: int, key: str, depth: int, *,
               flow: bool) -> Tuple[Node, int]:
        """Return the value at ``text[at]`` and where it ends."""
        start = text[at:at + 1]
        if start in ("[", "{"):
            if depth >= MAX_DEPTH:
                self.fail(line, key, f"nested more than {MAX_DEPTH} deep")
            return (self._flow_list if start == "[" else self._flow_map)(text, at + 1, line, key, depth + 1)
        if start in ('"', "'"):
            content, end = self._quoted(text, at, line, key)
            return Scalar(content, line, True), end
        return self._plain(text, at, line, key, flow=flow)

    def _flow_list(self, text: str, at: int, line: int, key: str, depth: int) -> Tuple[Node, int]:
        items: List[Node] = []
        while True:
            at = _skip(text, at)
            if text[at:at + 1] == "]":
                return ListNode(tuple(items), line), at + 1
            item, at = self._value(text, at, line, f"{key}[{len(items)}]", depth, flow=True)
            items.append(item)
            at = self._separator(text, at, line, key, "]")

    def _flow_map(self, text: str, at: int, line: int, key: str, depth: int) -> Tuple[Node, int]:
        entries: Dict[str, Node] = {}
        while True:
            at = _skip(text, at)
            if text[at:at + 1] == "}":
                return MapNode(entries, {name: line for name in entries}, line), at + 1
            start = at
            name, at = self._flow_key(text, at, line, key)
            at = _skip(text, at)
            if not _COLON.match(text, at):
                self.fail(line, key, f"expected ': ' after the key {name!r:.60}",
                          "write a flow map as {key: value, key: value}")
            self._check_key(name, at - start, line, key, entries)
            at = _skip(text, at + 1)
            if text[at:at + 1] in (",", "}"):
                self.fail(line, key, f"the key {name!r:.60} has no value")
            where = f"{key}.{name}" if key else name
            entries[name], at = self._value(text, at, line, where, depth, flow=True)
            at = self._separator(text, at, line, key, "}")

    def _flow_key(self, text: str, at: int, line: int, key: str) -> Tuple[str, int]:
        if text[at:at + 1] in ("[", "{"):
            self.fail(line, key, "a list or map cannot be a key")
        if text[at:at + 1] in ('"', "'"):
            return self._quoted(text, at, line, key)
        scalar, end = self._plain(text, at, line, key, flow=True)
        self._check_merge(scalar.text, line, key)
        return scalar.text, end

    def _separator(self, text: str, at: int, line: int, key: str, close: str) -> int:
        at = _skip(text, at)
        found = text[at:at + 1]
        if found == ",":
            return at + 1
        if found != close:
            self.fail(line, key, f"expected , or {close} on this line",
                      "a flow list or map ends on the line where it begins; put odd values in quotes")
        return at

    def _plain(self, text: str, at: int, line: int, key: str, *, flow: bool) -> Tuple[Scalar, int]:
        self._check_start(text, at, line, key, flow)
        if flow:
            found = _FLOW_END.search(text, at)
            end = found.start() if found else len(text)
        else:
            end = _code_end(text, at)
            if _COLON.search(text, at, end):
                self.fail(line, key, "a ':' before a space or the end, inside a value",
                          "put the value in quotes")
        content = text[at:end].rstrip(" ")
        self._check_text(content, line, key)
        return Scalar(content, line), end

    def _check_start(self, text: str, at: int, line: int, key: str, flow: bool) -> None:
        start, after = text[at:at + 1], text[at + 1:at + 2]
        if not start or start == "#":
            self.fail(line, key, "expected a value here",
                      "a flow list or map ends on the line where it begins")
        if start in _REFUSED_START:
            self.fail(line, key, _REFUSED_START[start], "put the value in quotes")
        if start == "-" and (after in ("", " ") or (flow and after in ",[]{}")):
            self.fail(line, key, "a list item cannot stand here",
                      "start the list on the next line, or write it as [a, b]")

    def _quoted(self, text: str, at: int, line: int, key: str) -> Tuple[str, int]:
        double = text[at] == '"'
        match = (_DOUBLE if double else _SINGLE).match(text, at)
        if match is None:
            self.fail(line, key, "a quote is not closed on this line")
        content = match.group(1)
        content = self._unescape(content, line, key) if double else content.replace("''", "'")
        self._check_text(content, line, key)
        return content, match.end()

    def _unescape(self, content: str, line: int, key: str) -> str:
        def one(match: "re.Match[str]") -> str:
            two, four, letter = match.groups()
            if letter is not None:
                if letter not in _ESCAPED:
                    self.fail(line, key, f"unknown escape \\{letter}", "in double quotes write \\\\ for one \\")
                return _ESCAPED[letter]
            code = int(two or four, 16)
            if code == 0 or 0xD800 <= code < 0xE000:
                self.fail(line, key, f"the escape {match.group()} is not allowed")
            return chr(code)
        return _ESCAPE.sub(one, content)

    def _check_text(self, content: str, line: int, key: str) -> None:
        if "${" in content:
            self.fail(line, key, "${...} is not replaced: values are literal",
                      "write the value itself; secrets go into files of their own")

    def _key_end(self, text: str, line: int, key: str) -> Optional[int]:
        """Return where the ':' of a block key stands, None when the line holds no key."""
        if text[0] in ('"', "'"):
            _, end = self._quoted(text, 0, line, key)
            end = _skip(text, end)
            return end if _COLON.match(text, end) else None
        if text[0] in "[{":
            return None
        colon = _COLON.search(text, 0, _code_end(text, 0))
        return colon.start() if colon else None

    def _key(self, text: str, line: int, parent: str, entries: Dict[str, Node]) -> str:
        name = text.rstrip(" ")
        if text[:1] in ('"', "'"):
            name = self._quoted(text, 0, line, parent)[0]
        else:
            self._check_start(text, 0, line, parent, False)
            self._check_text(text, line, parent)
            self._check_merge(name, line, parent)
        self._check_key(name, len(text), line, parent, entries)
        return name

    def _check_merge(self, name: str, line: int, parent: str) -> None:
        if name == "<<":
            self.fail(line, parent, "merge keys (<<) are not supported")

    def _check_key(self, name: str, length: int, line: int, parent: str, entries: Dict[str, Node]) -> None:
        if name in entries:
            self.fail(line, f"{parent}.{name}" if parent else name, "this key stands here a second time",
                      "keep one of them")
        if length > MAX_KEY:
            self.fail(line, parent, f"a key of more than {MAX_KEY} characters")

    def _no_key(self, line: _Line, key: str) -> NoReturn:
        if _is_item(line.text):
            self.fail(line.number, key, "a list item where a key was expected")
        if line.text[0] in _REFUSED_START:
            self.fail(line.number, key, _REFUSED_START[line.text[0]])
        self.fail(line.number, key, f"expected 'KEY: VALUE', got {line.text!r:.60}",
                  "a space belongs after the colon; a value stands on the line of its key")


def _is_item(text: str) -> bool:
    return text == "-" or text.startswith("- ")


def _code_end(text: str, at: int) -> int:
    """Return where the comment of a line starts, or the line's end."""
    found = text.find(" #", at)
    return len(text) if found < 0 else found


def _skip(text: str, at: int) -> int:
    while text[at:at + 1] == " ":
        at += 1
    return at
