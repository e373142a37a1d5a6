"""Who is let in: join tokens, the credentials they are exchanged for, and their end.

A credential is bound to one name, chosen here, and to one name in certificates that nobody else ever gets.
Only sha256 of secrets is kept; keys of certificates are not kept at all.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from llmgw.domain.errors import Conflict, Forbidden, NotFound, ParseError, TryAgain, Unauthorized
from llmgw.domain.join import GATE_DOMAIN, JoinAnswer, JoinRequest, JoinString, Renewed, write
from llmgw.domain.names import check_name
from llmgw.domain.secret import Secret
from llmgw.domain.view import TokenView
from llmgw.parse import address
from llmgw.server import records
from llmgw.server.authority import Authority, Issued, gate_name
from llmgw.server.store import Compare, Entry, Operation, Put, Store
from llmgw.server.tokens import JOIN, make_token, sha256
from llmgw.system import tls
from llmgw.system.clock import Clock
from llmgw.system.routes import Caller

JOINING = ("node", "router")
READING = ("viewer", "admin")
MOST_SECONDS = 400 * 86400.0
MOST_USES = 10000
MOST_NAMES = 64
TRIES = 20


@dataclass(frozen=True)
class TokenWish:
    """What an admin asks for."""

    role: str
    ttl_seconds: float
    uses: int = 1
    name: str = ""


class Admissions:
    """Called by handlers, in any thread; every change is one transaction."""

    def __init__(self, store: Store, authority: Authority, clock: Clock) -> None:
        self._store, self._authority, self._clock = store, authority, clock

    # Tokens.

    def create(self, wish: TokenWish) -> TokenView:
        """Make a token; its secret is in this answer only: a join string for nodes and routers, else an API token."""
        if wish.role not in (*JOINING, *READING):
            raise ParseError(f"no such role: {wish.role:.60}", hint=f"use one of {', '.join((*JOINING, *READING))}")
        if not 1 <= wish.ttl_seconds <= MOST_SECONDS or not 1 <= wish.uses <= MOST_USES:
            raise ParseError("a token lives from 1 second to 400 days, and has 1 to 10000 uses")
        if wish.name:
            check_name(wish.name, "name")
        joins = wish.role in JOINING
        pin = tls.pin(self._authority.ca()) if joins else ""
        identity, token = make_token(JOIN if joins else wish.role)
        now = self._clock.wall()
        row = {"id": identity, "role": JOIN if joins else wish.role, "sha256": sha256(token), "first": False,
               "made_at": now, "expires_at": now + wish.ttl_seconds, "name": wish.name}
        if joins:
            row.update(opens=wish.role, uses=wish.uses, used=0)
        if self._store.txn([Compare(records.TOKENS + identity, 0)], [Put(records.TOKENS + identity, row)]) is None:
            return self.create(wish)
        secret = token
        if joins:
            secret = write(JoinString(pin, identity, Secret(token.split("_", 3)[3])))
        return replace(_view(row), secret=secret)

    def list(self) -> List[TokenView]:
        """Return every token but the server's own first ones, oldest first."""
        found = [_view(entry.value) for entry in self._rows()]
        return sorted(found, key=lambda view: (view.made_at, view.id))

    def revoke(self, identity: str) -> TokenView:
        """End a token at once; a node's or router's credential too."""
        entry = self._store.get(records.TOKENS + identity)
        if entry is None:
            raise NotFound(f"no such token: {identity:.60}", hint="llmgw.pyz ctl token list shows them")
        if entry.value["first"]:
            raise Conflict(f"{identity} is the server's own token of role {entry.value['role']}",
                           hint=f"to replace it, remove tokens/{entry.value['role']} in the server's data folder "
                                "and start the server again")
        return _view(self._revoke([entry])[0])

    def revoke_node(self, name: str) -> int:
        """End every credential of a node; return how many there were."""
        return len(self._revoke(self._in_force("node", name)))

    def _revoke(self, entries: Sequence[Entry]) -> List[Dict[str, Any]]:
        now = self._clock.wall()
        rows = [{**entry.value, "revoked_at": entry.value.get("revoked_at") or now} for entry in entries]
        if rows:
            self._store.txn((), [Put(entry.key, row) for entry, row in zip(entries, rows)])
        return rows

    # Joining.

    def join(self, caller: Caller, asked: JoinRequest) -> JoinAnswer:
        """Exchange one use of a join token for a credential and a certificate; the server chooses the name."""
        check_name(asked.name, "name")
        for _ in range(TRIES):
            entry = self._store.get(records.TOKENS + caller.id)
            if entry is None or entry.value["used"] >= entry.value["uses"]:
                raise Unauthorized("this join string has been used" if entry is not None else "unknown join string",
                                   hint="make another: llmgw.pyz ctl token create --role node")
            answer = self._admit(entry, asked)
            if answer is not None:
                return answer
        raise TryAgain("many join at this moment")

    def _admit(self, entry: Entry, asked: JoinRequest) -> Optional[JoinAnswer]:
        """Return the answer, None when somebody else changed something meanwhile."""
        role, now = str(entry.value["opens"]), self._clock.wall()
        name = self._free_name(role, entry.value.get("name") or asked.name)
        identity, token = make_token(role)
        own_name = gate_name()
        issued = self._authority.issue(self._names(role, own_name, asked.names))
        row = {"id": identity, "role": role, "sha256": sha256(token), "first": False, "made_at": now, "name": name,
               "expires_at": None, "tls_name": own_name, "machine": asked.machine[:200], "join": entry.value["id"]}
        operations: List[Operation] = [Put(entry.key, {**entry.value, "used": entry.value["used"] + 1}),
                                       Put(records.TOKENS + identity, row)]
        unchanged = [Compare(entry.key, entry.revision), Compare(records.TOKENS + identity, 0)]
        if role == "node":                     # taking the name and counting the use are one step
            unchanged.append(Compare(records.NODES + name, 0))
            operations.append(Put(records.NODES + name, {"name": name, "first_seen": now, "draining": False,
                                                         "address": ""}))
        if self._store.txn(unchanged, operations) is None:
            return None
        return JoinAnswer(role, name, Secret(token), self._authority.fleet_ca(), issued.certificate,
                          Secret(issued.key), issued.renew_at, issued.ends_at, own_name)

    def renew(self, caller: Caller, names: Sequence[str]) -> Renewed:
        """Return a new certificate for the caller's own name."""
        entry = self._store.get(records.TOKENS + caller.id)
        own_name = entry.value.get("tls_name") if entry is not None else None
        if not own_name:
            raise Forbidden("only who has joined gets a certificate",
                            hint="join with a string of llmgw.pyz ctl token create")
        issued: Issued = self._authority.issue(self._names(caller.role, own_name, names))
        return Renewed(issued.certificate, Secret(issued.key), issued.renew_at, issued.ends_at,
                       self._authority.fleet_ca())

    def _names(self, role: str, own_name: str, asked: Sequence[str]) -> Tuple[str, ...]:
        """Return what goes into a certificate: a gate has its own name only, a router what clients call it by."""
        if role != "router":
            return (own_name,)
        names = [address.host(name).lower() for name in asked[:MOST_NAMES] if "%" not in name]
        return (own_name, *dict.fromkeys(name for name in names if not name.rstrip(".").endswith(GATE_DOMAIN)))

    def _free_name(self, role: str, wanted: str) -> str:
        """Return ``wanted`` or the first of wanted-2, wanted-3, … that nobody has."""
        taken = {entry.value.get("name") for entry in self._in_force(role)}
        if role == "node":
            taken |= {entry.value["name"] for entry in self._store.range(records.NODES)}
        number, name = 1, wanted
        while name in taken:
            number += 1
            name = f"{wanted[:190]}-{number}"
        return name

    # What the rest of the server asks.

    def gate_names(self) -> Mapping[str, str]:
        """Return the name in the certificate of every joined node's gate."""
        return {entry.value["name"]: entry.value["tls_name"] for entry in self._in_force("node")}

    def fleet_ca(self) -> str:
        """Return the CA of gates and routers, empty when nobody has joined."""
        return self._authority.fleet_ca()

    def check_node(self, caller: Caller, node: str) -> None:
        """Refuse a node's credential for another node, and the shared token for a node that has its own."""
        if caller.name:
            if caller.name != node:
                raise Forbidden(f"this is the credential of {caller.name}, not of {node:.100}")
        elif caller.role == "node" and self._in_force("node", node):
            raise Forbidden(f"node {node:.100} has a credential of its own",
                            hint="give this one another name with --node NAME")

    def is_in_force(self, caller: Caller) -> bool:
        """Whether the token of a caller that waited is still good."""
        entry = self._store.get(records.TOKENS + caller.id)
        return entry is not None and entry.value.get("revoked_at") is None

    def _in_force(self, role: str, name: str = "") -> List[Entry]:
        return [entry for entry in self._rows() if entry.value["role"] == role and entry.value.get("tls_name")
                and entry.value.get("revoked_at") is None and name in ("", entry.value["name"])]

    def _rows(self) -> List[Entry]:
        return [entry for entry in self._store.range(records.TOKENS) if not entry.value["first"]]


def _view(row: Mapping[str, Any]) -> TokenView:
    kind = "join" if row["role"] == JOIN else "credential" if row.get("tls_name") else "api"
    return TokenView(row["id"], str(row.get("opens", row["role"])), kind, row["made_at"], row.get("expires_at"),
                     row.get("name", ""), row.get("uses", 0), row.get("used", 0), row.get("revoked_at"))


def check_wish(data: Mapping[str, Any]) -> TokenWish:
    """Return what a request asks for; ParseError names what is wrong with it."""
    role, name, ttl, uses = (data.get(key) for key in ("role", "name", "ttl_seconds", "uses"))
    if not isinstance(role, str) or not isinstance(name or "", str):
        raise ParseError("a token needs a role (text), and may have a name (text)")
    if isinstance(ttl, bool) or not isinstance(ttl, (int, float)) or ttl != ttl:
        raise ParseError("ttl_seconds must be a number")
    if uses is not None and (isinstance(uses, bool) or not isinstance(uses, int)):
        raise ParseError("uses must be a whole number")
    return TokenWish(role, float(ttl), 1 if uses is None else uses, name or "")
