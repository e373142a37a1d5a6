"""Ask the server to fetch a model from Hugging Face, and watch until it has it."""
from __future__ import annotations

import re
import time
from typing import Any, Dict, Optional

from llmgw.api import paths
from llmgw.api.client import ControlClient
from llmgw.ctl import importing, output
from llmgw.ctl.progress import Progress
from llmgw.domain.errors import DownloadFailed, UsageError
from llmgw.domain.names import check_name
from llmgw.parse import weights_source

EVERY_SECONDS = 0.5


def pull(client: ControlClient, source: str, include: str = "", name: str = "") -> Dict[str, Any]:
    """Return what came: its name, commit and size. The server goes on when this is interrupted."""
    hub = weights_source.hub(source)
    if include and hub.file:
        raise UsageError(f"{source} names a file, and --include names some", hint="give one of the two")
    source = f"{source}:{include}" if include else source
    weights_source.hub(source)
    name = check_name(name, "model name") if name else _default_name(hub)
    told, progress = "", None
    while True:
        said = client.json("POST", paths.MIRROR_PULLS, {"source": source, "name": name}, timeout=3600.0)
        if said["done"]:
            _show(progress, said)
            return {**said, "name": name}
        progress = _show(progress or _begun(source, said), said)
        if said["failed"]:
            client.request("DELETE", f"{paths.MIRROR_PULLS}?name={paths.fill('{name}', name=name)}")
            raise DownloadFailed(said["sentence"])
        words = re.sub(r"[0-9]+", "", said["sentence"])
        if words != told and not said["total_bytes"]:
            output.say(said["sentence"])
        told = words
        time.sleep(EVERY_SECONDS)


def _default_name(hub: weights_source.HubSource) -> str:
    named = hub.file if hub.file.endswith(".gguf") and not any(mark in hub.file for mark in "*?[") else hub.repo
    return importing.name_of(re.sub(r"-gguf$", "", named, flags=re.IGNORECASE))


def _begun(source: str, said: Dict[str, Any]) -> Optional[Progress]:
    return Progress(f"pulling {source}", int(said["total_bytes"])) if said["total_bytes"] else None


def _show(progress: Optional[Progress], said: Dict[str, Any]) -> Optional[Progress]:
    if progress is not None:
        progress.at(int(said["done_bytes"]))
        if said["done"]:
            progress.done()
    return progress
