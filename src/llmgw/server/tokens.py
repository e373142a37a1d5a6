"""Who may call: tokens of the roles, and the keys of users. Only their sha256 is kept.

256 random bits need no slow hash. A token is looked up by its id and compared in
constant time; an unknown id costs the same comparison.
"""
from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import threading
from typing import Any, Dict, List, Optional, Tuple

from llmgw.api import wire
from llmgw.domain.errors import NotFound, ParseError, StorageError, Unauthorized
from llmgw.domain.names import check_name
from llmgw.domain.route import RoutedKey
from llmgw.domain.view import KeyView
from llmgw.server import records
from llmgw.server.store import Compare, Delete, Operation, Put, Store
from llmgw.system import failpoint, files
from llmgw.system.clock import Clock
from llmgw.system.data_dir import token_file
from llmgw.system.routes import Caller

ROLES = ("admin", "viewer", "node", "router")
INFER = "infer"
JOIN = "join"
_TOKEN = re.compile(r"llmgw_([a-z]{1,16})_([A-Za-z0-9]{8})_([A-Za-z0-9_-]{43})")
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
_NOBODY = hashlib.sha256(b"").hexdigest()


def make_token(role: str) -> Tuple[str, str]:
    """Return (id, text) of a new token ``llmgw_ROLE_ID_SECRET``."""
    identity = "".join(secrets.choice(_LETTERS) for _ in range(8))
    return identity, f"llmgw_{role}_{identity}_{secrets.token_urlsafe(32)}"


def sha256(token: str) -> str:
    """Return what is kept of a token."""
    return hashlib.sha256(token.encode()).hexdigest()


class Tokens:
    """All tokens of this cluster; ``caller`` is asked for every request."""

    def __init__(self, store: Store, data_dir: str, clock: Clock) -> None:
        self._store, self._dir, self._clock = store, data_dir, clock
        self._lock = threading.Lock()
        for role in ROLES:
            self._first(role)

    def _first(self, role: str) -> None:
        """See to it that the role's file holds a token, and that the store knows just that first one.

        The file is written first: a kill between the two is repaired here.
        """
        path = token_file(self._dir, role)
        files.make_dir(os.path.dirname(path))
        found = files.read_bytes(path, 4096)
        if found is None:
            _, token = make_token(role)
            files.write_atomic(path, token.encode() + b"\n")
            failpoint.reach("token-file-before-store")
        else:
            token = found.decode("utf-8", "replace").strip()
        match = _TOKEN.fullmatch(token)
        if match is None or match.group(1) != role:
            raise StorageError(f"{path}: not a token of role {role}",
                               hint="remove the file: the next start makes a new one")
        row: Dict[str, Any] = {"id": match.group(2), "role": role, "sha256": sha256(token), "first": True}
        stale: List[Operation] = [
            Delete(entry.key) for entry in self._store.range(records.TOKENS)
            if entry.value["role"] == role and entry.value["first"] and entry.value != row]
        known = self._store.get(records.TOKENS + row["id"])
        if stale or known is None:
            self._store.txn((), [*stale, Put(records.TOKENS + row["id"], row)])

    def caller(self, token: str) -> Optional[Caller]:
        """Return whose token this is; None when nobody's."""
        match = _TOKEN.fullmatch(token)
        role, identity = (match.group(1), match.group(2)) if match is not None else ("", "")
        entry = self._store.get((records.KEYS if role == INFER else records.TOKENS) + identity)
        row: Dict[str, Any] = entry.value if entry is not None else {}
        is_same = hmac.compare_digest(row.get("sha256", _NOBODY), sha256(token))
        if not is_same or row.get("role", INFER) != role:
            return None
        if row.get("revoked_at") is not None:
            if role == INFER:
                return None
            raise Unauthorized("this token was revoked", hint="ask an admin for another")
        if row.get("expires_at") is not None and row["expires_at"] <= self._clock.wall():
            raise Unauthorized("this token has expired", hint="ask an admin for another")
        return Caller(role, identity, row.get("name", "") if row.get("tls_name") else "")

    # Users' keys.

    def make_key(self, name: str, models: Tuple[str, ...]) -> KeyView:
        """Make a key that opens ``models`` (all when empty); its secret is in this answer only."""
        check_name(name, "key name")
        for model in models:
            check_name(model, "model")
        identity, token = make_token(INFER)
        made = KeyView(identity, name, self._clock.wall(), models, secret="")
        row = {**wire.KEY_VIEW.encode(made), "sha256": sha256(token)}
        if self._store.txn([Compare(records.KEYS + identity, 0)], [Put(records.KEYS + identity, row)]) is None:
            return self.make_key(name, models)
        return KeyView(identity, name, made.created_at, models, secret=token)

    def revoke_key(self, identity: str) -> KeyView:
        """End a key; it stays in the list as revoked. Names work where they are unique."""
        keys = [key for key in self.keys() if identity in (key.id, key.name) and key.revoked_at is None]
        exact = [key for key in keys if key.id == identity] or keys
        if not exact:
            raise NotFound(f"no such key: {identity:.100}", hint="llmgw.pyz ctl keys list shows them")
        if len(exact) > 1:
            raise ParseError(f"{len(exact)} keys are called {identity:.100}", hint="name the key's id")
        entry = self._store.get(records.KEYS + exact[0].id)
        assert entry is not None
        row = {**entry.value, "revoked_at": self._clock.wall()}
        self._store.txn((), [Put(entry.key, row)])
        return wire.KEY_VIEW.decode(row, entry.key)

    def keys(self) -> List[KeyView]:
        """Return every key without its secret, oldest first."""
        found = [wire.KEY_VIEW.decode(entry.value, entry.key) for entry in self._store.range(records.KEYS)]
        return sorted(found, key=lambda key: (key.created_at, key.id))

    def routed(self) -> List[RoutedKey]:
        """Return what routers need of the keys that are in force."""
        return [RoutedKey(entry.value["id"], entry.value["sha256"], tuple(entry.value["models"]))
                for entry in self._store.range(records.KEYS) if entry.value.get("revoked_at") is None]
