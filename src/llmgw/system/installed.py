"""The layout of installed engines: one folder per version, whole when its marker is there."""
from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, replace
from typing import Any, List, Optional, Tuple

from llmgw.domain.errors import StorageError
from llmgw.domain.names import file_name
from llmgw.system import files

MARKER = ".llmgw-installed.json"


@dataclass(frozen=True)
class Installed:
    """What the marker of an installed version says."""

    name: str
    version: str
    program: str                  # relative to the version's folder
    says: str
    devices: Tuple[str, ...] = ()
    installed_at: float = 0.0
    archive: str = ""             # the asset it came from
    cuda: str = ""                # the CUDA version it was built for; empty: the CPU build
    packages: str = ""            # sha256 of the list of packages that it was made from
    folder: str = field(default="", compare=False)     # where it was read


def version_dir(engines: str, name: str, version: str) -> str:
    """Return where a version of an engine lies below the folder of all engines."""
    return os.path.join(engines, file_name(name), file_name(version))


def beside(folder: str, packages: str) -> str:
    """Return where a version lies that is made again, of other packages, while the first in ``folder`` is in use."""
    return f"{folder}~{packages[:12]}"


def is_at_home(engines: str, item: Installed) -> bool:
    """Say whether what was read lies where such a thing belongs."""
    usual = version_dir(engines, item.name, item.version)
    return item.folder in (usual, beside(usual, item.packages) if item.packages else usual)


def read(folder: str) -> Optional[Installed]:
    """Return what is installed in ``folder``, None when nothing whole is."""
    try:
        data = files.read_bytes(os.path.join(folder, MARKER))
        return replace(_from_json(json.loads(data)), folder=folder) if data else None
    except (ValueError, KeyError, TypeError, AttributeError, StorageError):
        return None


def write(folder: str, installed: Installed) -> None:
    """Mark ``folder`` as whole."""
    files.write_json(os.path.join(folder, MARKER), {
        "engine": installed.name, "version": installed.version, "program": installed.program,
        "says": installed.says, "devices": list(installed.devices), "installed_at": installed.installed_at,
        "archive": installed.archive, "cuda": installed.cuda, "packages": installed.packages}, mode=0o644)


def folders(engines: str) -> List[str]:
    """Return every folder where a version lies or was about to, unfinished ones too."""
    return [version for engine in _folders(engines) for version in _folders(engine)]


def find(engines: str) -> List[Installed]:
    """Return all that is whole, the oldest first; what cannot be read is not there."""
    found = [item for item in map(read, folders(engines)) if item is not None and is_at_home(engines, item)]
    return sorted(found, key=lambda item: item.installed_at)


def _folders(path: str) -> List[str]:
    try:
        names = sorted(os.listdir(path))
    except OSError:
        return []
    return [os.path.join(path, name) for name in names if os.path.isdir(os.path.join(path, name))]


def _from_json(data: Any) -> Installed:
    return Installed(str(data["engine"]), str(data["version"]), str(data["program"]), str(data["says"]),
                     tuple(str(item) for item in data["devices"]), float(data["installed_at"]),
                     str(data.get("archive", "")), str(data.get("cuda", "")), str(data.get("packages", "")))
