"""Requests and responses as values, and the one table that says who may call what.

Nothing is open by default: a route opens to the roles it names and to nobody
else, and an unknown path is only told to somebody who has shown a token.
"""
from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Callable, Dict, List, Mapping, Optional, Sequence, Tuple
from urllib.parse import parse_qsl, unquote

from llmgw.domain import errors
from llmgw.domain.errors import ApiError, Forbidden, LlmgwError, NotFound, ParseError, Unauthorized

PUBLIC = "public"
BODY_BYTES = 4 << 20          # what a route takes unless it says otherwise
MAX_DEPTH = 64                # json on Python 3.13 overruns a 256 KiB stack before it notices
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_NO_BRACKET = re.compile(rb"[^\[\]{}]+")


@dataclass(frozen=True)
class Caller:
    """Whose token it was."""

    role: str
    id: str = ""
    name: str = ""            # of the node or router that the token is bound to


@dataclass(frozen=True)
class Request:
    """One whole request. Header names are lower-case; ``args`` are the decoded path segments."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    args: Mapping[str, str] = field(default_factory=dict)
    caller: Caller = Caller("")

    def json(self) -> Any:
        """Return the body as JSON data; ParseError when it is not, or nested too deep."""
        depth = 0
        for mark in _NO_BRACKET.sub(b"", _STRING.sub(b"", self.body)):
            depth += 1 if mark in b"[{" else -1
            if depth > MAX_DEPTH:
                raise ParseError(f"body of {self.method} {self.path}: nested deeper than {MAX_DEPTH}")
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise ParseError(f"body of {self.method} {self.path}: not JSON: {str(error)[:200]}") from None

    def number(self, name: str, default: float, most: float) -> float:
        """Return the query's number, at most ``most``; ParseError for anything but plain digits."""
        text = self.query.get(name, "")
        if not text:
            return default
        whole, _, part = text.partition(".")
        if not (whole.isascii() and whole.isdigit() and len(whole) < 16 and (not part or part.isdigit())):
            raise ParseError(f"query {name}: expected a number, got {text!r:.50}")
        return min(most, float(text))


@dataclass(frozen=True)
class Response:
    """``file`` is sent with Range, at ``pace``, and closed by the server; ``pieces`` are sent as they come."""

    status: int = 200
    body: bytes = b""
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)
    file: Optional[BinaryIO] = None
    etag: str = ""
    pace: Optional[Callable[[int], int]] = None    # waits until some of so many bytes may go, and says how many
    pieces: Optional[Any] = None


def json_response(data: Any, status: int = 200) -> Response:
    """Return ``data`` as compact JSON."""
    return Response(status, json.dumps(data, separators=(",", ":"), sort_keys=True).encode("utf-8"))


Handler = Callable[[Request], Response]


@dataclass(frozen=True)
class Route:
    """``roles`` are the only ones who may call; ``("public",)`` opens it to everybody."""

    method: str
    pattern: str
    roles: Tuple[str, ...]
    handler: Handler
    body_bytes: int = BODY_BYTES


@dataclass(frozen=True)
class Admitted:
    """A request whose head passed: the caller may do this; the body is still to be read."""

    route: Route
    args: Mapping[str, str]
    query: Mapping[str, str]
    caller: Caller


Authenticate = Callable[[str], Optional[Caller]]   # the token's text; None: unknown


class RouteTable:
    """Every route of a server. ``authenticate`` says whose token it is."""

    def __init__(self, routes: Sequence[Route], authenticate: Authenticate) -> None:
        self.routes = tuple(routes)
        self._authenticate = authenticate
        self._by_length: Dict[int, List[Tuple[Tuple[str, ...], Route]]] = {}
        for route in routes:
            segments = tuple(route.pattern.split("/"))
            self._by_length.setdefault(len(segments), []).append((segments, route))

    def admit(self, method: str, target: str, headers: Mapping[str, str]) -> Admitted:
        """Return the route that this head opens; raises Unauthorized, Forbidden, NotFound or a 405.

        Called before any byte of the body is read.
        """
        path, _, query = target.partition("?")
        found = self._matches(path)
        route, args = next(((route, args) for route, args in found if route.method == method), (None, {}))
        if route is not None and PUBLIC in route.roles:
            return Admitted(route, args, _query(query), Caller(PUBLIC))
        caller = self._caller(headers)
        if not found:
            raise NotFound(f"no such path: {path:.200}")
        if route is None:
            known = ", ".join(sorted({route.method for route, _ in found}))
            raise ApiError(f"{method:.20} is not allowed here, only {known}", status=405,
                           reason="MethodNotAllowed")
        if caller.role not in route.roles:
            raise Forbidden(f"a token of role {caller.role} does not open {method} {route.pattern}",
                            hint=f"use a token of role {' or '.join(route.roles)}")
        return Admitted(route, args, _query(query), caller)

    def _matches(self, path: str) -> List[Tuple[Route, Dict[str, str]]]:
        offered = path.split("/")
        found = []
        for segments, route in self._by_length.get(len(offered), ()):
            args = _match(segments, offered)
            if args is not None:
                found.append((route, args))
        return found

    def _caller(self, headers: Mapping[str, str]) -> Caller:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        caller = self._authenticate(token.strip()) if scheme.lower() == "bearer" else None
        if caller is None:
            said = "the token is not known here" if token else "a token is needed"
            raise Unauthorized(said, hint="send it as 'Authorization: Bearer TOKEN'")
        return caller


def _match(segments: Sequence[str], offered: Sequence[str]) -> Optional[Dict[str, str]]:
    args: Dict[str, str] = {}
    for wanted, given in zip(segments, offered):
        if wanted[:1] == "{":
            if not given:
                return None
            args[wanted[1:-1]] = _decoded(given)
        elif wanted != given:
            return None
    return args


def _decoded(segment: str) -> str:
    try:
        return unquote(segment, errors="strict")
    except UnicodeDecodeError:
        raise ParseError(f"not UTF-8 in the path: {segment!r:.80}") from None


def _query(text: str) -> Dict[str, str]:
    try:
        pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=50, errors="strict")
    except ValueError as error:
        raise ParseError(f"the query cannot be read: {str(error)[:100]}") from None
    query = dict(pairs)
    if len(query) != len(pairs):
        raise ParseError("the query names a key twice")
    return query


_STATUS = (
    (errors.Unauthorized, 401), (errors.Forbidden, 403), (errors.NotFound, 404), (errors.Conflict, 409),
    (errors.AlreadyRunning, 409), (errors.TooLarge, 413), (errors.TryAgain, 503), (errors.DiskFull, 503),
    (errors.StorageError, 503), (errors.Unreachable, 503), (errors.DownloadFailed, 503),
)
RETRY_AFTER_SECONDS = 2


def status_of(error: LlmgwError) -> int:
    """Return the HTTP status of one of our errors; what the caller did wrong is 400."""
    if isinstance(error, ApiError):
        return error.status
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 400)


def error_response(error: LlmgwError) -> Response:
    """Return ``{"reason", "message", "hint"}`` with the error's status."""
    status = status_of(error)
    response = json_response({"reason": error.reason, "message": error.message, "hint": error.hint}, status)
    headers = {}
    if status in (429, 503):
        headers["Retry-After"] = str(RETRY_AFTER_SECONDS)
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(status, response.body, headers=headers)
