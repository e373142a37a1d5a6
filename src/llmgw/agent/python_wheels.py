"""Wheels from the control plane's mirror: fetched once per site, and all that a node without an index needs."""
from __future__ import annotations

import os
from typing import Callable, Dict, Optional, Tuple

from llmgw.agent.layout import Layout
from llmgw.agent.prove import Report
from llmgw.api import paths
from llmgw.api.client import ControlClient
from llmgw.domain.engine import Asset, EnginePhase, EngineWanted
from llmgw.domain.errors import Unreachable
from llmgw.parse import lock
from llmgw.parse.lock import Pins
from llmgw.system import download, failpoint, files

RESERVE_BYTES = 256 << 20
TIMEOUT_SECONDS = 60.0


def chosen(item: EngineWanted, pins: Pins) -> Optional[Tuple[Asset, ...]]:
    """Return the mirror's wheels of the list, None when one of its packages has none there."""
    by_digest: Dict[str, Asset] = {asset.sha256: asset for asset in item.assets}
    found = [[by_digest[digest] for digest in pin.hashes if digest in by_digest] for pin in pins]
    return tuple(asset for assets in found for asset in assets) if found and all(found) else None


def vouched_list(client: ControlClient, item: EngineWanted, platform: str, error: Unreachable) -> Pins:
    """Return the fleet's list for a node that cannot ask an index: only one that came with llmgw or from an admin.

    Raises ``error`` when there is none, or when the mirror does not hold its wheels.
    """
    digest = dict(item.locks).get(platform, "")
    if not digest or digest not in item.vouched or not item.assets:
        raise error
    path = paths.fill(paths.ENGINE_LOCK, engine=item.name, version=item.version, platform=platform)
    text = client.request("GET", path, timeout=TIMEOUT_SECONDS).body.decode("utf-8", "replace")
    pins = lock.read(text, "the fleet's list of packages")
    if lock.digest(pins) != digest or chosen(item, pins) is None:
        raise error
    return pins


class Wheels:
    """Brings wheels into ``tools/wheels``; what is whole there stays until the engine is installed."""

    def __init__(self, client: ControlClient, layout: Layout, stopping: Callable[[], bool]) -> None:
        self._client, self._layout, self._stopping = client, layout, stopping
        self.folder = os.path.join(layout.tools, "wheels")

    def bring(self, item: EngineWanted, assets: Tuple[Asset, ...], report: Report) -> str:
        """Return the folder that holds them all, verified."""
        files.make_dir(self.folder, 0o755)
        label, total, done = f"{item.name} {item.version}", sum(asset.size_bytes for asset in assets), 0
        for asset in assets:
            target = os.path.join(self.folder, os.path.basename(asset.name))
            if download.damage(target, asset.size_bytes, (), asset.sha256):
                told = f"downloading {len(assets)} packages of {label} from the mirror"
                self._fetch(item, asset, target, _progress(report, told, done, total))
                failpoint.reach("wheels-one-more")
            done += asset.size_bytes
        return self.folder

    def _fetch(self, item: EngineWanted, asset: Asset, target: str, progress: Callable[[int], None]) -> None:
        path = paths.fill(paths.ENGINE_ASSET, engine=item.name, version=item.version, asset=asset.name)
        download.fetch(lambda offset: self._client.stream(path, headers={"Range": f"bytes={offset}-"},
                                                          timeout=TIMEOUT_SECONDS),
                       target, sha256=asset.sha256, size=asset.size_bytes, partial=self._layout.partial(asset.sha256),
                       reserve_bytes=RESERVE_BYTES, progress=progress, stopping=self._stopping)

    def remove(self) -> None:
        files.remove(self.folder)


def _progress(report: Report, what: str, before: int, total: int) -> Callable[[int], None]:
    return lambda count: report(
        EnginePhase.DOWNLOADING, f"{what}: {(before + count) / 1e6:.0f} of {total / 1e6:.0f} MB",
        done=before + count, total=total)
