"""Ollama's manifests: names, layers, and which of them make a model that llama.cpp can serve.

Layout and words: ollama/ollama types/model/name.go, manifest/*.go. A digest is checked in
domain/digest.py; nothing else of a manifest ever becomes part of a path.
"""
from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Tuple

from llmgw.domain.digest import sha256_hex
from llmgw.domain.errors import ParseError

MAX_BYTES = 4 << 20
MAX_LAYERS = 10_000
MAX_DEPTH = 32
HOST, NAMESPACE, TAG = "registry.ollama.ai", "library", "latest"
NOTE_KINDS = ("template", "system", "params", "messages", "license", "prompt")
_IMAGE = "application/vnd.ollama.image."
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,79}")
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,299}(?::[0-9]{1,5})?")


@dataclass(frozen=True)
class OllamaName:
    """A model as Ollama calls it; every part may stand in a path."""

    host: str
    namespace: str
    model: str
    tag: str

    def __str__(self) -> str:
        """The shortest name that means it."""
        namespace = f"{self.namespace}/" if (self.host, self.namespace) != (HOST, NAMESPACE) else ""
        host = f"{self.host}/" if self.host != HOST else ""
        return f"{host}{namespace}{self.model}:{self.tag}"


@dataclass(frozen=True)
class Layer:
    """One blob of a model. ``kind`` is the last word of its media type: model, projector, template ..."""

    kind: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True)
class Manifest:
    """What one name consists of."""

    config: Layer
    layers: Tuple[Layer, ...]


@dataclass(frozen=True)
class Chosen:
    """What of a manifest goes into the mirror."""

    model: Layer
    projector: Optional[Layer]
    notes: Tuple[Layer, ...]


def name(text: str) -> OllamaName:
    """Return the parts of ``[HOST/][NAMESPACE/]MODEL[:TAG]``; refuse what could climb out of a folder."""
    path, _, tag = text.rpartition(":") if ":" in text.rpartition("/")[2] else (text, "", TAG)
    parts = path.split("/")
    if not 1 <= len(parts) <= 3:
        raise _no_name(text)
    host, namespace, model = [*(HOST, NAMESPACE)[:3 - len(parts)], *parts]
    return checked_name(host, namespace, model, tag, text)


def checked_name(host: str, namespace: str, model: str, tag: str, text: str = "") -> OllamaName:
    """Return the name of a manifest by its place ``manifests/HOST/NAMESPACE/MODEL/TAG``."""
    if not _HOST.fullmatch(host) or not all(_PART.fullmatch(part) for part in (namespace, model, tag)):
        raise _no_name(text or "/".join((host, namespace, model, tag)))
    return OllamaName(host, namespace, model, tag)


def _no_name(text: str) -> ParseError:
    return ParseError(f"not a name of an Ollama model: {text!r:.100}",
                      hint="write it as `ollama list` does: MODEL[:TAG]")


def manifest(data: bytes, where: str) -> Manifest:
    """Return what a manifest says; ParseError for anything that is none."""
    found = _json(data, where)
    if not isinstance(found, dict):
        raise ParseError(f"{where}: not an Ollama manifest")
    layers = found.get("layers")
    if layers is None:
        layers = []
    if not isinstance(layers, list) or len(layers) > MAX_LAYERS:
        raise ParseError(f"{where}: it has no list of layers")
    return Manifest(_layer(found.get("config"), where), tuple(_layer(layer, where) for layer in layers))


def _layer(found: Any, where: str) -> Layer:
    if not isinstance(found, dict):
        raise ParseError(f"{where}: a layer of it is no object")
    media, size = found.get("mediaType"), found.get("size")
    if not isinstance(media, str) or len(media) > 200:
        raise ParseError(f"{where}: a layer of it has no media type")
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < 1 << 50:
        raise ParseError(f"{where}: a layer of it has the size {size!r:.40}")
    digest = found.get("digest")
    try:
        sha256 = sha256_hex(digest if isinstance(digest, str) else "")
    except ParseError as error:
        raise ParseError(f"{where}: {error.message}") from None
    return Layer(media[len(_IMAGE):] if media.startswith(_IMAGE) else media, sha256, size)


def choose(found: Manifest, config: bytes, where: str) -> Chosen:
    """Return the layers to take, or say in words why this model cannot be taken."""
    said = _json(config, where)
    said = said if isinstance(said, dict) else {}
    kinds: Dict[str, List[Layer]] = {}
    for layer in found.layers:
        kinds.setdefault(layer.kind, []).append(layer)
    remote = said.get("remote_host") or said.get("remote_model")
    if remote:
        raise ParseError(f"{where} is a cloud model: its weights are at {remote!s:.100}, not on this machine")
    if "tensor" in kinds or said.get("model_format") == "safetensors":
        raise ParseError(f"{where} is kept by Ollama as single tensors, which only Ollama reads: it has no GGUF",
                         hint="pull the model's own repository: llmgw.pyz ctl mirror pull hf:ORG/REPO")
    if "adapter" in kinds:
        raise ParseError(f"{where} has an adapter (LoRA), which llmgw does not serve",
                         hint="take its base model, or merge the two into one GGUF")
    models, projectors = kinds.get("model", []), kinds.get("projector", [])
    if not models:
        raise ParseError(f"{where} has no weights")
    if len(models) > 1:
        raise ParseError(f"{where} is a split model of {len(models)} parts, whose file names Ollama has dropped; "
                         "llama.cpp needs them", hint="import the original files: llmgw.pyz ctl mirror import FILE...")
    if len(projectors) > 1:
        raise ParseError(f"{where} has {len(projectors)} projectors")
    notes = tuple(layer for kind in NOTE_KINDS for layer in kinds.get(kind, ()))
    return Chosen(models[0], projectors[0] if projectors else None, notes)


def _json(data: bytes, where: str) -> Any:
    """Return the data of a small JSON text; what is deep, large, or not JSON is refused."""
    if len(data) > MAX_BYTES:
        raise ParseError(f"{where}: {len(data)} bytes, at most {MAX_BYTES} are read")
    depth = most = 0
    for mark in re.findall(rb"[\[\]{}]", re.sub(rb'"[^"\\]*(?:\\.[^"\\]*)*"', b"", data)):
        depth += 1 if mark in b"[{" else -1
        most = max(most, depth)
    if most > MAX_DEPTH:
        raise ParseError(f"{where}: nested deeper than {MAX_DEPTH}")
    try:
        return json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError):
        raise ParseError(f"{where}: not JSON") from None
