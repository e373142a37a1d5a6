"""Routes of trust: the CA, joining, certificates, tokens, and the end of a node's credential."""
from __future__ import annotations

from dataclasses import replace
from typing import Any, List, Mapping

from llmgw.api import paths, wire
from llmgw.domain.errors import NotFound, ParseError
from llmgw.domain.join import line
from llmgw.domain.view import TokenView
from llmgw.server.admissions import Admissions, check_wish
from llmgw.server.authority import Authority
from llmgw.server.http_numbers import HttpNumbers
from llmgw.server.loop import Parts
from llmgw.server.tokens import JOIN
from llmgw.system import files, own_program
from llmgw.system.hashing import hash_file
from llmgw.system.routes import PUBLIC, Request, Response, Route, json_response

ADMIN = ("admin",)
JOIN_BYTES = 64 << 10


class JoinHandlers:
    """Only the CA is told to everybody: whoever has a pin compares it, and sends nothing before."""

    def __init__(self, parts: Parts, authority: Authority, numbers: HttpNumbers) -> None:
        self._parts, self._authority, self._numbers = parts, authority, numbers
        self._admissions: Admissions = parts.admissions

    def routes(self) -> List[Route]:
        return [
            Route("GET", paths.CA, (PUBLIC,), self.ca),
            Route("GET", paths.OWN_FILE, (PUBLIC,), self.own_file),
            Route("POST", paths.JOIN, (JOIN,), self.join, JOIN_BYTES),
            Route("POST", paths.CERTIFICATE, ("node", "router"), self.certificate, JOIN_BYTES),
            Route("GET", paths.TOKENS, ADMIN, self.tokens),
            Route("POST", paths.TOKENS, ADMIN, self.make_token),
            Route("DELETE", paths.TOKEN, ADMIN, self.revoke_token),
            Route("POST", paths.REVOKE_NODE, ADMIN, self.revoke_node),
        ]

    def ca(self, request: Request) -> Response:
        return Response(body=self._authority.ca().encode("ascii"), content_type="application/x-pem-file")

    def own_file(self, request: Request) -> Response:
        """Send the llmgw.pyz that runs here: whoever joins checks it against the hash in his line."""
        path = own_program.own_file()
        if not path:
            raise NotFound("this server does not run from an llmgw.pyz")
        with files.storing("read", path):
            return Response(file=open(path, "rb"), content_type="application/octet-stream")

    def join(self, request: Request) -> Response:
        answer = self._admissions.join(request.caller, wire.JOIN_REQUEST.decode(request.json(), "join request"))
        self._parts.events.add(f"{answer.role}/{answer.name}", "Joined", f"with the join token {request.caller.id}")
        self._parts.nodes.poke.set()
        return Response(body=wire.dumps(wire.JOIN_ANSWER, answer))

    def certificate(self, request: Request) -> Response:
        names = _object(request).get("names", [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ParseError("names must be a list of texts")
        return Response(body=wire.dumps(wire.RENEWED, self._admissions.renew(request.caller, names)))

    def tokens(self, request: Request) -> Response:
        return json_response({"items": [wire.TOKEN_VIEW.encode(view) for view in self._admissions.list()]})

    def make_token(self, request: Request) -> Response:
        made = self._admissions.create(check_wish(_object(request)))
        if made.kind == "join":
            made = replace(made, line=self._line(made))
        self._parts.events.add("server", "TokenMade", f"token {made.id} for the role {made.role}")
        return json_response(wire.TOKEN_VIEW.encode(made), 201)

    def _line(self, made: TokenView) -> str:
        path, server = own_program.own_file(), self._numbers.server
        if not path or server is None:
            return ""
        host = self._authority.public_host if server.host in ("0.0.0.0", "::", "") else server.host
        url = f"https://[{host}]:{server.port}" if ":" in host else f"https://{host}:{server.port}"
        return line(url, made.role, made.secret, hash_file(path)[0], self._authority.key_pin())

    def revoke_token(self, request: Request) -> Response:
        gone = self._admissions.revoke(request.args["token"])
        self._parts.events.add("server", "TokenRevoked", f"token {gone.id} of the role {gone.role}"
                               + (f" ({gone.name})" if gone.name else ""))
        self._parts.nodes.poke.set()
        return json_response(wire.TOKEN_VIEW.encode(gone))

    def revoke_node(self, request: Request) -> Response:
        """Refuse a node from now on, and take it out of everything at once, alive or not."""
        node = request.args["node"]
        count = self._admissions.revoke_node(node)
        self._parts.nodes.forget(node, although_alive=count > 0)
        self._parts.events.add(f"node/{node}", "Revoked", "by an admin")
        return json_response({"credentials": count})


def _object(request: Request) -> Mapping[str, Any]:
    data = request.json() if request.body else {}
    if not isinstance(data, dict):
        raise ParseError("the body must be a JSON object")
    return data
