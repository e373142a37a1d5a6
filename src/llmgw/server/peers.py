"""What nodes show to each other's gates: a key for each pair of them, which nobody else is told."""
from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Dict, List, Mapping, NamedTuple, Tuple

from llmgw.decide.peers import Asked
from llmgw.decide.placement import NodeState
from llmgw.domain.gate import PeerDoor
from llmgw.domain.heartbeat import Peer
from llmgw.domain.secret import Secret
from llmgw.server import records
from llmgw.server.store import Compare, Put, Store


class Told(NamedTuple):
    """What one node is told of the others."""

    peers: Tuple[Peer, ...] = ()
    readers: Tuple[PeerDoor, ...] = ()


class PeerKeys:
    """Makes keys of one secret, so that they are the same after a restart: nodes need not be told anew."""

    def __init__(self, store: Store) -> None:
        store.txn([Compare(records.PEER_SECRET, 0)],
                  [Put(records.PEER_SECRET, {"secret": secrets.token_hex(32)})])
        entry = store.get(records.PEER_SECRET)
        assert entry is not None
        self._secret = bytes.fromhex(entry.value["secret"])

    def told(self, asked: Asked, nodes: Mapping[str, NodeState], tls_names: Mapping[str, str]) -> Dict[str, Told]:
        """Return for each node whom it asks, with a key for each, and who may ask it, by the sha256 of theirs."""
        peers: Dict[str, List[Peer]] = {}
        readers: Dict[str, List[PeerDoor]] = {}
        for asker, named in sorted(asked.items()):
            for name, fingerprints in named.items():
                observed = nodes[name].observed
                if observed is None:
                    continue
                key = self._key(asker, tls_names.get(asker, ""), name, tls_names.get(name, ""))
                peers.setdefault(asker, []).append(Peer(
                    name, observed.identity.address, observed.identity.gate_port, Secret(key), fingerprints,
                    tls_names.get(name, "")))
                readers.setdefault(name, []).append(PeerDoor(asker, hashlib.sha256(key.encode()).hexdigest()))
        return {name: Told(tuple(peers.get(name, ())), tuple(readers.get(name, ()))) for name in {*peers, *readers}}

    def _key(self, *pair: str) -> str:
        """A node that joins anew has another name in its certificate, and with it other keys."""
        return "llmgw_peer_" + hmac.new(self._secret, "\0".join(pair).encode(), hashlib.sha256).hexdigest()
