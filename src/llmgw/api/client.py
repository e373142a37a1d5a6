"""Talk to the control plane: typed calls, each control plane in turn, errors as values of ours."""
from __future__ import annotations

import copy
import json
import threading
from typing import Any, Dict, List, Mapping, Optional, Sequence

from llmgw.api import wire
from llmgw.domain.codec import Codec
from llmgw.domain.errors import ApiError, ConfigError, ParseError, Unreachable
from llmgw.domain.secret import Secret
from llmgw.system.http_client import Answer, HttpClient, Stream


class ControlClient:
    """Calls the first control plane that answers and stays with it until it stops answering.

    A 503 that names itself a standby counts as no answer. Every other status
    that is not 2xx becomes an ApiError with the server's own words.
    """

    def __init__(self, urls: Sequence[str], token: Secret, *, ca_pem: str = "",
                 timeout: float = 10.0) -> None:
        if not urls:
            raise ConfigError("no control plane is named", hint="give its address with --server URL")
        self._clients = [HttpClient(url, ca_pem=ca_pem, timeout=timeout) for url in urls]
        self._token = token
        self._first = 0
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return self._clients[self._first].url

    @property
    def count(self) -> int:
        """How many control planes are named."""
        return len(self._clients)

    def alone(self, number: int) -> "ControlClient":
        """Return a client of the control plane of that number only; it shares the connections."""
        only = copy.copy(self)
        only._clients, only._first = [self._clients[number]], 0
        return only

    def prefer(self, number: int) -> None:
        """Ask the control plane of that number first from now on."""
        with self._lock:
            self._first = number

    def close(self) -> None:
        """Close idle connections."""
        for client in self._clients:
            client.close()

    def call(self, method: str, path: str, *, send: Optional[Codec[Any]] = None, value: Any = None,
             receive: Optional[Codec[Any]] = None, timeout: Optional[float] = None) -> Any:
        """Send ``value`` and return the decoded answer; None for 204 and 304."""
        body = wire.dumps(send, value) if send is not None else b""
        answer = self.request(method, path, body=body, timeout=timeout)
        if answer.status in (204, 304) or receive is None:
            return None
        return wire.loads(receive, answer.body, f"answer of {self.url}{path}")

    def json(self, method: str, path: str, data: Any = None, *, timeout: Optional[float] = None) -> Any:
        """Send and receive plain JSON; an empty answer is None."""
        body = json.dumps(data, separators=(",", ":")).encode() if data is not None else b""
        answer = self.request(method, path, body=body, timeout=timeout)
        if not answer.body:
            return None
        try:
            return json.loads(answer.body)
        except ValueError:
            raise ParseError(f"answer of {self.url}{path}: not JSON") from None

    def items(self, path: str, codec: Codec[Any], *, timeout: Optional[float] = None) -> List[Any]:
        """Return the values of a list answer, ``{"items": [...]}``."""
        data = self.json("GET", path, timeout=timeout)
        if not isinstance(data, dict) or not isinstance(data.get("items"), list):
            raise ParseError(f"answer of {self.url}{path}: no items")
        return [codec.decode(item, f"{path}[{index}]") for index, item in enumerate(data["items"])]

    def request(self, method: str, path: str, *, body: bytes = b"", content_type: str = "application/json",
                timeout: Optional[float] = None) -> Answer:
        """Return a 2xx or 304 answer as it is; ApiError or Unreachable otherwise."""
        headers = self._headers()
        if body:
            headers["Content-Type"] = content_type
        problem: Optional[Unreachable] = None
        for client in self._in_turn():
            try:
                answer = client.request(method, path, body=body, headers=headers, timeout=timeout)
            except Unreachable as error:
                problem = error
                continue
            if answer.status == 503 and "x-llmgw-leader" in answer.headers:
                problem = Unreachable(f"{client.url}: a standby, not the leader")
                continue
            self._stay_with(client)
            if answer.status < 300 or answer.status == 304:
                return answer
            raise api_error(answer.status, answer.body, f"{client.url}{path}")
        assert problem is not None
        raise problem

    def stream(self, path: str, *, headers: Optional[Mapping[str, str]] = None,
               timeout: float = 30.0) -> Stream:
        """GET ``path`` from the current control plane for reading in pieces (200 or 206)."""
        client = self._clients[self._first]
        opened = client.stream("GET", path, headers={**self._headers(), **(headers or {})},
                               timeout=timeout)
        if opened.status in (200, 206):
            return opened
        with opened:
            raise api_error(opened.status, opened.read(1 << 16), f"{client.url}{path}")

    def _headers(self) -> Dict[str, str]:
        return {"Authorization": f"Bearer {self._token.reveal()}"} if self._token else {}

    def _in_turn(self) -> List[HttpClient]:
        with self._lock:
            first = self._first
        return self._clients[first:] + self._clients[:first]

    def _stay_with(self, client: HttpClient) -> None:
        with self._lock:
            self._first = self._clients.index(client)


def api_error(status: int, body: bytes, where: str) -> ApiError:
    """Return the error in an answer of the API: ``{"reason", "message", "hint"}``."""
    try:
        data = json.loads(body)
        return ApiError(str(data["message"]), status=status, reason=str(data["reason"]),
                        hint=data.get("hint"))
    except (ValueError, KeyError, TypeError):
        return ApiError(f"{where}: HTTP {status}", status=status)
