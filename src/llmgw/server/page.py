"""The cluster page's shell: three files that hold nothing of the cluster, open to everybody.

The page asks for a token and reads the same lists as ctl; what it may load and
call is only this server, and no markup comes from data.
"""
from __future__ import annotations

import hashlib
import pkgutil
from typing import Tuple

from llmgw.domain.errors import StorageError
from llmgw.system.routes import PUBLIC, Handler, Request, Response, Route

FILES = (
    ("/", "page.html", "text/html; charset=utf-8"),
    ("/page.js", "page.js", "text/javascript; charset=utf-8"),
    ("/page.css", "page.css", "text/css; charset=utf-8"),
)
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; frame-ancestors 'none'; form-action 'none'")


def routes() -> Tuple[Route, ...]:
    """Return the routes of the shell; StorageError when this llmgw came without its files."""
    return tuple(Route("GET", path, (PUBLIC,), _handler(_read(name), kind)) for path, name, kind in FILES)


def _read(name: str) -> bytes:
    try:
        data = pkgutil.get_data("llmgw.server", f"static/{name}")    # from a folder and from a zip
    except OSError as error:
        raise StorageError(f"cannot read static/{name} of this llmgw: {error.strerror or error}",
                           hint="build or download llmgw.pyz again") from None
    assert data is not None
    return data


def _handler(data: bytes, content_type: str) -> Handler:
    headers = {
        "Content-Security-Policy": CONTENT_SECURITY_POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",        # kept, but asked for again: a new llmgw shows its own page
        "ETag": f'"{hashlib.sha256(data).hexdigest()[:32]}"',
    }

    def answer(request: Request) -> Response:
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(304, content_type=content_type, headers=headers)
        return Response(200, data, content_type, headers)

    return answer
