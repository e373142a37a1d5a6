"""Every route times every role: who gets in, and nobody else."""
from __future__ import annotations

import threading

import pytest

from llmgw.api import paths
from llmgw.domain.errors import Forbidden, NotFound, Unauthorized
from llmgw.server import records
from llmgw.server.config import ConfigFile
from llmgw.server.main import Server
from llmgw.server.store import put
from llmgw.server.tokens import make_token, sha256
from llmgw.system.routes import PUBLIC

# The whole table, written out once more: a route that is opened further fails here.
OPEN = {
    ("POST", paths.UPLOAD_LINK): {"admin"},
    ("GET", paths.MIRROR_NOTES): {"viewer", "admin"}, ("PUT", paths.MIRROR_NOTES): {"admin"},
    ("POST", paths.MIRROR_VERIFY): {"admin"}, ("POST", paths.MIRROR_GC): {"admin"},
    ("POST", paths.MIRROR_PULLS): {"admin"}, ("DELETE", paths.MIRROR_PULLS): {"admin"},
    ("GET", paths.HEALTH): {PUBLIC},
    ("GET", "/"): {PUBLIC}, ("GET", "/page.js"): {PUBLIC}, ("GET", "/page.css"): {PUBLIC},
    ("GET", paths.METRICS): {"viewer", "admin"},
    ("GET", paths.CA): {PUBLIC}, ("GET", paths.OWN_FILE): {PUBLIC}, ("POST", paths.JOIN): {"join"}, ("POST", paths.CERTIFICATE): {"node", "router"},
    ("GET", paths.TOKENS): {"admin"}, ("POST", paths.TOKENS): {"admin"}, ("DELETE", paths.TOKEN): {"admin"},
    ("POST", paths.REVOKE_NODE): {"admin"},
    ("POST", paths.HEARTBEAT): {"node"},
    ("POST", paths.LOG_TAIL): {"node"},
    ("GET", paths.BLOB): {"node", "admin"},
    ("GET", paths.ENGINE_ASSET): {"node", "admin"},
    ("GET", paths.ENGINE_LOCK): {"node", "viewer", "admin"}, ("PUT", paths.ENGINE_LOCK): {"node", "admin"},
    ("GET", paths.ENGINE_LOCKS): {"viewer", "admin"}, ("DELETE", paths.ENGINE_LOCKS): {"admin"},
    ("GET", paths.ROUTES): {"router", "admin"},
    ("POST", paths.ROUTER_REPORT): {"router"},
    ("GET", paths.NODES): {"viewer", "admin"},
    ("GET", paths.MODELS): {"viewer", "admin"},
    ("GET", paths.REPLICAS): {"viewer", "admin"},
    ("GET", paths.ENGINES): {"viewer", "admin"},
    ("GET", paths.EVENTS): {"viewer", "admin"},
    ("GET", paths.REPLICA_LOG): {"admin"},
    ("DELETE", paths.NODE): {"admin"},
    ("POST", paths.DRAIN_NODE): {"admin"}, ("DELETE", paths.DRAIN_NODE): {"admin"},
    ("GET", paths.KEYS): {"admin"}, ("POST", paths.KEYS): {"admin"}, ("DELETE", paths.KEY): {"admin"},
    ("GET", paths.MIRROR): {"viewer", "admin"},
    ("GET", paths.UPLOAD): {"admin"}, ("PUT", paths.UPLOAD): {"admin"},
    ("POST", paths.UPLOAD_FINISH): {"admin"},
    ("GET", paths.MIRROR_MODEL): {"viewer", "admin"},
    ("PUT", paths.MIRROR_MODEL): {"admin"}, ("DELETE", paths.MIRROR_MODEL): {"admin"},
    ("PUT", paths.MIRROR_ENGINE): {"admin"}, ("DELETE", paths.MIRROR_ENGINE): {"admin"},
    ("POST", paths.PLAN): {"admin"}, ("POST", paths.APPLY): {"admin"}, ("GET", paths.BACKUP): {"admin"},
}
UNKNOWN = ("none", "garbage", "bad", "role-changed", "expired", "revoked", "revoked-node", "join-expired")
ROLES = ("admin", "viewer", "node", "router", "infer", "join", "made-viewer", *UNKNOWN)
ROLE_OF = {"made-viewer": "viewer"}


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    (folder / "data").mkdir()
    (folder / "server.yaml").write_text("engines: {}\n")
    file = ConfigFile(str(folder / "server.yaml"))
    server = Server(str(folder / "data"), file, file.load(), "127.0.0.1", 0, threading.Event())
    tokens = {role: (folder / "data" / "tokens" / role).read_text().strip()
              for role in ("admin", "viewer", "node", "router")}
    tokens["infer"] = server.parts.tokens.make_key("k", ()).secret
    for name, role, more in (
            ("join", "join", {"opens": "node", "uses": 1, "used": 0}), ("made-viewer", "viewer", {}),
            ("expired", "admin", {"expires_at": 1.0}), ("revoked", "admin", {"revoked_at": 1.0}),
            ("revoked-node", "node", {"revoked_at": 1.0, "tls_name": "x", "name": "n"}),
            ("join-expired", "join", {"opens": "node", "uses": 1, "used": 0, "expires_at": 1.0})):
        identity, tokens[name] = make_token(role)
        put(server.parts.store, records.TOKENS + identity, {
            "id": identity, "role": role, "sha256": sha256(tokens[name]), "first": False, "made_at": 0.0, **more})
    tokens["garbage"] = "' OR '1'='1"
    tokens["bad"] = tokens["admin"][:-1] + ("A" if tokens["admin"][-1] != "A" else "B")
    tokens["role-changed"] = tokens["viewer"].replace("_viewer_", "_admin_")
    yield server.table, tokens
    server.close()


def test_the_table_is_the_one_that_is_written_here(table):
    assert {(route.method, route.pattern): set(route.roles) for route in table[0].routes} == OPEN


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("method, pattern", sorted(OPEN))
def test_every_route_opens_to_its_roles_only(table, method, pattern, role):
    routes, tokens = table
    headers = {} if role == "none" else {"authorization": f"Bearer {tokens[role]}"}
    target = pattern.replace("{", "").replace("}", "")
    if PUBLIC in OPEN[method, pattern] or ROLE_OF.get(role, role) in OPEN[method, pattern]:
        assert routes.admit(method, target, headers).route.pattern == pattern
    else:
        with pytest.raises(Unauthorized if role in UNKNOWN else Forbidden):
            routes.admit(method, target, headers)


@pytest.mark.parametrize("role", ROLES)
def test_an_unknown_path_is_a_404_only_after_a_token(table, role):
    routes, tokens = table
    headers = {} if role == "none" else {"authorization": f"Bearer {tokens[role]}"}
    with pytest.raises(Unauthorized if role in UNKNOWN else NotFound):
        routes.admit("GET", "/v1/nothing/here", headers)


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", "Basic YWRtaW46", "Bearer ' OR '1'='1", "Bearer " + "x" * 5000,
                                    "bearer\tx", "Bearer llmgw_admin__", "Bearer llmgw_admin_00000000_" + "A" * 43], ids=range(9))
def test_what_is_no_token_opens_nothing(table, header):
    with pytest.raises(Unauthorized):
        table[0].admit("GET", paths.NODES, {"authorization": header})
