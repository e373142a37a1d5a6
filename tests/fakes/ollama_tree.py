"""Ollama's folder of models around a real GGUF, as `ollama pull` would leave it."""
from __future__ import annotations

import hashlib
import json
import pathlib

IMAGE = "application/vnd.ollama.image."


def make(folder, gguf, model="gemma3", tag="270m", template="{{ .Prompt }}", projector=None):
    """Lay out ``gguf`` (linked, not copied) as MODEL:TAG and return the folder."""
    folder = pathlib.Path(folder)
    (folder / "blobs").mkdir(parents=True)

    def layer(kind, data=b"", path=None):
        digest, size = hashlib.sha256(data), len(data)
        if path is not None:
            size = pathlib.Path(path).stat().st_size
            with open(path, "rb") as source:
                for piece in iter(lambda: source.read(1 << 20), b""):
                    digest.update(piece)
        blob = folder / "blobs" / f"sha256-{digest.hexdigest()}"
        if not blob.exists():
            blob.symlink_to(pathlib.Path(path).resolve()) if path is not None else blob.write_bytes(data)
        return {"mediaType": kind, "digest": f"sha256:{digest.hexdigest()}", "size": size}

    layers = [layer(IMAGE + "model", path=gguf)]
    layers += [layer(IMAGE + "projector", path=projector)] if projector is not None else []
    layers += [layer(IMAGE + "template", template.encode()), layer(IMAGE + "license", b"Gemma Terms of Use\n"),
               layer(IMAGE + "params", b'{"temperature":1,"top_k":64}')]
    config = layer("application/vnd.docker.container.image.v1+json", json.dumps({
        "model_format": "gguf", "model_family": "gemma3", "model_type": "268.10M", "file_type": "Q4_K_M",
        "os": "linux", "rootfs": {"type": "layers", "diff_ids": [one["digest"] for one in layers]}}).encode())
    place = folder / "manifests" / "registry.ollama.ai" / "library" / model
    place.mkdir(parents=True)
    (place / tag).write_text(json.dumps({
        "schemaVersion": 2, "mediaType": "application/vnd.docker.distribution.manifest.v2+json", "config": config,
        "layers": layers}))
    return folder
