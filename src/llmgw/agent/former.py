"""Environments beside which a newer one of the same version stands: kept while anything runs of them."""
from __future__ import annotations

import os
from typing import List, Tuple

from llmgw.agent.board import UNKNOWN, Board, Key
from llmgw.system.installed import Installed


class Former:
    """What is in here still has its files."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._made: List[Installed] = []

    def add(self, made: Installed) -> None:
        self._made.append(made)

    def drop(self, made: Installed) -> None:
        """It is gone, or is the one in force again."""
        self._made = [each for each in self._made if each.folder != made.folder]

    def of(self, key: Key) -> List[Installed]:
        return [made for made in self._made if (made.name, made.version) == key]

    def all(self) -> List[Installed]:
        return list(self._made)

    def folders(self, key: Key) -> Tuple[str, ...]:
        return tuple(made.folder for made in self.of(key))

    def unused(self) -> List[Installed]:
        """Return those of which no shard runs, or is about to; a shard that was not looked at yet may."""
        desired, programs = self._board.desired, self._board.programs()
        if desired is None or any(shard.id not in programs for shard in desired.node.shards):
            return []
        return [made for made in self._made
                if not any(path == UNKNOWN or path.startswith(made.folder + os.sep) for path in programs.values())]
