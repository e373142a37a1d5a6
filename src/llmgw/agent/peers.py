"""Other nodes as suppliers of blobs, through their gates. What they send is proven by its digest, and nothing else."""
from __future__ import annotations

import json
import logging
import threading
import time
from typing import Any, Dict, List, Optional, Set, Tuple

from llmgw.agent.board import Board
from llmgw.api import paths
from llmgw.api.joining import Credential
from llmgw.domain.errors import DownloadFailed, TryAgain, Unreachable
from llmgw.domain.heartbeat import NodeDesired, Peer
from llmgw.parse.address import is_loopback, joined
from llmgw.system import tls
from llmgw.system.chunks import PEER_SECONDS, Filler, Supplier
from llmgw.system.http_client import HttpClient, Stream

log = logging.getLogger(__name__)

LOOK_SECONDS = 3.0
PROMPT_SECONDS = 0.5
MAP_BYTES = 4 << 20
LIAR_SECONDS = 600.0          # not asked for so long, after a wrong chunk
SILENT_SECONDS = 60.0         # ... after no answer, a cut or a slow one
_NOT_NOW = (429, 503)


class Peers:
    """Whom the control plane named, less those that failed lately. Called by the fetcher's threads."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._context: Any = None
        self._not_before: Dict[str, float] = {}
        self._lock = threading.Lock()

    def take(self, held: Credential) -> None:
        """Trust the gates of this fleet."""
        self._context = tls.client_context(held.fleet_ca)

    def having(self, digest: str) -> List[Supplier]:
        """Return the nodes that have a blob or fetch it."""
        desired, now = self._board.desired, time.monotonic()
        if desired is None or not desired.node.peers:
            return []
        marks = _fingerprints(desired.node, digest)
        with self._lock:
            return [_Gate(self, peer, client, digest) for peer in desired.node.peers
                    if marks.intersection(peer.fingerprints) and self._not_before.get(peer.node, 0.0) <= now
                    for client in [self._client(peer)] if client is not None]

    def share(self, digest: str) -> Tuple[int, int]:
        """Return which part of a blob, of how many, this node begins with: the others begin with the others."""
        desired = self._board.desired
        if desired is not None and desired.node.shares:
            marks = _fingerprints(desired.node, digest)
            for one in desired.node.shares:
                if one.fingerprint in marks and 0 <= one.place < one.count:
                    return one.place, one.count
        return 0, 1

    def _client(self, peer: Peer) -> Optional[HttpClient]:
        """Return what talks to a gate; None when it could not be trusted."""
        where = joined(peer.host, peer.port)
        if peer.tls_name and self._context is not None:
            return HttpClient(f"https://{where}", context=self._context, server_name=peer.tls_name,
                              timeout=PEER_SECONDS)
        if not peer.tls_name and is_loopback(peer.host):
            return HttpClient(f"http://{where}", timeout=PEER_SECONDS)
        return None

    def leave_out(self, name: str, lied: bool) -> None:
        """Ask a node no more for a while."""
        seconds = LIAR_SECONDS if lied else SILENT_SECONDS
        with self._lock:
            self._not_before[name] = max(self._not_before.get(name, 0.0), time.monotonic() + seconds)
        log.log(logging.WARNING if lied else logging.INFO, "node %s is not asked for weights for %.0f s: it %s", name,
                seconds, "sent a wrong chunk" if lied else "did not answer as it should")


def _fingerprints(desired: NodeDesired, digest: str) -> Set[str]:
    """Return which weights that are wanted here have a blob."""
    return {shard.weights.fingerprint for shard in desired.shards
            if any(file.sha256 == digest for file in shard.weights.files)}


class _Gate:
    """One blob at one node's gate."""

    spare = True

    def __init__(self, peers: Peers, peer: Peer, client: HttpClient, digest: str) -> None:
        self._peers, self._peer, self._client, self._digest = peers, peer, client, digest
        self.name = f"node {peer.node}"
        self._headers = {"Authorization": f"Bearer {peer.key.reveal()}"}

    def open(self, first: int, end: int) -> Filler:
        opened = self._ask(paths.PEER_BLOB, PEER_SECONDS, Range=f"bytes={first}-{end - 1}")
        if opened.status == 206:
            return _Prompt(opened)
        opened.close()
        if opened.status in _NOT_NOW:
            raise TryAgain(f"{self.name} has enough readers")
        raise DownloadFailed(f"{self.name} answered {opened.status}")

    def _ask(self, pattern: str, seconds: float, **headers: str) -> Stream:
        return self._client.stream("GET", paths.fill(pattern, digest=self._digest), timeout=seconds,
                                   head_seconds=seconds, headers={**self._headers, **headers})

    def look(self) -> str:
        until, body = time.monotonic() + LOOK_SECONDS, b""
        with self._ask(paths.PEER_CHUNKS, LOOK_SECONDS) as opened:
            for piece in iter(lambda: opened.read(1 << 16), b""):
                body += piece
                if len(body) > MAP_BYTES or time.monotonic() > until:
                    raise Unreachable(f"{self.name} did not say in time what it has")
            if opened.status != 200:
                raise Unreachable(f"{self.name} answered {opened.status}")
        try:
            return str(json.loads(body)["chunks"])
        except (ValueError, KeyError, TypeError, RecursionError):
            raise Unreachable(f"{self.name} did not say what it has") from None

    def dropped(self, lied: bool) -> None:
        self._peers.leave_out(self._peer.node, lied)


class _Prompt:
    """A stream that gives what it has after a moment, however little that is: who is slow shall be seen to be."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self.status, self.headers = stream, stream.status, stream.headers

    def read(self, size: int) -> bytes:
        return self._stream.read(size)

    def read_into(self, view: memoryview) -> int:
        filled, until = 0, time.monotonic() + PROMPT_SECONDS
        while filled < len(view) and (not filled or time.monotonic() < until):
            piece = self._stream.read(len(view) - filled)
            if not piece:
                break
            view[filled:filled + len(piece)] = piece
            filled += len(piece)
        return filled

    def close(self) -> None:
        self._stream.close()
