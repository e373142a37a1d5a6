"""The view of the mirror: what it holds and who uses it; ``I`` brings models of Ollama in."""
from __future__ import annotations

from typing import Any, List

from llmgw.api import paths, wire
from llmgw.ctl import mirror_care, output
from llmgw.ctl.console.view import View
from llmgw.ctl.output import Row
from llmgw.domain.view import MirrorView, WeightsUse


def _decode(data: Any) -> MirrorView:
    return wire.MIRROR_VIEW.decode(data, "mirror")


def _rows(mirror: MirrorView) -> List[Row]:
    uses = {use.name: use for use in mirror.uses}
    return [Row((row.cells[0], "damaged" if uses.get(row.cells[0], WeightsUse("")).damaged else row.cells[1],
                 row.cells[2], row.cells[5], row.cells[6], row.cells[7][:10])) for row in mirror_care.rows(mirror)]


def _detail(mirror: MirrorView, at: int) -> List[str]:
    if at < len(mirror.models):
        model = mirror.models[at]
        use = next((use for use in mirror.uses if use.name == model.name), WeightsUse(model.name))
        return mirror_care.details(model, use, {})
    held = mirror.engines[at - len(mirror.models)]
    return [f"{held.engine} {held.version}", "", f"file        {held.asset.name}",
            f"size        {output.size(held.asset.size_bytes)}", f"sha256      {held.asset.sha256}",
            f"from        {held.source or '-'}", f"kept since  {output.moment(held.imported_at)}"]


def _summary(mirror: MirrorView) -> str:
    size = sum({file.sha256: file.size_bytes for model in mirror.models for file in model.files}.values())
    words = f"{len(mirror.models)} models, {output.size(size)}; {output.size(mirror.free_bytes)} free"
    return "; ".join([words, *mirror.activity])


VIEW = View("Mirror", paths.MIRROR, _decode, ("NAME", "KIND", "SIZE", "USED BY", "NODES", "KEPT SINCE"), _rows, _detail,
            _summary, "the mirror is empty: press I to import from Ollama",
            (("I", "import from Ollama"),))
