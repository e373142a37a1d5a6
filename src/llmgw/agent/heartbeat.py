"""The one call to the control plane: tell what is observed, take what is desired."""
from __future__ import annotations

import collections
import logging
import os
import random
import threading
from typing import Callable, Deque, Optional

from llmgw.agent.board import Board, Desired
from llmgw.agent.layout import Layout
from llmgw.api import paths, wire
from llmgw.api.client import ControlClient
from llmgw.domain.errors import LlmgwError, Unauthorized
from llmgw.domain.heartbeat import HeartbeatAnswer, NodeRequest
from llmgw.system import files
from llmgw.system.clock import Clock

log = logging.getLogger(__name__)

EVERY_SECONDS = 5.0
LONGEST_SECONDS = 60.0
TIMEOUT_SECONDS = 8.0
TOKEN_HINT = ("copy the server's tokens/node into this agent's token file, and start it again; a node that had joined "
              "joins anew with the line of llmgw.pyz ctl token create --role node")


class Heartbeat:
    """Has its own thread and does nothing slow: no other work of the agent can make a node look dead."""

    def __init__(self, node: str, client: ControlClient, board: Board, layout: Layout, clock: Clock,
                 request: Callable[[NodeRequest], None]) -> None:
        self._path = paths.fill(paths.HEARTBEAT, node=node)
        self._client, self._board, self._layout, self._clock = client, board, layout, clock
        self._request = request
        self._handled: Deque[str] = collections.deque(maxlen=256)
        self._taking = threading.Lock()
        self._failures = 0
        self._refused = ""
        self._unkept: Optional[HeartbeatAnswer] = None        # acted on, but not on disk

    def recall(self) -> None:
        """Act on the last answer of an earlier run, so that the node works with no control plane at all."""
        try:
            data = files.read_bytes(self._layout.desired)
            if data is None:
                return
            answer = wire.loads(wire.HEARTBEAT_ANSWER, data, self._layout.desired)
        except LlmgwError as error:        # rebuilt by the next answer; what runs is found in /proc
            log.warning("the last desired state cannot be read: %s", error.message)
            return
        if answer.desired is not None:
            self._board.put_desired(Desired(answer.epoch, answer.generation, answer.desired))

    def turn(self) -> Optional[float]:
        """Make one call; return when to make the next. A failed or partial answer changes nothing."""
        try:
            return self._beat(self._client)
        except LlmgwError as error:
            return self.failed(error)

    def beat(self, number: int) -> float:
        """Make one call to the control plane of that number; for loops that run side by side."""
        return self._beat(self._client.alone(number))

    def _beat(self, client: ControlClient) -> float:
        self._board.changed.clear()
        answer = client.call(
            "POST", self._path, send=wire.NODE_OBSERVED, value=self._board.observed(self._clock.wall()),
            receive=wire.HEARTBEAT_ANSWER, timeout=TIMEOUT_SECONDS)
        if self._failures:
            log.info("the control plane answers again url=%s", client.url)
        self._failures = 0
        with self._taking:                    # of two loops the older may bring its answer last
            self._take(answer)
        return float(min(max(answer.call_again_seconds, 0.5), LONGEST_SECONDS))

    def last_words(self) -> None:
        """Say that this agent stops on purpose; nobody waits long for it."""
        try:
            self._client.call("POST", self._path, send=wire.NODE_OBSERVED,
                              value=self._board.observed(self._clock.wall(), stopping=True), timeout=2.0)
        except LlmgwError as error:
            log.debug("last heartbeat failed: %s", error.message)

    def failed(self, error: LlmgwError) -> float:
        """Count and tell a call that failed; return when to make the next."""
        self._failures += 1
        if self._failures in (1, 10) or self._failures % 100 == 0:
            hint = TOKEN_HINT if error.reason == Unauthorized.reason else error.hint
            log.warning("no heartbeat reason=%s failures=%d: %s%s", error.reason, self._failures, error.message,
                        f" (try: {hint})" if hint else "")
        # never later than a heartbeat is due: a control plane that is back must soon know everything again
        longest = EVERY_SECONDS if self._failures > 1 else EVERY_SECONDS / 5
        return longest * (0.5 + random.random() / 2)

    def _take(self, answer: HeartbeatAnswer) -> None:
        current = self._board.desired
        if current is not None and (answer.epoch, answer.generation) < (current.epoch, current.generation):
            self._refuse(answer, current)
            return
        self._refused = ""
        if answer.desired is not None and (current is None or (answer.epoch, answer.generation) != (
                current.epoch, current.generation)):
            self._keep(answer)
            self._board.put_desired(Desired(answer.epoch, answer.generation, answer.desired))
            log.info("desired state taken epoch=%d generation=%d engines=%d shards=%d", answer.epoch,
                     answer.generation, len(answer.desired.engines), len(answer.desired.shards))
        elif self._unkept is not None:
            self._keep(self._unkept)
        for request in answer.requests:
            if request.id not in self._handled:
                self._handled.append(request.id)
                threading.Thread(target=self._request, args=(request,), daemon=True).start()

    def _keep(self, answer: HeartbeatAnswer) -> None:
        """Write the answer down. One that cannot be is acted on all the same: it may be what frees the disk."""
        try:
            files.make_dir(os.path.dirname(self._layout.desired))
            files.write_atomic(self._layout.desired, wire.dumps(wire.HEARTBEAT_ANSWER, answer))
            self._unkept = None
            self._board.put_note("desired", "")
        except LlmgwError as error:
            if self._unkept is None:
                log.error("desired state not kept reason=%s: %s", error.reason, error.message)
            self._unkept = answer
            self._board.put_note("desired", f"what is wanted here could not be written down, and is forgotten "
                                            f"when the agent restarts without a control plane: {error.message}")

    def _refuse(self, answer: HeartbeatAnswer, current: Desired) -> None:
        sentence = (f"the control plane is behind: it answers with epoch {answer.epoch} generation "
                    f"{answer.generation}, this node acts on {current.epoch} and {current.generation}")
        if sentence != self._refused:
            log.error("%s; if it was set up anew, stop this agent and remove %s", sentence, self._layout.desired)
        self._refused = sentence
