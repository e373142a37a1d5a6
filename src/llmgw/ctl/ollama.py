"""The models that Ollama keeps on this machine: find, list, and bring them into the mirror.

Only read: nothing here writes into Ollama's folder, and every blob is held against its digest.
"""
from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Dict, Iterator, List, Mapping, Optional, Tuple

from llmgw.api import paths
from llmgw.api.client import ControlClient
from llmgw.ctl import importing
from llmgw.ctl.importing import MakeProgress, Source
from llmgw.ctl.progress import Progress
from llmgw.domain.digest import ollama_blob_path
from llmgw.domain.errors import DigestMismatch, LlmgwError, NotFound, ParseError, StorageError
from llmgw.domain.model import Weights
from llmgw.domain.names import check_name
from llmgw.domain.view import MirrorView
from llmgw.parse import gguf, ollama_manifest
from llmgw.parse.ollama_manifest import Chosen, Layer, OllamaName
from llmgw.system import files, hashing

SERVICE_HOME = "/usr/share/ollama"       # of the user that Ollama's installer makes on Linux
NOTE_BYTES = 256 << 10
MAX_LISTED = 10_000


@dataclass(frozen=True)
class Entry:
    """One model of Ollama's. ``problem`` says why it cannot be taken; else ``sha256`` is that of its weights."""

    name: OllamaName
    size_bytes: int = 0
    sha256: str = ""
    projector_sha256: str = ""
    problem: str = ""

    @property
    def vision(self) -> bool:
        return bool(self.projector_sha256)

    def is_in(self, mirror: MirrorView) -> str:
        """Return the name under which the mirror holds these very files, empty when it does not."""
        wanted = {self.sha256} | ({self.projector_sha256} if self.projector_sha256 else set())
        return next((model.name for model in mirror.models
                     if self.sha256 and wanted == {file.sha256 for file in model.files}), "")


def find(given: str, environ: Mapping[str, str], service_home: str = SERVICE_HOME) -> str:
    """Return Ollama's folder of models: as told, or where Ollama itself would look."""
    if given:
        if not os.path.isdir(os.path.join(given, "manifests")):
            raise NotFound(f"{given}: there is no folder of Ollama's models", hint="it is what holds manifests/")
        return given
    named = environ.get("OLLAMA_MODELS", "")
    home = environ.get("HOME", "") or os.path.expanduser("~")
    tried = [named] if named else [os.path.join(top, ".ollama", "models") for top in (home, service_home)]
    for folder in tried:
        if os.path.isdir(os.path.join(folder, "manifests")):
            return folder
    closed = [folder for folder in tried if _is_closed(folder)]
    if closed:
        raise StorageError(f"cannot look into {closed[0]}: permission denied", hint="run this as root, or as its owner")
    raise NotFound(f"Ollama keeps no models on this machine (looked in {', '.join(tried)})",
                   hint="name its folder with --dir, or in OLLAMA_MODELS")


def _is_closed(folder: str) -> bool:
    """Whether something of the way to ``folder`` may not be looked into by this user."""
    while folder not in ("", "/"):
        if os.path.isdir(folder):
            return not os.access(folder, os.X_OK | os.R_OK)
        folder = os.path.dirname(folder)
    return False


def entries(folder: str) -> List[Entry]:
    """Return every model that has a manifest, with what can be said of it without reading its weights."""
    return [_entry(folder, name) for name in _names(folder)]


def partial_downloads(folder: str) -> int:
    """Return how many blobs Ollama has begun to download and not ended."""
    with files.storing("read", folder):
        blobs = os.path.join(folder, "blobs")
        return sum(name.endswith("-partial") for name in (os.listdir(blobs) if os.path.isdir(blobs) else ()))


def _names(folder: str) -> Iterator[OllamaName]:
    top, count = os.path.join(folder, "manifests"), 0
    with files.storing("read", top):
        for where, folders, names in os.walk(top):       # links to folders are not followed
            folders.sort()
            parts = os.path.relpath(where, top).split(os.sep)
            if len(parts) >= 3:
                folders.clear()
            for tag in sorted(names) if len(parts) == 3 else ():
                try:
                    found = ollama_manifest.checked_name(parts[0], parts[1], parts[2], tag)
                except ParseError:
                    continue                              # no name that Ollama could have given
                count += 1
                if count > MAX_LISTED:
                    raise ParseError(f"{top}: more than {MAX_LISTED} models")
                yield found


def _entry(folder: str, name: OllamaName) -> Entry:
    try:
        chosen = _chosen(folder, name)
        taken = [layer for layer in (chosen.model, chosen.projector) if layer is not None]
        size = sum(layer.size_bytes for layer in taken)
        for layer in taken:
            _check_blob(folder, name, layer)
        return Entry(name, size, chosen.model.sha256, chosen.projector.sha256 if chosen.projector else "")
    except LlmgwError as error:
        return Entry(name, problem=error.message)


def _chosen(folder: str, name: OllamaName) -> Chosen:
    path = os.path.join(folder, "manifests", name.host, name.namespace, name.model, name.tag)
    data = _small(path, ollama_manifest.MAX_BYTES)
    if data is None:
        raise NotFound(f"Ollama has no model {name} in {folder}",
                       hint="llmgw.pyz ctl mirror import-ollama --list shows them")
    found = ollama_manifest.manifest(data, path)
    config = _small(os.path.join(folder, ollama_blob_path(found.config.sha256)), ollama_manifest.MAX_BYTES)
    return ollama_manifest.choose(found, config or b"{}", str(name))


def _small(path: str, limit: int) -> Optional[bytes]:
    """Return a small plain file, None when there is none; a pipe or a device could hold this up for ever."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise ParseError(f"{path}: not a file")
    return files.read_bytes(path, limit)


def _check_blob(folder: str, name: OllamaName, layer: Layer) -> str:
    """Return the path of a blob that is there in its size and starts as a GGUF; say what is wrong with another."""
    path = os.path.join(folder, ollama_blob_path(layer.sha256))
    if not os.path.exists(path):
        raise ParseError(f"{name}: its download has not ended" if os.path.exists(path + "-partial") else
                         f"{name}: its blob sha256-{layer.sha256:.12} is not there", hint=f"ollama pull {name}")
    if not os.path.isfile(path):
        raise ParseError(f"{path}: not a file")
    size = os.path.getsize(path)
    if size != layer.size_bytes:
        raise ParseError(f"{name}: its blob sha256-{layer.sha256:.12} has {size} bytes, its manifest says "
                         f"{layer.size_bytes}", hint=f"ollama pull {name}")
    with files.storing("read", path), open(path, "rb") as source:
        if not gguf.is_gguf(source.read(4)):
            raise ParseError(f"{name}: its {layer.kind} is no GGUF file")
    return path


def bring(client: ControlClient, folder: str, name: OllamaName, wanted: str = "",
          progress_of: MakeProgress = Progress) -> Weights:
    """Put one of Ollama's models into the mirror as ``wanted`` and return its manifest."""
    called = check_name(wanted, "model name") if wanted else default_name(name)
    chosen = _chosen(folder, name)
    flat = importing.plain(f"{name.model}-{name.tag}")
    sources = [Source(_check_blob(folder, name, chosen.model), f"{flat}.gguf", chosen.model.sha256)]
    if chosen.projector is not None:
        sources.append(Source(_check_blob(folder, name, chosen.projector), f"mmproj-{flat}.gguf",
                              chosen.projector.sha256))
    notes = _notes(folder, chosen)
    made = importing.bring(client, called, sources, "gguf", f"ollama:{name}", progress_of)
    client.json("PUT", paths.fill(paths.MIRROR_NOTES, model=called), {"notes": notes})
    return made


def default_name(name: OllamaName) -> str:
    """Return what a model is called in the mirror when nobody says otherwise."""
    return importing.plain(name.model if name.tag == ollama_manifest.TAG else f"{name.model}-{name.tag}")


def _notes(folder: str, chosen: Chosen) -> Dict[str, str]:
    """Return template, parameters, licence and the like as text, each held against its digest."""
    found: Dict[str, str] = {}
    for layer in chosen.notes:
        path = os.path.join(folder, ollama_blob_path(layer.sha256))
        data = _small(path, NOTE_BYTES) if layer.size_bytes <= NOTE_BYTES else None
        if data is None:
            continue                        # a note that is gone, or a book: the model works without
        actual = hashing.hash_bytes(data)
        if actual != layer.sha256:
            raise DigestMismatch(path, expected=layer.sha256, actual=actual)
        text = data.decode("utf-8", "replace")
        found[layer.kind] = f"{found[layer.kind]}\n{text}" if layer.kind in found else text
    return found


def listed(folder: str, mirror: MirrorView) -> List[Tuple[Entry, str]]:
    """Return (model, its name in the mirror or empty) for all that Ollama has."""
    return [(entry, entry.is_in(mirror)) for entry in entries(folder)]
