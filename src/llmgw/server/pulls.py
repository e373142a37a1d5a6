"""Pulls that an admin asked for: Hugging Face repositories on their way into the mirror, also across restarts."""
from __future__ import annotations

import logging
from typing import Any, Dict, List, Optional

from llmgw.domain.errors import LlmgwError, NotFound, UsageError
from llmgw.domain.names import check_name
from llmgw.parse import weights_source
from llmgw.server import records
from llmgw.server.mirror import Mirror
from llmgw.server.store import Delete, Put, Store
from llmgw.system.logs import Said

log = logging.getLogger(__name__)


class Pulls:
    """What is wanted is in the store; the bytes are the hub's business."""

    def __init__(self, store: Store, mirror: Mirror, hub: Optional[Any]) -> None:
        self._store, self._mirror, self._hub = store, mirror, hub
        self._said = Said()

    def want(self, source: str, name: str) -> Dict[str, Any]:
        """Pull ``source`` as model ``name``; call it again to hear how far it is."""
        check_name(name, "model name")
        weights_source.hub(source)
        if self._hub is None:
            raise UsageError("fetching from Hugging Face is not available in this build")
        key, row = records.PULLS + name, {"source": source, "name": name}
        entry = self._store.get(key)
        if entry is None or entry.value != row:
            self._store.txn((), [Put(key, row)])
        return self._advance(source, name)

    def turn(self) -> None:
        """Go on with what was asked for; a server that was killed takes it up here."""
        for entry in self._store.range(records.PULLS) if self._hub is not None else ():
            try:
                self._advance(entry.value["source"], entry.value["name"])
                self._said.is_over(entry.key)
            except LlmgwError as error:
                if self._said.is_new(entry.key, error.message):
                    log.warning("pull does not go on name=%s reason=%s: %s", entry.value["name"], error.reason,
                                error.message)

    def forget(self, name: str) -> None:
        """Want a pull no more; what has come of it stays until gc."""
        if self._store.get(records.PULLS + name) is None:
            raise NotFound(f"nothing is pulled as {name:.100}")
        self._store.txn((), [Delete(records.PULLS + name)])

    def names(self) -> List[str]:
        return [str(entry.value["name"]) for entry in self._store.range(records.PULLS)]

    def _advance(self, source: str, name: str) -> Dict[str, Any]:
        assert self._hub is not None
        self._hub.want(source, name)
        weights, sentence = self._hub.status(source)
        if weights is None:
            return {"done": False, "sentence": sentence, **self._hub.progress(source)}
        self._mirror.know_chunks(weights)            # the hub has just read the files
        made = self._mirror.register_model(weights)
        self._store.txn((), [Delete(records.PULLS + name)])
        log.info("pulled into the mirror name=%s source=%s", name, source)
        return {"done": True, "sentence": "", "failed": False, "done_bytes": made.size_bytes,
                "total_bytes": made.size_bytes, "revision": made.revision, "files": len(made.files)}
