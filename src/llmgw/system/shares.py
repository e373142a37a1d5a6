"""Who brings which chunk: the source itself only what no peer has, as long as the peers are worth waiting for.

Several nodes that fetch the same file at once begin in different places, and give each other what they have:
so the source sends each byte about once. Nothing here locks or reads a clock.
"""
from __future__ import annotations

from collections import Counter
from typing import Dict, List, Optional, Sequence, Set

PATIENCE_SECONDS = 10.0
NOTHING, HERE, COMING = "012"  # of one chunk: coming is what is on its way from the source
PEER_RUN_CHUNKS = 4           # asked for in one request
FEW_CHUNKS = 16               # with fewer missing, one at a time: the last ones come from all sides


class Patience:
    """How far a transfer may fall behind what the source alone would have done, because it waits for peers."""

    def __init__(self, seconds: float = PATIENCE_SECONDS) -> None:
        self.seconds = seconds
        self.behind_seconds = 0.0
        self.is_over = False

    def waited(self, seconds: float, worth_seconds: float) -> None:
        """Count a wait in which the peers brought what the source alone would bring in ``worth_seconds``."""
        self.behind_seconds = max(0.0, self.behind_seconds + seconds - worth_seconds)
        self.is_over = self.is_over or self.behind_seconds > self.seconds


class _Peer:
    """What a peer said it has; ``said`` is None before it has answered, empty when it does not even fetch the file."""

    def __init__(self) -> None:
        self.said: Optional[str] = None
        self.here: Set[int] = set()
        self.taken: Set[int] = set()              # here, or on its way there from the source


class Shares:
    """The chunks that are missing, and what is known of the peers. One lock of the caller's around all calls."""

    def __init__(self, count: int, patience: Optional[Patience] = None) -> None:
        self._count = count
        self.missing: Set[int] = set()
        self.spoiled: Counter[int] = Counter()            # how often the source sent one wrong: then peers are better
        self.in_flight = 0
        self._peers: Dict[str, _Peer] = {}                # that are asked
        self._patience = patience or Patience()
        self._first, self._end = 0, count                 # of the file: our own part, when all begin at once
        self._busy = 0                                    # runs under way from the source
        self._rate = 0.0                                  # of one stream of the source, bytes per second
        self._waiting_since: Optional[float] = None
        self._peer_bytes = self._seen_bytes = 0

    @property
    def is_done(self) -> bool:
        return not self.missing and not self.in_flight

    @property
    def has_peers(self) -> bool:
        return bool(self._live())

    @property
    def is_hoped_for(self) -> bool:
        """Return whether something may come without the source."""
        return any(peer.said is None or self.missing & peer.taken for peer in self._live()) or bool(self.in_flight)

    def is_held(self, index: int) -> bool:
        """Return whether a peer has a chunk."""
        return any(index in peer.here for peer in self._live())

    def _live(self) -> List[_Peer]:
        return [peer for peer in self._peers.values() if peer.said != ""]

    # Peers.

    def begin(self, place: int, count: int) -> None:
        """Take a part of the file as our own: each of the ``count`` that fetch it has another."""
        self._first, self._end = (self._count * at // count for at in (place, place + 1))

    def add(self, peer: str) -> None:
        self._peers[peer] = _Peer()

    def know(self, peer: str, said: str) -> None:
        """Take what a peer says of each chunk."""
        known = self._peers.get(peer)
        if known is not None and known.said != said:
            known.said = said
            known.here = {index for index, one in enumerate(said) if one == HERE}
            known.taken = known.here.union(index for index, one in enumerate(said) if one == COMING)

    def is_unknown(self, peer: str) -> bool:
        return peer in self._peers and self._peers[peer].said is None

    def drop(self, peer: str) -> None:
        self._peers.pop(peer, None)

    def peer_brought(self, count: int) -> None:
        self._peer_bytes += count

    def for_peer(self, peer: str) -> List[int]:
        """Return the next chunks to ask this peer for, best those that no other has; empty: none now."""
        known = self._peers.get(peer)
        here = self.missing & known.here if known is not None else set()
        if not here:
            return []
        rare = here.difference(*(other.here for name, other in self._peers.items() if name != peer))
        return self._take(min(rare or here), rare or here, 1 if len(self.missing) < FEW_CHUNKS else PEER_RUN_CHUNKS)

    # The source.

    def for_source(self, now: float, streams: int, most: int) -> List[int]:
        """Return the next chunks to ask the source for; empty: its streams are enough, or the peers are waited for."""
        missing = self.missing.difference(index for index in self.spoiled if self.is_held(index))
        if not missing or self._busy >= self._streams(streams):
            return []
        found = self._next_of_source(missing, now, min(most, max(1, -(-len(self.missing) // streams))))
        if found:
            self._busy += 1
            self._waiting_since = None
        return found

    def source_is_done(self, count: int, seconds: float) -> None:
        """Note the end of a run of the source, how much it brought, and in what time."""
        self._busy -= 1
        if count and seconds > 0:
            self._rate = count / seconds if not self._rate else (self._rate + count / seconds) / 2

    def _streams(self, streams: int) -> int:
        return streams if self._patience.is_over else max(1, streams // (1 + len(self._live())))

    def _next_of_source(self, missing: Set[int], now: float, most: int) -> List[int]:
        live = self._live()
        unsure = any(peer.said is None for peer in live)
        if not live:
            return self._take(min(missing, key=self._order), missing, most)
        most = most if self._patience.is_over else 1      # soon told to the others, and taken from them
        free = missing.difference(*(peer.taken for peer in live))
        best = min(free, key=self._order) if free else None
        if best is not None and (not unsure or self._patience.is_over):
            return self._take(best, free, most)
        if self._patience.is_over or not (self._rate or self._busy):     # one chunk tells how fast it is
            return self._take(min(missing, key=self._order), missing, most)
        self._wait(now)
        return []

    def _wait(self, now: float) -> None:
        if self._waiting_since is not None:
            worth = (self._peer_bytes - self._seen_bytes) / self._rate if self._rate else 0.0
            self._patience.waited(now - self._waiting_since, worth)
        self._waiting_since, self._seen_bytes = now, self._peer_bytes

    def _order(self, index: int) -> int:
        """Our own part from its beginning, then those of others from the end: they come from the other side."""
        return index - self._first if self._first <= index < self._end else 2 * self._count - index

    def _take(self, first: int, among: Set[int], most: int) -> List[int]:
        run = [first]
        while len(run) < most and run[-1] + 1 in among:
            run.append(run[-1] + 1)
        self.missing.difference_update(run)
        self.in_flight += len(run)
        return run

    def give_back(self, run: Sequence[int]) -> None:
        """Take back chunks that did not come."""
        self.missing.update(run)
        self.in_flight -= len(run)

    def came(self) -> None:
        """Count one chunk that is here."""
        self.in_flight -= 1
