"""Does an engine answer as it must? Health alone proves neither that it serves nor that it is ours."""
from __future__ import annotations

import enum
import json
import secrets
from dataclasses import dataclass
from typing import Dict, Optional, Set, Tuple

from llmgw.agent.gpu_proof import GpuProof
from llmgw.domain.errors import LlmgwError, Unreachable
from llmgw.domain.model import ModelSpec
from llmgw.domain.secret import Secret
from llmgw.engines.base import Engine
from llmgw.system import proc, spawn
from llmgw.system.http_client import Answer, HttpClient

QUICK_SECONDS = 5.0
TOKEN_SECONDS = 120.0             # the first request compiles and reads what was mapped only


class Proof(str, enum.Enum):
    READY = "ready"
    NOT_YET = "not yet"
    WRONG = "wrong"               # it will never be right: end it


@dataclass(frozen=True)
class Finding:
    """What a look at a starting engine showed, in a sentence."""

    proof: Proof
    message: str = ""
    reason: str = "DoesNotServe"      # of what is wrong


@dataclass(frozen=True)
class MayListen:
    """Where an engine may listen for other machines: on these addresses, at these ports of all, at so many more."""

    addresses: Tuple[str, ...] = ()
    ports: Tuple[int, ...] = ()
    more_ports: int = 0


def on_gpus(found: Finding, proof: GpuProof, marker: spawn.Marker) -> Finding:
    """Return ``found``, or that the programs hold nothing of a GPU they were given."""
    why = proof.why_not(marker) if found.proof is Proof.READY else ""
    return Finding(Proof.WRONG, f"does not use its GPUs: {why}", "NotOnGpu") if why else found


class EngineDoor:
    """Talks to one engine on loopback, with its key.

    ``may_listen``: where it may listen for other machines.
    """

    def __init__(self, engine: Engine, model: ModelSpec, key: Secret, port: int,
                 may_listen: MayListen = MayListen()) -> None:
        self._engine, self._model, self._key = engine, model, key
        self._may_listen = may_listen
        self._client = HttpClient(f"http://127.0.0.1:{port}", timeout=QUICK_SECONDS)
        self._port = port

    def close(self) -> None:
        """Give up the kept connections."""
        self._client.close()

    def prove(self, identity: spawn.Identity) -> Finding:
        """Check in this order: our process listens, the key opens and a wrong one does not, the name, one token."""
        try:
            health = self._get(self._engine.health_path, None)
        except Unreachable:
            return Finding(Proof.NOT_YET, "does not listen yet")
        if health.status == 503:
            return Finding(Proof.NOT_YET, "is loading the model")
        if health.status != 200:
            return Finding(Proof.NOT_YET, f"answers {health.status} when asked for its health")
        if not listens(identity, self._port):
            return Finding(Proof.WRONG, f"somebody else listens on its port {self._port}", "NotOurEngine")
        try:
            found = self._prove_answers()
        except Unreachable as error:
            return Finding(Proof.NOT_YET, f"did not answer: {error.message}")
        return found if found.proof is not Proof.READY else self.shut(identity)

    def shut(self, identity: spawn.Identity) -> Finding:
        """Check that nothing of the program's listens where other machines reach it and nobody asks for a key."""
        outside = listens_outside(identity, self._may_listen)
        return Finding(Proof.WRONG, f"lets other machines in: it listens on {', '.join(outside)}",
                       "ListensOutside") if outside else Finding(Proof.READY)

    def _prove_answers(self) -> Finding:
        models = self._get(self._engine.models_path, self._key)
        if models.status in (401, 403):
            return Finding(Proof.WRONG, "refuses its own key")
        if models.status != 200:
            return Finding(Proof.NOT_YET, f"answers {models.status} when asked for its models")
        if self._model.name not in _model_ids(models.body):
            return Finding(Proof.WRONG, f"serves {', '.join(_model_ids(models.body)) or 'no model'} "
                                        f"instead of {self._model.name}")
        wrong = self._get(self._engine.models_path, Secret("wrong-" + secrets.token_hex(16)))
        if wrong.status not in (401, 403):
            return Finding(Proof.WRONG, f"accepts a wrong key (answers {wrong.status})")
        return self._prove_token()

    def _prove_token(self) -> Finding:
        answer = self.one_token(TOKEN_SECONDS)
        if answer.status == 200:
            return Finding(Proof.READY)
        if answer.status == 503:
            return Finding(Proof.NOT_YET, "is not serving yet")
        return Finding(Proof.WRONG, f"answers {answer.status} to the smallest request: {_error_text(answer.body)}")

    def one_token(self, timeout: float) -> Answer:
        """Ask for one token, or one embedding."""
        path, body = self._engine.smallest_request(self._model)
        return self._client.request("POST", path, body=body, timeout=timeout,
                                    headers={**_bearer(self._key), "Content-Type": "application/json"})

    def metrics(self) -> Optional[bytes]:
        """Return the metrics page, None when it does not come in time."""
        try:
            answer = self._get(self._engine.metrics_path, self._key)
        except LlmgwError:
            return None
        return answer.body if answer.status == 200 else None

    def _get(self, path: str, key: Optional[Secret]) -> Answer:
        return self._client.request("GET", path, headers=_bearer(key) if key else {})


def listens(identity: spawn.Identity, port: int) -> bool:
    """True when a listener on the port belongs to our program's tree (two programs can share a port)."""
    inodes = proc.listening_inodes(port)
    ours = set()
    for process in spawn.tree(identity.marker):
        ours |= proc.socket_inodes(process.pid)
    return bool(inodes) and inodes <= ours


def listens_outside(identity: spawn.Identity, allowed: MayListen = MayListen()) -> Tuple[str, ...]:
    """Return where our program's tree listens for other machines: nothing in front of that asks for a key."""
    ours: Set[str] = set()
    for process in spawn.tree(identity.marker):
        ours |= proc.socket_inodes(process.pid)
    found = sorted({(item.address, item.port) for item in proc.listeners()
                    if item.inode in ours and not item.is_loopback
                    and item.plain_address not in allowed.addresses and item.port not in allowed.ports})
    if len(found) <= allowed.more_ports:
        return ()
    return tuple(f"{address} port {port}" for address, port in found)


def _bearer(key: Secret) -> Dict[str, str]:
    return {"Authorization": f"Bearer {key.reveal()}"}


def _model_ids(body: bytes) -> Tuple[str, ...]:
    try:
        return tuple(str(item["id"]) for item in json.loads(body)["data"])
    except (ValueError, KeyError, TypeError):
        return ()


def _error_text(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])[:300]
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")
