"""The few things of an OpenAI request that a router must know. The body itself passes on unchanged."""
from __future__ import annotations

import json
import re
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, List, NamedTuple, Optional, Tuple

from llmgw.domain.errors import ParseError

PREFIX_CHARACTERS = 4096

_SPACE = re.compile(r"[ \t\n\r]*")
_MODEL = re.compile(r'"model"[ \t\n\r]*:[ \t\n\r]*(?=")')
_DECODER = json.JSONDecoder()
_SCAN = _DECODER.scan_once    # type: ignore[attr-defined]


class BadBody(ParseError):
    """A request that is refused; ``param`` and ``code`` are OpenAI's."""

    reason = "BadBody"

    def __init__(self, message: str, *, param: Optional[str] = None, code: str = "invalid_body") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class CompletionRequest(NamedTuple):
    """``prefix`` is the beginning of the prompt, for affinity; empty when there is none."""

    model: str
    stream: bool
    prefix: str


def read_request(body: bytes) -> CompletionRequest:
    """Return what a router needs of ``body``; BadBody when an engine could read it differently."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError:
        raise BadBody("the body is not UTF-8") from None
    data = _parsed(text, body)
    if type(data) is not dict:
        raise BadBody("the body is not a JSON object")
    model = data.get("model")
    if type(model) is not str or not model:
        raise BadBody("the model is missing or not a text", param="model", code="missing_model")
    return CompletionRequest(model, data.get("stream") is True, _prefix(data))


def with_model(body: bytes, name: str) -> bytes:
    """Return ``body``, which ``read_request`` took, with its model named ``name``; no other byte changes."""
    text = body.decode("utf-8")
    start, end = _model_span(text)
    return (text[:start] + json.dumps(name) + text[end:]).encode("utf-8")


def _parsed(text: str, body: bytes) -> Any:
    try:
        # Only the outermost key can be the one "model" there is, unless a key is spelled with escapes.
        if not text.startswith("{") or body.count(b'"model"') != 1 or b"\\u00" in body:
            return _parsed_by_pairs(text)
        data, end = _SCAN(text, 0)                # what json.loads does, without its three layers
        if end != len(text) and _skip(text, end) != len(text):
            raise BadBody("the body is not JSON: something follows its end")
        return _parsed_by_pairs(text) if "n_discard" in data or "prompt_embeds" in data else data
    except RecursionError:
        raise BadBody("the body is nested too deeply") from None
    except StopIteration as error:
        raise BadBody(f"the body is not JSON: no value at character {error.value}") from None
    except ValueError as error:
        raise BadBody(f"the body is not JSON: {str(error)[:120]}") from None


def _parsed_by_pairs(text: str) -> Any:
    """Return the value in ``text``; refuse what two readers could take differently, and the deny-list."""
    outermost: List[Tuple[str, Any]] = []

    def remember(pairs: List[Tuple[str, Any]]) -> Any:
        outermost[:] = pairs                      # the last call is for the outermost object
        return dict(pairs)

    data = json.loads(text, object_pairs_hook=remember)
    if type(data) is dict:
        _refuse(outermost)
    return data


def _refuse(pairs: List[Tuple[str, Any]]) -> None:
    names = [name for name, _ in pairs]
    if names.count("model") > 1:
        raise BadBody("more than one model key", param="model", code="duplicate_model")
    for name, value in pairs:
        if name == "prompt_embeds":      # torch.load of the client's bytes: CVE-2025-62164
            raise BadBody("prompt_embeds is not accepted", param=name, code="refused_parameter")
        if name == "n_discard" and not (type(value) is int and value >= 0):   # CVE-2026-21869
            raise BadBody("n_discard must be a whole number, 0 or more", param=name,
                          code="refused_parameter")


def _prefix(data: Any) -> str:
    messages = data.get("messages")
    if type(messages) is list:
        return _messages_prefix(messages)
    prompt = data.get("prompt")
    if type(prompt) is str:
        return prompt[:PREFIX_CHARACTERS]
    if type(prompt) is list:
        return repr(prompt[:PREFIX_CHARACTERS // 4])[:PREFIX_CHARACTERS]
    return ""


def _messages_prefix(messages: List[Any]) -> str:
    """Return what leads up to, and is, the first message of the user."""
    prefix = ""
    for message in messages[:8]:
        if type(message) is not dict:
            continue
        content = message.get("content")
        if type(content) is str:
            prefix += content[:PREFIX_CHARACTERS]
        elif type(content) is list:
            prefix += "".join(part["text"][:PREFIX_CHARACTERS] for part in content[:64]
                              if type(part) is dict and type(part.get("text")) is str)
        if message.get("role") == "user" or len(prefix) >= PREFIX_CHARACTERS:
            break
        prefix += "\n"
    return prefix[:PREFIX_CHARACTERS]


def _model_span(text: str) -> Tuple[int, int]:
    """Return where the value of the outermost ``model`` stands, quotes included."""
    if text.count('"model"') == 1 and "\\u00" not in text:
        match = _MODEL.search(text)      # the only one: read_request saw that it is the outermost
        if match is not None:
            return match.end(), scanstring(text, match.end() + 1, True)[1]
    at = _skip(text, 0) + 1              # walk over the outermost object
    while True:
        key, at = scanstring(text, _skip(text, at) + 1, True)
        start = _skip(text, _skip(text, at) + 1)
        _, end = _DECODER.raw_decode(text, start)
        if key == "model":
            return start, end
        at = _skip(text, end) + 1        # past the comma


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match is not None else at
