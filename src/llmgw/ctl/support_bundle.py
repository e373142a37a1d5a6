"""Put into one file what a helper needs: facts, states, first failures, events and logs; no secret, no prompt."""
from __future__ import annotations

import argparse
import io
import json
import os
import platform
import sys
import tarfile
import time
from typing import Any, Callable, Dict, List, Tuple

from llmgw import __version__
from llmgw.api import paths, wire
from llmgw.api.client import ControlClient
from llmgw.ctl import output
from llmgw.ctl.connection import connect
from llmgw.domain.errors import LlmgwError
from llmgw.system import files, logs

LOG_BYTES = 256 << 10
LOG_SECONDS = 60.0                # a node hears of the question with its next heartbeat
LISTS = (("nodes", paths.NODES), ("models", paths.MODELS), ("replicas", paths.REPLICAS), ("engines", paths.ENGINES),
         ("mirror", paths.MIRROR), ("events", paths.EVENTS))
_SECRET = ("secret", "key", "token", "password")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("file", metavar="FILE.tar.gz", nargs="?", default="",
                        help="where to (default: llmgw-support-TIME.tar.gz here)")
    parser.add_argument("--no-logs", action="store_true", help="leave the engines' logs out")


def action(options: argparse.Namespace) -> int:
    """Write the bundle; what cannot be had is named in it, and on stderr."""
    client = connect(options)
    name = options.file or f"llmgw-support-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz"
    content, problems = collect(client, with_logs=not options.no_logs)
    files.write_atomic(name, packed(content, time.time()))
    for problem in problems:
        output.say(f"llmgw: not in it: {problem}")
    output.say(f"{name}: {len(content)} files, {output.size(os.path.getsize(name))}; read it before you send it on")
    return 0


def collect(client: ControlClient, *, with_logs: bool) -> Tuple[Dict[str, str], List[str]]:
    """Return the files of a bundle, by name, and what could not be had."""
    content = {"about.json": _text({"llmgw": __version__, "python": sys.version, "system": platform.platform(),
                                    "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())})}
    problems: List[str] = []

    def take(what: str, get: Callable[[], Any]) -> Any:
        try:
            return get()
        except LlmgwError as error:
            problems.append(f"{what}: {error.message}")
            return None

    for what, path in LISTS:
        data = take(what, lambda path=path: client.json("GET", path))  # type: ignore[misc]
        if data is not None:
            content[f"{what}.json"] = _text(data)
    replicas = json.loads(content.get("replicas.json", "{}")).get("items", ()) if with_logs else ()
    for replica in replicas:
        tail = take(f"log of {replica['id']}", lambda replica=replica: client.call(  # type: ignore[misc]
            "GET", f"{paths.fill(paths.REPLICA_LOG, replica=replica['id'])}?bytes={LOG_BYTES}", receive=wire.LOG_TAIL,
            timeout=LOG_SECONDS))
        if tail is not None and tail.problem:
            problems.append(f"log of {replica['id']}: {tail.problem}")
        elif tail is not None:
            content[f"logs/{replica['id'].replace('/', '_')}.log"] = _redacted(tail.text)
    if problems:
        content["missing.txt"] = "".join(f"{problem}\n" for problem in problems)
    return content, problems


def packed(content: Dict[str, str], at: float) -> bytes:
    """Return the files as a gzipped tar archive, all in one folder."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w:gz") as archive:
        for name, text in sorted(content.items()):
            data = text.encode("utf-8", "replace")
            member = tarfile.TarInfo(f"llmgw-support/{name}")
            member.size, member.mtime, member.mode = len(data), int(at), 0o600
            archive.addfile(member, io.BytesIO(data))
    return target.getvalue()


def _text(data: Any) -> str:
    return _redacted(json.dumps(without_secrets(data), indent=1, sort_keys=True) + "\n")


def without_secrets(data: Any) -> Any:
    """Return the data with every value hidden whose name says that it is a secret."""
    if isinstance(data, dict):
        return {name: "***" if name.lower() in _SECRET and isinstance(value, str) and value else without_secrets(value)
                for name, value in data.items()}
    return [without_secrets(item) for item in data] if isinstance(data, list) else data


def _redacted(text: str) -> str:
    return "".join(logs.redact(line) for line in text.splitlines(keepends=True))
