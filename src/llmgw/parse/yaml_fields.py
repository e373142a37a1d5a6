"""Take typed values out of yaml nodes; every refusal names file, line and key."""
from __future__ import annotations

import difflib
import re
from typing import Callable, Dict, Mapping, NoReturn, Optional, Sequence, Tuple, TypeVar

from llmgw.domain.errors import ParseError
from llmgw.domain.names import check_name
from llmgw.parse.yaml_subset import ListNode, MapNode, Node, Scalar, error

T = TypeVar("T")
_WHOLE = re.compile(r"-?[0-9]{1,15}")


class Value:
    """One node with its place in the file."""

    def __init__(self, node: Node, name: str, key: str, line: Optional[int] = None) -> None:
        self.node, self.name, self.key = node, name, key
        self.line = node.line if line is None else line

    def fail(self, what: str, hint: Optional[str] = None) -> NoReturn:
        """Refuse this value."""
        raise error(self.name, self.line, self.key, what, hint)

    def text(self) -> str:
        """Return a text that is not empty and holds no control character."""
        node = self._scalar("a text")
        if not node.text:
            self.fail("has no value" if not node.quoted else "is empty")
        if any(ord(letter) < 32 for letter in node.text):
            self.fail("a line break or tab inside a value is not allowed here")
        return node.text

    def name_text(self) -> str:
        """Return a text that is allowed as a name."""
        return self.checked(check_name)

    def checked(self, check: Callable[[str], T]) -> T:
        """Return what ``check`` makes of the text; its ParseError gets file, line and key."""
        try:
            return check(self.text())
        except ParseError as bad:
            self.fail(bad.message, bad.hint)

    def whole(self, low: int, high: int) -> int:
        """Return a whole number from ``low`` to ``high``."""
        found = self._scalar("a whole number").text
        if not found:
            self.fail("has no value")
        if not _WHOLE.fullmatch(found):
            self.fail(f"expected a whole number, got {found!r:.60}")
        if not low <= int(found) <= high:
            self.fail(f"expected a number from {low} to {high}, got {int(found)}")
        return int(found)

    def flag(self) -> bool:
        """Return what ``true`` or ``false`` says; no other spelling is one."""
        found = self._scalar("true or false").text
        if found not in ("true", "false"):
            self.fail(f"expected true or false, got {found!r:.60}")
        return found == "true"

    def choice(self, known: Sequence[str]) -> str:
        """Return one of ``known``."""
        found = self.text()
        if found not in known:
            near = difflib.get_close_matches(found[:60], known, 1)
            self.fail(f"unknown value {found!r:.60}" + (f", did you mean {near[0]}" if near else ""),
                      f"known: {', '.join(known)}")
        return found

    def each(self, take: Callable[["Value"], T]) -> Tuple[T, ...]:
        """Return what ``take`` makes of every item of a list."""
        return tuple(take(item) for item in self.items())

    def items(self) -> Tuple["Value", ...]:
        """Return the items of a list."""
        if not isinstance(self.node, ListNode):
            self.fail(f"expected a list, got {_kind(self.node)}", "write [] for none")
        return tuple(Value(item, self.name, f"{self.key}[{index}]")
                     for index, item in enumerate(self.node.items))

    def distinct(self, take: Callable[["Value"], T]) -> Tuple[T, ...]:
        """Return the items of a list in which none stands twice."""
        found: Dict[T, None] = {}
        for item in self.items():
            value = take(item)
            if value in found:
                item.fail(f"{value} stands here a second time")
            found[value] = None
        return tuple(found)

    def members(self) -> Dict[str, "Value"]:
        """Return the values of a map, by key."""
        if not isinstance(self.node, MapNode):
            self.fail(f"expected a map, got {_kind(self.node)}", "write {} for none")
        return {key: Value(inner, self.name, f"{self.key}.{key}" if self.key else key, self.node.lines[key])
                for key, inner in self.node.entries.items()}

    def names(self) -> Dict[str, str]:
        """Return a map of names to names."""
        found = {}
        for key, item in self.members().items():
            try:
                found[check_name(key, "label")] = item.name_text()
            except ParseError as bad:
                item.fail(bad.message, bad.hint)
        return found

    def fields(self, known: Sequence[str], later: Mapping[str, str]) -> Dict[str, "Value"]:
        """Return the values of a map that has only ``known`` keys.

        ``later`` holds keys that this version does not support, each with the sentence that says so.
        """
        members = self.members()
        for key, value in members.items():
            if key in later:
                value.fail(later[key])
            if key not in known:
                near = difflib.get_close_matches(key[:60], list(known), 1)
                value.fail("unknown key" + (f", did you mean {near[0]}" if near else ""),
                           f"known here: {', '.join(known)}")
        return members

    def _scalar(self, wanted: str) -> Scalar:
        if not isinstance(self.node, Scalar):
            self.fail(f"expected {wanted}, got {_kind(self.node)}")
        return self.node


def need(fields: Mapping[str, Value], key: str, whole: Value) -> Value:
    """Return the value of ``key``, which must be there."""
    if key not in fields:
        whole.fail(f"{key} is missing", f"add {key}: to it")
    return fields[key]


def _kind(node: Node) -> str:
    if isinstance(node, ListNode):
        return "a list"
    if isinstance(node, MapNode):
        return "a map"
    return f"the text {node.text!r:.60}" if node.text or node.quoted else "nothing"
