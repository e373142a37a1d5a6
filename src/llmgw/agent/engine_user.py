"""Whom engines run as: an agent of root runs them, and every look at them, as a user that reads none of its secrets.

    data_dir                          0710 root:llmgw-engine, so nobody else comes in
      state/ gate/                    0700 root
      engines/ models/ blobs/ tools/  0750 root:llmgw-engine: engines read them
      tools/home tools/uv-cache       0770 root:a group that only uv is in, like all that uv makes until it is root's
      shards/ID/                      0710 root:a group that only this shard is in
        key work/                     0600, 0700 llmgw-engine; all else in there is root's, 0600
"""
from __future__ import annotations

import logging
import os
import threading
from typing import Callable, Optional

from llmgw.agent.layout import Layout
from llmgw.domain.command import RunAs
from llmgw.domain.errors import LlmgwError, RequirementMissing
from llmgw.system import accounts, files

log = logging.getLogger(__name__)

UV_NUMBER = 0                     # of its group; shards have those of their ports
NOTE = "engine-user"
BY_ROOT = "say engine_user: root in agent.yaml to run engines as root"


class EngineUser:
    """``name`` empty: llmgw-engine when we are root, else ourselves. ``note`` sets a standing warning of this node."""

    def __init__(self, name: str, layout: Layout, note: Callable[[str, str], None]) -> None:
        self._layout, self._note = layout, note
        self._name = name or accounts.ENGINE_USER
        self._own = not accounts.is_root() or self._name == "root"
        self._user: Optional[RunAs] = None
        self._lock = threading.Lock()

    @property
    def is_other(self) -> bool:
        """Whether engines run as somebody else than this process."""
        return not self._own

    def run_as(self) -> Optional[RunAs]:
        """Return whom engines run as, None for ourselves; RequirementMissing while there is no such user."""
        if self._own:
            return None
        with self._lock:
            if self._user is None:
                try:
                    self._user = self._ready()
                except LlmgwError as error:
                    self._note(NOTE, error.message)
                    raise
                self._note(NOTE, "")
                log.info("engines run as user=%s uid=%d", self._user.name, self._user.uid)
            return self._user

    def or_ourselves(self) -> Optional[RunAs]:
        """Return whom a program of the system may run as that shows what engines can see; ourselves without a user."""
        try:
            return self.run_as()
        except LlmgwError:
            return None

    def of_uv(self) -> Optional[RunAs]:
        """Return whom uv runs as: the same user in a group that no shard is in, so none reaches what it makes."""
        user = self.run_as()
        return accounts.private(user, UV_NUMBER) if user is not None else None

    def of_shard(self, folder: str, port: int) -> Optional[RunAs]:
        """Return whom a shard runs as, and open its folder to it and to no other shard."""
        work = files.make_dir(work_dir(folder))
        user = self.run_as()
        if user is None:
            return None
        user = accounts.private(user, port)
        accounts.share(folder, user, 0o710)
        accounts.give(work, user, 0o700)
        return user

    def _ready(self) -> RunAs:
        layout = self._layout
        if not accounts.sees_others():
            raise RequirementMissing("engines cannot run as another user here: this root may not look into the "
                                     "processes of others, as in a container",
                                     hint=f"add CAP_SYS_PTRACE to it, or {BY_ROOT}")
        accounts.open_above(layout.root)
        user = accounts.need(self._name)
        for folder in (layout.engines, layout.models, layout.blobs, layout.tools):
            accounts.share(files.make_dir(folder), user)
        accounts.share(files.make_dir(layout.shards), user, 0o710)
        accounts.share(layout.root, user, 0o710)
        if not accounts.may_enter(user, layout.engines):
            closed = accounts.closed(user, layout.root) or layout.root
            raise RequirementMissing(
                f"engines run as the user {user.name}, which may not enter {closed}, "
                f"where the data folder {layout.root} lies",
                hint=f"choose a data_dir below /var/lib, or {BY_ROOT}")
        return user


def work_dir(folder: str) -> str:
    """Return where the programs of a shard work: all that they may write to."""
    return os.path.join(folder, "work")
