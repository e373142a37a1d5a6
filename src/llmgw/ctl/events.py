"""What changed, when and why; with -f also what changes from now on."""
from __future__ import annotations

import argparse
import json
import time
from typing import Any, Dict, List

from llmgw.api import paths, wire
from llmgw.ctl import output, watch
from llmgw.ctl.connection import connect
from llmgw.domain.errors import Unreachable

WAIT_SECONDS = 20


def arguments(parser: argparse.ArgumentParser) -> None:
    watch.arguments(parser, watch=False)
    parser.add_argument("-f", "--follow", action="store_true", help="go on until Ctrl-C")


def action(options: argparse.Namespace) -> int:
    client = connect(options)
    data = client.json("GET", paths.EVENTS)
    if options.json and not options.follow:
        output.write_json(data)
        return 0
    last = _print(data["items"], 0, options.json)
    if last == 0 and not options.follow:
        output.say("no event yet")
    while options.follow:
        try:
            data = client.json("GET", f"{paths.EVENTS}?after={last}&wait={WAIT_SECONDS}",
                               timeout=WAIT_SECONDS + 10)
        except Unreachable as error:
            output.say(f"llmgw: {error.message}; asking again")
            time.sleep(watch.EVERY_SECONDS)
            continue
        before, last = last, _print((data or {}).get("items", []), last, options.json)
        if before == last and not data:
            time.sleep(watch.EVERY_SECONDS)      # a server that does not wait
    return 0


def _print(items: List[Dict[str, Any]], last: int, as_json: bool) -> int:
    """Print one line per event and return the highest id seen."""
    for item in items:
        event = wire.EVENT_VIEW.decode(item, "event")
        last = max(last, event.id)
        if as_json:
            output.write(json.dumps(item, sort_keys=True))
        else:
            output.write(output.clean(f"{output.moment(event.at)}  {event.subject}  {event.reason}  "
                                      f"{event.message}"))
    return last
