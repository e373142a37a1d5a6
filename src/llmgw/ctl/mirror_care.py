"""Look after the mirror: what is in it and who uses it, remove, clear away, read again."""
from __future__ import annotations

import argparse
from typing import Dict, List, Optional, Tuple

from llmgw.api import paths, wire
from llmgw.api.client import ControlClient
from llmgw.ctl import output
from llmgw.ctl.connection import connect
from llmgw.ctl.progress import Progress
from llmgw.domain.errors import ApiError, CheckFailed, NotFound
from llmgw.domain.model import Weights, WeightsFile
from llmgw.domain.view import MirrorView, WeightsUse

TITLES = ("NAME", "KIND", "SIZE", "FILES", "DIGEST", "USED BY", "NODES", "KEPT SINCE")
VERIFY_TIMEOUT_SECONDS = 3600.0
NOTE_LINES = 12


def view(client: ControlClient) -> MirrorView:
    """Return what the mirror holds now."""
    return wire.MIRROR_VIEW.decode(client.json("GET", paths.MIRROR), "mirror")


def list_(options: argparse.Namespace) -> int:
    """Print everything in the mirror."""
    client = connect(options)
    if options.json:
        output.write_json(client.json("GET", paths.MIRROR))
        return 0
    mirror = view(client)
    output.write_table(TITLES, rows(mirror), empty="the mirror is empty: llmgw.pyz ctl mirror import FILE --name NAME")
    for sentence in mirror.activity:
        output.say(sentence)
    output.say(f"free: {output.size(mirror.free_bytes)}")
    return 0


def rows(mirror: MirrorView) -> List[output.Row]:
    """Return the lines of a table of the mirror: models first."""
    uses = {use.name: use for use in mirror.uses}
    found = [_model_row(model, uses.get(model.name, WeightsUse(model.name))) for model in mirror.models]
    return found + [output.Row((f"{held.engine} {held.version}", "engine", output.size(held.asset.size_bytes), "1",
                                held.asset.sha256[:12], "-", "-", output.moment(held.imported_at)), (held.asset.name,))
                    for held in mirror.engines]


def _model_row(model: Weights, use: WeightsUse) -> output.Row:
    notes = [f"damaged: {', '.join(use.damaged)} (llmgw.pyz ctl mirror import brings it again)"] if use.damaged else []
    return output.Row((model.name, kind(model), output.size(model.size_bytes), str(len(model.files)),
                       model.fingerprint[:12], ", ".join(use.models) or "-", ", ".join(use.nodes) or "-",
                       output.moment(model.imported_at)), tuple(notes))


def kind(model: Weights) -> str:
    """Return what a model is made of in a few words."""
    return f"{model.format}+vision" if model.projector else model.format


def show(options: argparse.Namespace) -> int:
    """Print all that is known of one model."""
    client = connect(options)
    path = paths.fill(paths.MIRROR_MODEL, model=options.name)
    if options.json:
        output.write_json({"weights": client.json("GET", path), "notes": _notes(client, options.name)})
        return 0
    model = client.call("GET", path, receive=wire.WEIGHTS)
    use = next((use for use in view(client).uses if use.name == model.name), WeightsUse(model.name))
    output.write("\n".join(details(model, use, _notes(client, options.name))))
    return 0


def _notes(client: ControlClient, name: str) -> Dict[str, str]:
    answer = client.json("GET", paths.fill(paths.MIRROR_NOTES, model=name))
    return {str(key): str(text) for key, text in answer["notes"].items()}


def details(model: Weights, use: WeightsUse, notes: Dict[str, str]) -> List[str]:
    """Return the lines that say everything of a model in the mirror."""
    pairs = [("name", model.name), ("kind", kind(model)), ("size", output.size(model.size_bytes)),
             ("from", model.source or "-"), ("revision", model.revision or "-"),
             ("vision", f"yes ({model.projector})" if model.projector else "no"),
             ("made for", f"{output.count(model.context_train)} tokens" if model.context_train else "-"),
             ("KV cache", f"{output.size(model.kv_bytes_per_token)} per token" if model.kv_bytes_per_token else "-"),
             ("fingerprint", model.fingerprint), ("kept since", output.moment(model.imported_at)),
             ("used by", ", ".join(use.models) or "-"), ("replicas", ", ".join(use.replicas) or "-"),
             ("nodes", ", ".join(use.nodes) or "-")]
    lines = [f"{key:<12} {output.clean(text)}" for key, text in pairs]
    for file in model.files:
        state = "  DAMAGED" if file.name in use.damaged else ""
        lines.append(f"  {output.size(file.size_bytes):>8}  {file.sha256[:12]}  {output.clean(file.name)}{state}")
    for name in sorted(notes):
        text = output.lines(notes[name].strip("\n"))
        lines.append(f"{output.clean(name)}:")
        lines += [f"  {line}" for line in text[:NOTE_LINES]]
        lines += [f"  ... {len(text) - NOTE_LINES} more lines (--json has them)"] if len(text) > NOTE_LINES else []
    return lines


def remove(options: argparse.Namespace) -> int:
    """Forget a model, and the files that nothing else needs."""
    path = paths.fill(paths.MIRROR_MODEL, model=options.name)
    connect(options).request("DELETE", path + ("?force=1" if options.force else ""))
    output.say(f"{options.name}: removed from the mirror")
    return 0


def collect(options: argparse.Namespace) -> int:
    """Clear away, or with --dry-run name, what nothing needs."""
    found = connect(options).json("POST", paths.MIRROR_GC, {"dry_run": options.dry_run},
                                  timeout=VERIFY_TIMEOUT_SECONDS)["items"]
    if options.json:
        output.write_json({"items": found})
        return 0
    for item in found:
        output.write(f"{item['what']:<8}  {output.size(item['size_bytes']):>8}  {output.clean(item['path'])}")
    total = output.size(sum(item["size_bytes"] for item in found))
    output.say(f"{len(found)} files, {total}: {'would be removed' if options.dry_run else 'removed'}"
               if found else "there is nothing that nobody needs")
    return 0


def verify(options: argparse.Namespace) -> int:
    """Let the server read its files again; exit code 3 when one is not what it was."""
    client = connect(options)
    mirror = view(client)
    bad = [_verify(client, name, file) for name, file in _blobs(mirror, options.name)]
    problems = [problem for problem in bad if problem is not None]
    for problem in problems:
        output.write(problem)
    if problems:
        raise CheckFailed(f"{len(problems)} of {len(bad)} files are damaged",
                          hint="import or pull these models again: only what is missing is sent")
    output.say(f"{len(bad)} files are whole")
    return 0


def _blobs(mirror: MirrorView, name: str) -> List[Tuple[str, WeightsFile]]:
    """Return each file once, with the name of a model or engine that it belongs to."""
    models = [model for model in mirror.models if not name or model.name == name]
    if not models and name:
        raise NotFound(f"no such model in the mirror: {name:.100}", hint="llmgw.pyz ctl mirror list shows them")
    found = {file.sha256: (model.name, file) for model in models for file in model.files}
    for held in mirror.engines if not name else ():
        asset = held.asset
        found.setdefault(asset.sha256, (held.engine, WeightsFile(asset.name, asset.size_bytes, asset.sha256)))
    return list(found.values())


def _verify(client: ControlClient, name: str, file: WeightsFile) -> Optional[str]:
    progress = Progress(f"verifying {file.name} of {name}", file.size_bytes)
    try:
        said = client.json("POST", paths.fill(paths.MIRROR_VERIFY, digest=file.sha256), {},
                           timeout=VERIFY_TIMEOUT_SECONDS)["problem"]
    except ApiError as error:
        if error.reason != NotFound.reason:
            raise
        said = "it is not there"
    progress.at(file.size_bytes)
    progress.done()
    return f"{name}: {file.name}: {said}" if said else None
