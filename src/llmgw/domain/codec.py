"""Records as data: how a frozen value becomes JSON and comes back.

Unknown fields are ignored (versions one apart understand each other), a missing
field takes its default or is refused with its path, and no type is guessed.
"""
from __future__ import annotations

import enum
from dataclasses import MISSING, fields
from typing import Any, Dict, Generic, Mapping, Optional, Tuple, Type, TypeVar

from llmgw.domain.errors import ParseError
from llmgw.domain.secret import Secret

T = TypeVar("T")


class Codec(Generic[T]):
    """``encode`` gives JSON-ready data; ``decode`` gives the value or a ParseError with ``path``."""

    def encode(self, value: T) -> Any:
        return value

    def decode(self, data: Any, path: str) -> T:
        raise NotImplementedError(path)   # pragma: no cover - every codec below has its own


class _Plain(Codec[T]):
    def __init__(self, kind: Type[T], name: str) -> None:
        self._kind, self._name = kind, name

    def decode(self, data: Any, path: str) -> T:
        if not isinstance(data, self._kind) or (isinstance(data, bool) and self._kind is not bool):
            raise ParseError(f"{path}: expected {self._name}, got {type(data).__name__}")
        return data


class _Number(Codec[float]):
    def decode(self, data: Any, path: str) -> float:
        if isinstance(data, bool) or not isinstance(data, (int, float)) or data != data:
            raise ParseError(f"{path}: expected a number, got {type(data).__name__}")
        return float(data)


class _Secret(Codec[Secret]):
    def encode(self, value: Secret) -> Any:
        return value.reveal()

    def decode(self, data: Any, path: str) -> Secret:
        return Secret(text.decode(data, path))


class _Optional(Codec[Optional[T]]):
    def __init__(self, inner: Codec[T]) -> None:
        self._inner = inner

    def encode(self, value: Optional[T]) -> Any:
        return None if value is None else self._inner.encode(value)

    def decode(self, data: Any, path: str) -> Optional[T]:
        return None if data is None else self._inner.decode(data, path)


class _Tuple(Codec[Tuple[T, ...]]):
    def __init__(self, inner: Codec[T]) -> None:
        self._inner = inner

    def encode(self, value: Tuple[T, ...]) -> Any:
        return [self._inner.encode(item) for item in value]

    def decode(self, data: Any, path: str) -> Tuple[T, ...]:
        if not isinstance(data, (list, tuple)):
            raise ParseError(f"{path}: expected a list, got {type(data).__name__}")
        return tuple(self._inner.decode(item, f"{path}[{index}]") for index, item in enumerate(data))


class _Pair(Codec[Tuple[Any, Any]]):
    def __init__(self, first: Codec[Any], second: Codec[Any]) -> None:
        self._codecs = (first, second)

    def encode(self, value: Tuple[Any, Any]) -> Any:
        return [codec.encode(item) for codec, item in zip(self._codecs, value)]

    def decode(self, data: Any, path: str) -> Tuple[Any, Any]:
        if not isinstance(data, (list, tuple)) or len(data) != 2:
            raise ParseError(f"{path}: expected a list of two")
        first, second = (codec.decode(item, f"{path}[{index}]")
                         for index, (codec, item) in enumerate(zip(self._codecs, data)))
        return first, second


class _Mapping(Codec[Mapping[str, T]]):
    def __init__(self, inner: Codec[T]) -> None:
        self._inner = inner

    def encode(self, value: Mapping[str, T]) -> Any:
        return {key: self._inner.encode(item) for key, item in value.items()}

    def decode(self, data: Any, path: str) -> Mapping[str, T]:
        if not isinstance(data, Mapping):
            raise ParseError(f"{path}: expected an object, got {type(data).__name__}")
        return {text.decode(key, path): self._inner.decode(item, f"{path}.{key}")
                for key, item in data.items()}


E = TypeVar("E", bound=enum.Enum)


class _Enum(Codec[E]):
    def __init__(self, kind: Type[E]) -> None:
        self._kind = kind

    def encode(self, value: E) -> Any:
        return value.value

    def decode(self, data: Any, path: str) -> E:
        try:
            return self._kind(data)
        except ValueError:
            known = ", ".join(str(item.value) for item in self._kind)
            raise ParseError(f"{path}: unknown value {data!r:.100}", hint=f"known: {known}") from None


class Record(Codec[T]):
    """A dataclass, field by field; the table of fields is written out, nothing is reflected on types."""

    def __init__(self, kind: Type[T], /, **codecs: Codec[Any]) -> None:
        self._kind = kind
        self._codecs = codecs
        self._required = set()
        for item in fields(kind):  # type: ignore[arg-type]
            if item.name not in codecs:
                raise TypeError(f"{kind.__name__}.{item.name} has no codec")
            if item.default is MISSING and item.default_factory is MISSING:
                self._required.add(item.name)

    def encode(self, value: T) -> Dict[str, Any]:
        return {name: codec.encode(getattr(value, name)) for name, codec in self._codecs.items()}

    def decode(self, data: Any, path: str = "") -> T:
        where = path or self._kind.__name__
        if not isinstance(data, Mapping):
            raise ParseError(f"{where}: expected an object, got {type(data).__name__}")
        values = {}
        for name, codec in self._codecs.items():
            if name in data:
                values[name] = codec.decode(data[name], f"{where}.{name}")
            elif name in self._required:
                raise ParseError(f"{where}.{name}: missing")
        return self._kind(**values)


text: Codec[str] = _Plain(str, "a text")
whole: Codec[int] = _Plain(int, "a whole number")
flag: Codec[bool] = _Plain(bool, "true or false")
number: Codec[float] = _Number()
secret: Codec[Secret] = _Secret()
texts: Codec[Tuple[str, ...]] = _Tuple(text)
text_map: Codec[Mapping[str, str]] = _Mapping(text)


def optional(inner: Codec[T]) -> Codec[Optional[T]]:
    """The value or null."""
    return _Optional(inner)


def tuple_of(inner: Codec[T]) -> Codec[Tuple[T, ...]]:
    """A list, kept in order."""
    return _Tuple(inner)


def pair(first: Codec[Any], second: Codec[Any]) -> Codec[Tuple[Any, Any]]:
    """A list of exactly two."""
    return _Pair(first, second)


def map_of(inner: Codec[T]) -> Codec[Mapping[str, T]]:
    """An object with text keys."""
    return _Mapping(inner)


def one_of(kind: Type[E]) -> Codec[E]:
    """An enum by its value."""
    return _Enum(kind)
