"""Every path of the control API, once: the route table and the clients both read it here.

``{name}`` stands for one percent-encoded segment; ``fill`` makes a real path of a pattern.
"""
from __future__ import annotations

from urllib.parse import quote

HEALTH = "/healthz"
METRICS = "/metrics"

HEARTBEAT = "/v1/nodes/{node}/heartbeat"             # POST NodeObserved -> HeartbeatAnswer
LOG_TAIL = "/v1/nodes/{node}/log-tails"              # POST LogTail
BLOB = "/v1/blobs/{digest}"                          # GET, Range
ENGINE_ASSET = "/v1/engines/{engine}/{version}/assets/{asset}"  # GET, Range; fetched when first asked for
ENGINE_LOCKS = "/v1/engines/{engine}/{version}/locks"  # GET: the fleet's lists of packages; DELETE: make new ones
ENGINE_LOCK = "/v1/engines/{engine}/{version}/locks/{platform}"  # GET: its text; PUT PackageList: the first wins

OWN_FILE = "/llmgw.pyz"                              # GET: what this server runs, for machines that join
CA = "/v1/ca"                                        # GET, before there is trust: the CA as PEM
JOIN = "/v1/join"                                    # POST JoinRequest -> JoinAnswer
CERTIFICATE = "/v1/certificate"                      # POST {names} -> Renewed, for the caller's own name

ROUTES = "/v1/routes"                                # GET ?after=REVISION&wait=SECONDS -> RouteTable; 304
ROUTER_REPORT = "/v1/routers/{router}/report"        # POST RouterReport

NODES = "/v1/nodes"
NODE = "/v1/nodes/{node}"                            # DELETE: forget one that is gone for good
MODELS = "/v1/models"
REPLICAS = "/v1/replicas"
ENGINES = "/v1/engines"
EVENTS = "/v1/events"                                # GET ?after=ID&wait=SECONDS
REPLICA_LOG = "/v1/replicas/{replica}/log"           # GET ?bytes=N, admins only
DRAIN_NODE = "/v1/nodes/{node}/drain"                # POST, DELETE

REVOKE_NODE = "/v1/nodes/{node}/revoke"              # POST: end its credential, forget it

TOKENS = "/v1/tokens"                                # GET, POST {role, ttl_seconds, uses, name}
TOKEN = "/v1/tokens/{token}"                         # DELETE

KEYS = "/v1/keys"                                    # GET, POST {name, models}
KEY = "/v1/keys/{key}"                               # DELETE

MIRROR = "/v1/mirror"                                # GET: models and engine archives
UPLOAD = "/v1/mirror/uploads/{digest}"               # GET -> {received_bytes, complete}; PUT ?offset=N piece
UPLOAD_FINISH = "/v1/mirror/uploads/{digest}/finish"  # POST {size_bytes}
UPLOAD_LINK = "/v1/mirror/uploads/{digest}/link"     # POST {path}: a file of the server's machine, not copied
MIRROR_MODEL = "/v1/mirror/models/{model}"           # PUT manifest, GET, DELETE
MIRROR_NOTES = "/v1/mirror/models/{model}/notes"     # GET, PUT {notes}: template, licence ... as texts
MIRROR_VERIFY = "/v1/mirror/blobs/{digest}/verify"   # POST: read it again -> {sha256, problem}
MIRROR_GC = "/v1/mirror/gc"                          # POST {dry_run} -> what nobody needs
MIRROR_PULLS = "/v1/mirror/pulls"                    # POST {source, name} -> how far it is; DELETE ?name=
MIRROR_ENGINE = "/v1/mirror/engines/{engine}/{version}/{asset}"  # PUT {sha256, size_bytes}, DELETE

PLAN = "/v1/plan"                                    # POST server.yaml text -> what it would do
APPLY = "/v1/apply"                                  # POST {confirm}
BACKUP = "/v1/backup"                                # GET: a whole database

# What a node's gate answers to other nodes, beside the paths of its engines.
PEER_BLOB = "/peer/blobs/{digest}"                   # GET, Range
PEER_CHUNKS = "/peer/blobs/{digest}/chunks"          # GET -> {"chunks": "0112…"}: 1 is here, 2 on its way

PIECE_BYTES = 8 << 20                                # the largest piece of an upload


def fill(pattern: str, **values: str) -> str:
    """Return the path of ``pattern`` with each value percent-encoded, slashes too."""
    return pattern.format(**{name: quote(value, safe="") for name, value in values.items()})
