"""What a PythonInstaller talks to, without a network between: the real lists of a control plane, and files of a folder.

``tiny_vllm`` puts a package that stands for vLLM into an index: it prints a line of log and its version.
"""
from __future__ import annotations

import json
from types import SimpleNamespace
from urllib.parse import unquote

from llmgw.agent.layout import Layout
from llmgw.agent.python_engine import PythonInstaller
from llmgw.api import wire
from llmgw.domain.engine import Asset, EngineWanted, Tool
from llmgw.domain.errors import ApiError, LlmgwError
from llmgw.domain.node import NodeFacts, OsRelease
from llmgw.engines.recipes import RECIPES
from llmgw.server.engine_locks import EngineLocks
from llmgw.server.events import Events
from llmgw.server.store_sqlite import SqliteStore
from llmgw.system.clock import Clock
from llmgw.system.process import Processes

AS_OF = "2026-06-01T00:00:00Z"
MAIN = "import importlib.metadata\nprint('INFO 11-30 a line of log')\nprint(importlib.metadata.version('vllm'))\n"
FACTS = NodeFacts(os=OsRelease("debian", (), "12", "Debian 12"), arch="x86_64", libc="glibc 2.36", disk_total_bytes=10**12,
                  disk_free_bytes=10**12)


def tiny_vllm(index, version="0.30.1", main=MAIN, files=None, needs=("tinydep>=1",), **more):
    """Put a stand-in for vLLM into the index, and what it needs."""
    index.add("vllm", version, needs, files={
        "vllm/__init__.py": "", "vllm/entrypoints/__init__.py": "", "vllm/entrypoints/cli/__init__.py": "",
        "vllm/entrypoints/cli/main.py": main, **(files or {})}, **more)
    index.add("tinydep", "1.0")


class Fleet:
    """One control plane's lists and tools; ``installer`` makes a node of it."""

    def __init__(self, folder, uv, python, known=RECIPES):
        self._store = SqliteStore(str(folder))
        self.known = known
        self.locks = EngineLocks(self._store, Clock(), Events(self._store, Clock()), None, known)
        version, build = python
        self.files = {archive.name: archive for archive in (uv, build)}
        self.tools = (Tool("uv", "0.13.9", (_asset(uv),)), Tool("python", version, (_asset(build),)))
        self.asked, self.as_of = [], AS_OF

    def close(self):
        self._store.close()

    def wanted(self, version="0.30.1", as_of="", **more):
        self.as_of = as_of = as_of or self.as_of
        return self.locks.complete(EngineWanted("vllm", version, as_of=as_of, tools=self.tools, **more))

    def installer(self, folder, given, node="n1", facts=FACTS, stopping=lambda: False, user=None):
        folder.mkdir(exist_ok=True)
        return PythonInstaller(self, Layout(str(folder)), Processes(), SimpleNamespace(must_fit=lambda *unused: None),
                               node, given, lambda: facts, stopping, self.known, user)

    # what an installer uses of a ControlClient

    def stream(self, path, *, headers, timeout):
        name = unquote(path.rsplit("/", 1)[1])
        self.asked.append(name)
        data = self.files[name].path.read_bytes()
        first = int(headers["Range"][6:].partition("-")[0])
        rest = memoryview(data)[first:]
        return _Stream(rest, f"bytes {first}-{len(data) - 1}/{len(data)}")

    def request(self, method, path, *, timeout):
        return SimpleNamespace(body=self._answer(lambda: self.locks.text(self.wanted(path.split("/")[4]), _platform(path))).encode())

    def call(self, method, path, *, send, value, receive, timeout):
        value = send.decode(json.loads(wire.dumps(send, value)))
        kept = self._answer(lambda: self.locks.propose(self.wanted(path.split("/")[4]), _platform(path), value.as_of,
                                                       value.text, value.node))
        return receive.decode(json.loads(wire.dumps(receive, kept)))

    def _answer(self, act):
        try:
            return act()
        except LlmgwError as error:
            raise ApiError(error.message, status=409, reason=error.reason) from None


def _asset(archive):
    return Asset(archive.name, archive.path.stat().st_size, archive.sha256)


def _platform(path):
    return path.rsplit("/", 1)[1]


class _Stream:
    status = 206

    def __init__(self, data, content_range):
        self._data, self.headers = data, {"content-range": content_range}

    def read(self, size):
        piece, self._data = bytes(self._data[:size]), self._data[size:]
        return piece

    def close(self):
        pass
