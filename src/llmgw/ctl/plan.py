"""What a server.yaml would start, stop, move and download; nothing is changed."""
from __future__ import annotations

import argparse
import json
from typing import Any, Dict, List

from llmgw.api import paths
from llmgw.ctl import output, watch
from llmgw.ctl.connection import connect
from llmgw.domain.errors import UsageError
from llmgw.system import files

PLAN_SECONDS = 60.0
MAX_BYTES = 1 << 20


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", nargs="?", default="",
                        help="a server.yaml (without: the server's own, as it is on its disk now)")
    watch.arguments(parser, watch=False)


def action(options: argparse.Namespace) -> int:
    """0: it can all be done; 3: something cannot be placed; 78: the file cannot be used."""
    body = b""
    if options.file:
        read = files.read_bytes(options.file, MAX_BYTES)
        if read is None:
            raise UsageError(f"there is no file {options.file}")
        body = read or b"\n"
    answer = json.loads(connect(options).request("POST", paths.PLAN, body=body, content_type="application/yaml",
                                                 timeout=PLAN_SECONDS).body)
    if options.json:
        output.write_json(answer)
    else:
        for line in _lines(answer):
            output.write(output.clean(line))
        for warning in answer.get("warnings", ()):
            output.say(f"warning: {warning}")
        for reason in answer.get("needs_confirm", ()):
            output.say(f"would wait for llmgw.pyz ctl apply --confirm: {reason}")
    return 3 if answer.get("unplaced") else 0


def _lines(answer: Dict[str, Any]) -> List[str]:
    said = [f"start     {step['model']} on {step['node']}" for step in answer["starts"]]
    said += [f"replace   {step['replica']} on {step['node']}: {step['reason']}" for step in answer["rolls"]]
    said += [f"stop      {step['replica']} on {step['node']}: {step['reason']}" for step in answer["stops"]]
    said += [f"download  {step['model']} to {step['node']}, {output.size(step['size_bytes'])}"
             for step in answer["downloads"]]
    for missing in answer["unplaced"]:
        said += [f"no place  {missing['model']}: {reason}" for reason in missing["reasons"] or ["no node fits"]]
    return said or ["nothing would change"]
