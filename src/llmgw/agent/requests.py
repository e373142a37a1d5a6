"""Small questions of the control plane that ride in a heartbeat's answer."""
from __future__ import annotations

import logging
from typing import Callable

from llmgw.api import paths, wire
from llmgw.api.client import ControlClient
from llmgw.domain.errors import LlmgwError
from llmgw.domain.heartbeat import LogTail, NodeRequest
from llmgw.system import log_tail, logs

log = logging.getLogger(__name__)

LOG_TAIL = "log-tail"
MOST_BYTES = 1 << 20
DEFAULT_BYTES = 64 << 10


class Requests:
    """Answers each request once; what it cannot answer gets a sentence."""

    def __init__(self, node: str, client: ControlClient, log_path: Callable[[str], str]) -> None:
        self._path = paths.fill(paths.LOG_TAIL, node=node)
        self._client, self._log_path = client, log_path

    def answer(self, request: NodeRequest) -> None:
        """Send the answer; a control plane that is gone asks again if it still wants to know."""
        try:
            self._client.call("POST", self._path, send=wire.LOG_TAIL, value=self._made(request))
        except LlmgwError as error:
            log.warning("request not answered kind=%s reason=%s: %s", request.kind, error.reason, error.message)

    def _made(self, request: NodeRequest) -> LogTail:
        if request.kind != LOG_TAIL:
            return LogTail(request.id, "", f"this agent does not know requests of kind {request.kind!r:.100}")
        path = self._log_path(request.args.get("replica", ""))
        if not path:
            return LogTail(request.id, "", "no such replica on this node")
        asked = request.args.get("bytes", "")
        count = min(int(asked), MOST_BYTES) if asked.isascii() and asked.isdigit() else DEFAULT_BYTES
        text = log_tail.read(path, count)
        return LogTail(request.id, logs.redact(text), "" if text else "the log is empty")
