"""The fleet's list of packages, against what this node finds itself: the same, or refused with the lines."""
from __future__ import annotations

from llmgw.api import paths, wire
from llmgw.api.client import ControlClient
from llmgw.domain.engine import EngineWanted, PackageList
from llmgw.domain.errors import EngineFailed, TryAgain
from llmgw.domain.view import LockView
from llmgw.parse import lock
from llmgw.parse.lock import Pins

TIMEOUT_SECONDS = 60.0


def must_be_the_fleets(client: ControlClient, node: str, item: EngineWanted, platform: str, ours: Pins) -> None:
    """Refuse ``ours`` where it differs from the fleet's list; without one, offer it. EngineFailed names the lines."""
    digest = lock.digest(ours)
    wanted = dict(item.locks).get(platform, "")
    if not wanted:
        wanted = _offer(client, node, item, platform, ours).sha256
    if wanted == digest:
        return
    path = paths.fill(paths.ENGINE_LOCK, engine=item.name, version=item.version, platform=platform)
    text = client.request("GET", path, timeout=TIMEOUT_SECONDS).body.decode("utf-8", "replace")
    theirs = lock.read(text, "the fleet's list of packages")
    told = lock.differences(theirs, ours)
    if not told:
        raise TryAgain(f"{item.name} {item.version}: the fleet's list of packages has just changed")
    raise EngineFailed(
        f"{item.name} {item.version}: the fleet's list of packages is not what this node finds as of {item.as_of}: "
        + lock.sentence(told),
        hint=f"see whether this node's package index is that of the others; llmgw.pyz ctl engines relock {item.name} "
             "has a new list made")


def _offer(client: ControlClient, node: str, item: EngineWanted, platform: str, ours: Pins) -> LockView:
    """Return the list in force: this one, or that of a node which came first."""
    path = paths.fill(paths.ENGINE_LOCK, engine=item.name, version=item.version, platform=platform)
    kept = client.call("PUT", path, send=wire.PACKAGE_LIST, value=PackageList(node, item.as_of, lock.write(ours)),
                       receive=wire.LOCK_VIEW, timeout=TIMEOUT_SECONDS)
    assert isinstance(kept, LockView)
    return kept
