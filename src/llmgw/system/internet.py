"""HTTP to the internet: proxies, redirects, pages of captive portals, rate limits, deadlines.

For the cluster's own servers see http_client.py. A token goes to the origin it was given
for and nowhere else, whatever a redirect says (urllib sends it along).
"""
from __future__ import annotations

import http.client
import ipaddress
import json
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from typing import Any, Dict, List, Mapping, Optional, Tuple
from urllib.parse import SplitResult, urljoin, urlsplit

from llmgw import __version__
from llmgw.domain.errors import (
    ConfigError,
    DownloadFailed,
    LlmgwError,
    NotFound,
    ParseError,
    TryAgain,
    Unauthorized,
    Unreachable,
)
from llmgw.system.files import read_bytes
from llmgw.system.http_client import Answer

TIMEOUT_SECONDS = 20.0    # of one wait for the network
ANSWER_SECONDS = 60.0     # of a small answer as a whole, and of the head of any
MAX_REDIRECTS = 6
MAX_ANSWER_BYTES = 32 << 20
_REDIRECTS = (301, 302, 303, 307, 308)
_PORTS = {"http": 80, "https": 443}


class RateLimited(TryAgain):
    """The other side counts requests and wants no more now; ``seconds`` until it does."""

    reason = "RateLimited"

    def __init__(self, message: str, seconds: float, *, hint: Optional[str] = None) -> None:
        super().__init__(message, hint=hint)
        self.seconds = seconds


class WebPage(DownloadFailed):
    """A web page where a file or JSON was expected."""

    reason = "WebPage"


class Internet:
    """GET requests to one service and to wherever it redirects. Safe for several threads."""

    def __init__(self, endpoint: str, *, token_file: str = "", timeout: float = TIMEOUT_SECONDS,
                 proxies: Optional[Mapping[str, str]] = None, no_proxy: Optional[str] = None) -> None:
        self._origin = _origin(_split(endpoint))
        self._token_file = token_file
        self._timeout = timeout
        found = urllib.request.getproxies_environment()
        listed = found.pop("no", "") if no_proxy is None else no_proxy
        self._opener = _opener(dict(found if proxies is None else proxies), listed)

    def get(self, url: str, *, headers: Optional[Mapping[str, str]] = None, max_body: int = MAX_ANSWER_BYTES,
            seconds: float = ANSWER_SECONDS) -> Answer:
        """Return a whole successful answer; an error of ours for every other one, or a slow one."""
        deadline = time.monotonic() + seconds
        with self.open(url, headers=headers) as source:
            pieces: List[bytes] = []
            size = 0
            while True:
                piece = source.read(1 << 16)
                if not piece:
                    return Answer(source.status, source.headers, b"".join(pieces))
                pieces.append(piece)
                size += len(piece)
                if size > max_body:
                    raise DownloadFailed(f"{_place(url)}: an answer of more than {max_body} bytes")
                if time.monotonic() > deadline:
                    raise Unreachable(f"{_place(url)}: the answer did not come within {seconds:g} seconds")

    def get_json(self, url: str, *, headers: Optional[Mapping[str, str]] = None) -> Any:
        """Return the JSON of a successful answer."""
        answer = self.get(url, headers={"Accept": "application/json", **(headers or {})})
        try:
            return json.loads(answer.body)
        except (ValueError, RecursionError):
            raise ParseError(f"{_place(url)}: the answer is not JSON") from None

    def open(self, url: str, offset: int = 0, *, headers: Optional[Mapping[str, str]] = None) -> "Source":
        """Return a successful answer (200, 206) to be read in pieces, from ``offset`` if the server can."""
        sent = {"User-Agent": f"llmgw/{__version__}", "Accept-Encoding": "identity", **(headers or {})}
        if offset:
            sent["Range"] = f"bytes={offset}-"
        here = url
        for _ in range(MAX_REDIRECTS + 1):
            response = self._ask(here, sent)
            target = response.headers.get("Location", "")
            if response.status in _REDIRECTS and target:
                response.close()
                here = self._next(here, target)
                continue
            try:
                check(response.status, _headers(response), here)
            except LlmgwError:
                response.close()
                raise
            return Source(response, _place(here))
        raise DownloadFailed(f"{_place(url)}: more than {MAX_REDIRECTS} redirects",
                             hint="something between here and the internet sends requests in circles")

    def _ask(self, url: str, headers: Mapping[str, str]) -> http.client.HTTPResponse:
        request = urllib.request.Request(url, headers=dict(headers), method="GET")
        if self._token_file and _origin(_split(url)) == self._origin:
            request.add_unredirected_header("Authorization", f"Bearer {self._token()}")
        try:
            response: http.client.HTTPResponse = self._opener.open(request, timeout=self._timeout)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _unreachable(_place(url), error) from error
        return response

    def _token(self) -> str:
        data = read_bytes(self._token_file, 4096)
        token = (data or b"").decode("ascii", "replace").strip()
        if not token or not token.isprintable() or " " in token:
            raise ConfigError(f"{self._token_file}: holds no token", hint="write the token alone into this file")
        return token

    def _next(self, here: str, target: str) -> str:
        """Return the address of a redirect; refuses one that leaves TLS or points into the local network."""
        url = urljoin(here, target)
        try:
            old, new = _split(here), _split(url)
        except ConfigError:
            raise DownloadFailed(f"{_place(here)}: a redirect to {url!r:.200}") from None
        if old.scheme == "https" and new.scheme != "https":
            raise DownloadFailed(f"{_place(here)}: a redirect without TLS, to {_place(url)}")
        if _is_local(new.hostname or "") and not _is_local(old.hostname or ""):
            raise DownloadFailed(f"{_place(here)}: a redirect into the local network, to {_place(url)}")
        return url


class Source:
    """An open answer; header names are lower-case. Close it, or use it in ``with``."""

    def __init__(self, response: http.client.HTTPResponse, where: str) -> None:
        self._response, self._where = response, where
        self.status: int = response.status
        self.headers: Mapping[str, str] = _headers(response)
        length = self.headers.get("content-length", "")
        self._left = int(length) if length.isdigit() and len(length) < 16 and not response.chunked else None

    def read(self, size: int) -> bytes:
        """Return what has come, up to ``size`` bytes; b"" at the end, Unreachable when that is early.

        Never waits for ``size`` bytes, so that a caller can watch the rate.
        """
        if self._left == 0 or size <= 0:
            return b""
        try:
            piece = self._response.read1(size if self._left is None else min(size, self._left))
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _unreachable(self._where, error) from error
        if self._left is not None:
            if not piece:
                raise Unreachable(f"{self._where}: the transfer was cut off {self._left} bytes early")
            self._left -= len(piece)
        return piece

    def close(self) -> None:
        self._response.close()

    def __enter__(self) -> "Source":
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()


def check(status: int, headers: Mapping[str, str], url: str) -> None:
    """Refuse an answer that is no success, each kind with what it means."""
    place = _place(url)
    if status in (200, 206):
        if headers.get("content-type", "").lower().startswith("text/html"):
            raise WebPage(f"{place}: answered with a web page instead of data",
                          hint="this network may want a login or a proxy: open the address in a browser")
        return
    if status == 429 or (status == 403 and headers.get("x-ratelimit-remaining") == "0"):
        seconds = _wait_seconds(headers)
        at = time.strftime("%H:%M UTC", time.gmtime(time.time() + seconds))
        raise RateLimited(f"{place}: allows no more requests now, again at {at}", seconds,
                          hint="a token raises the limit: see docs/configuration.md")
    if status in (401, 403):
        raise Unauthorized(f"{place}: access refused (HTTP {status})",
                           hint="it needs a token, or one that may read this: see docs/configuration.md")
    if status in (404, 410):
        raise NotFound(f"{url[:300]}: not found (HTTP {status})", hint="check how it is spelled")
    if status == 407:
        raise Unreachable(f"{place}: the proxy wants a login", hint="put it into HTTPS_PROXY, http://USER:PASSWORD@HOST")
    if status >= 500:
        raise Unreachable(f"{place}: has a fault of its own (HTTP {status})", hint="it will be asked again")
    raise DownloadFailed(f"{place}: an unexpected answer (HTTP {status})")


def _wait_seconds(headers: Mapping[str, str]) -> float:
    """Return how long to wait, from Retry-After or GitHub's own headers; a minute when nothing is said."""
    after, reset = headers.get("retry-after", ""), headers.get("x-ratelimit-reset", "")
    if after.isdigit() and len(after) < 8:
        return min(float(after), 86400.0)
    if reset.isdigit() and len(reset) < 15:
        return min(max(float(reset) - time.time(), 1.0), 86400.0)
    return 60.0


class _Proxies(urllib.request.ProxyHandler):
    """Adds networks to NO_PROXY: the standard library knows only names and exact addresses."""

    def __init__(self, proxies: Dict[str, str], no_proxy: str) -> None:
        super().__init__(proxies)
        self._no_proxy = no_proxy

    def proxy_open(self, req: Any, proxy: Any, type: Any) -> Any:
        if bypasses(req.host or "", self._no_proxy):
            return None
        return super().proxy_open(req, proxy, type)


def bypasses(host: str, no_proxy: str) -> bool:
    """Whether NO_PROXY names ``host`` (``NAME[:PORT]``): by name, ending, address, network or ``*``."""
    name = (urlsplit(f"//{host}").hostname or "").lower()
    address = _address(name)
    for item in (part.strip().lower() for part in no_proxy.split(",")):
        if not item:
            continue
        if item == "*" or item in (name, host.lower()):
            return True
        ending = item.lstrip("*").lstrip(".")
        if ending and address is None and name.endswith("." + ending):
            return True
        if address is not None and "/" in item and _within(address, item):
            return True
    return False


def _within(address: "ipaddress.IPv4Address | ipaddress.IPv6Address", network: str) -> bool:
    try:
        return address in ipaddress.ip_network(network, strict=False)
    except ValueError:
        return False


def _address(host: str) -> "Optional[ipaddress.IPv4Address | ipaddress.IPv6Address]":
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _is_local(host: str) -> bool:
    address = _address(host)
    return host.lower() == "localhost" if address is None else not address.is_global


class _Plain(http.client.HTTPConnection):
    def getresponse(self) -> http.client.HTTPResponse:
        with _Watch(self.sock):
            return super().getresponse()


class _Secure(http.client.HTTPSConnection):
    def getresponse(self) -> http.client.HTTPResponse:
        with _Watch(self.sock):
            return super().getresponse()


class _Watch:
    """Ends a connection whose head does not come in time: a timeout is per read, a drip never meets it."""

    def __init__(self, sock: Optional[socket.socket]) -> None:
        self._sock = sock
        self._timer = threading.Timer(ANSWER_SECONDS, self._end)
        self._timer.daemon = True
        self._ended = False

    def _end(self) -> None:
        self._ended = True
        try:
            if self._sock is not None:
                socket.socket.shutdown(self._sock, socket.SHUT_RDWR)   # below TLS, which may be reading
        except OSError:
            pass

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *unused: object) -> None:
        self._timer.cancel()
        if self._ended:           # http.client takes what is cut off in its head for a whole answer
            raise socket.timeout("the head did not come in time")


class _Http(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        response: http.client.HTTPResponse = self.do_open(_Plain, req)
        return response


class _Https(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        response: http.client.HTTPResponse = self.do_open(_Secure, req, context=_tls())
        return response


def _opener(proxies: Dict[str, str], no_proxy: str) -> urllib.request.OpenerDirector:
    """Return an opener that follows no redirect and hands back every status."""
    opener = urllib.request.OpenerDirector()
    for handler in (_Proxies(proxies, no_proxy), _Http(), _Https(), urllib.request.UnknownHandler()):
        opener.add_handler(handler)
    return opener


def _tls() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        known = False
    if not known or any(ord(letter) <= 32 or ord(letter) == 127 for letter in url):
        raise ConfigError(f"not an address: {url!r:.200}", hint="write it as https://HOST[/PATH]")
    return parts


def _origin(parts: SplitResult) -> Tuple[str, str, int]:
    return parts.scheme, (parts.hostname or "").lower(), parts.port or _PORTS[parts.scheme]


def _place(url: str) -> str:
    """Return scheme and host of an address for messages; its query may hold a signature."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{(parts.netloc or '').rpartition('@')[2]}"[:200]


def _headers(response: http.client.HTTPResponse) -> Dict[str, str]:
    return {name.lower(): value for name, value in response.getheaders()}


def _unreachable(where: str, error: Exception) -> Unreachable:
    inner = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(inner, (socket.timeout, TimeoutError)):
        why = "no answer in time"
    elif isinstance(inner, ConnectionRefusedError):
        why = "connection refused"
    elif isinstance(inner, ssl.SSLCertVerificationError):
        why = f"its certificate is not trusted: {inner.verify_message}"
    elif isinstance(inner, socket.gaierror):
        why = "the name cannot be resolved"
    elif isinstance(inner, (http.client.IncompleteRead, http.client.RemoteDisconnected, ConnectionResetError)):
        why = "the connection was cut off"
    else:
        why = getattr(inner, "strerror", None) or str(inner) or type(inner).__name__
    return Unreachable(f"{where}: {why:.200}", hint="is the internet reachable from here? HTTPS_PROXY names a proxy")
