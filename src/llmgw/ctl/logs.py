"""The end of a replica's engine log, fetched through its node's next heartbeat."""
from __future__ import annotations

import argparse
import time

from llmgw.api import paths, wire
from llmgw.ctl import output, watch
from llmgw.ctl.connection import connect
from llmgw.domain.errors import ApiError, NotFound, Unreachable, UsageError

LINE_BYTES = 200             # a guess that asks for enough
MOST_BYTES = 1 << 20
SHORT = 128                  # characters; what overlaps less is compared one by one
ANSWER_SECONDS = 60.0        # the node hears of the question with its next heartbeat


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("replica", metavar="REPLICA", help="as `ctl replicas` shows it")
    parser.add_argument("-f", "--follow", action="store_true", help="go on until Ctrl-C")
    parser.add_argument("--lines", metavar="N", type=int, default=100, help="how many lines (default: 100)")


def action(options: argparse.Namespace) -> int:
    if options.lines < 1:
        raise UsageError(f"--lines must be positive: {options.lines}")
    client = connect(options)
    wanted = min(MOST_BYTES, max(options.lines * LINE_BYTES, 1 << 14))
    path = f"{paths.fill(paths.REPLICA_LOG, replica=options.replica)}?bytes={wanted}"

    def tail() -> str:
        answer = client.call("GET", path, receive=wire.LOG_TAIL, timeout=ANSWER_SECONDS)
        if answer.problem:
            raise NotFound(f"log of {options.replica}: {answer.problem}")
        return str(answer.text)

    before = tail()
    for line in output.lines(before.rstrip("\n"))[-options.lines:]:
        output.write(line)
    while options.follow:
        time.sleep(watch.EVERY_SECONDS)
        try:
            now = tail()
        except (Unreachable, ApiError) as error:
            output.say(f"llmgw: {error.message}; asking again")
            continue
        new = added(before, now)
        before = now
        if new.strip("\n"):
            output.write("\n".join(output.lines(new.strip("\n"))))
    return 0


def added(before: str, now: str) -> str:
    """Return what ``now`` has that ``before``, an earlier window on the same log, had not."""
    head = now[:SHORT]
    at = before.find(head)
    while 0 <= at < len(before) - SHORT:
        if now.startswith(before[at:]):
            return now[len(before) - at:]
        at = before.find(head, at + 1)
    for at in range(max(0, len(before) - SHORT), len(before)):
        if now.startswith(before[at:]):
            return now[len(before) - at:]
    return now
