"""Bring files into the mirror: look at them, hash them once, send what the server lacks, register.

`ctl mirror import`, `ctl mirror import-engine` and `up --model FILE` are this.
"""
from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, replace
from typing import Callable, List, Sequence, Tuple

from llmgw.api import paths, wire
from llmgw.api.client import ControlClient
from llmgw.ctl import file_checks, output
from llmgw.ctl.progress import Progress
from llmgw.domain.digest import sha256_hex
from llmgw.domain.engine import ENGINES, LLAMA_CPP, PYTHON, TOOLS, UV
from llmgw.domain.errors import ApiError, DigestMismatch, ParseError, Unreachable, UsageError
from llmgw.domain.model import Weights, WeightsFile
from llmgw.domain.names import check_name
from llmgw.system import files, hashing

PIECE_TIMEOUT_SECONDS = 120.0
FINISH_TIMEOUT_SECONDS = 3600.0     # the server reads the whole file once more
TRIES = 6                           # of one piece, each wait twice the one before
FIRST_WAIT_SECONDS = 0.5
_UNUSUAL = re.compile(r"[^A-Za-z0-9._-]+")
_RELEASES = {LLAMA_CPP: re.compile(r"(?:cudart-)?llama-(b\d+)-bin-.+"),
             PYTHON: re.compile(r"cpython-(\d+\.\d+\.\d+\+\d{8})-.+"), UV: re.compile(r"uv-()[a-z0-9_]+-.+")}
_ASSET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,199}")


@dataclass(frozen=True)
class Source:
    """A file on this machine and the name it gets."""

    path: str
    name: str
    sha256: str = ""          # what it has to be, where somebody promised it


MakeProgress = Callable[[str, int], Progress]


def import_model(client: ControlClient, named: Sequence[str], name: str = "", *, raw: bool = False,
                 allow_pickle: bool = False, link: bool = False) -> Weights:
    """Put the files (or the files of a folder) into the mirror as model ``name`` and return its manifest.

    ``raw`` takes them as they are, whatever they are.
    """
    sources = gather(named)
    name = check_name(name, "model name") if name else name_of(named[0])
    if not allow_pickle:
        for source in sources:
            file_checks.refuse_pickle(source.path)
    fmt = file_checks.RAW if raw else file_checks.format_of([(source.path, source.name) for source in sources])
    if fmt == file_checks.RAW and not raw:
        raise UsageError(f"no GGUF or safetensors file among {', '.join(source.name for source in sources):.200}",
                         hint="--raw takes any file as it is")
    return bring(client, name, sources, fmt, "file:" + os.path.abspath(sources[0].path), link=link)


def bring(client: ControlClient, name: str, sources: Sequence[Source], fmt: str, origin: str,
          progress_of: MakeProgress = Progress, link: bool = False) -> Weights:
    """Send what the mirror lacks of the files and register them as model ``name``.

    ``link``: the server, on this machine, shares the files on the disk instead.
    """
    kept = []
    for source in sources:
        digest, chunks, size_bytes = _hash(source, progress_of)
        if source.sha256 and digest != source.sha256:
            raise DigestMismatch(source.path, expected=source.sha256, actual=digest)
        if link:
            client.json("POST", paths.fill(paths.UPLOAD_LINK, digest=digest), {"path": os.path.abspath(source.path)},
                        timeout=FINISH_TIMEOUT_SECONDS)
        else:
            upload(client, source, digest, size_bytes, progress_of)
        kept.append(WeightsFile(source.name, size_bytes, digest, chunks))
    wanted = Weights(name=name, fingerprint="", files=tuple(kept), format=fmt, imported_at=time.time(), source=origin)
    path = paths.fill(paths.MIRROR_MODEL, model=name)
    made = client.call("PUT", path, send=wire.WEIGHTS, value=wanted, receive=wire.WEIGHTS,
                       timeout=FINISH_TIMEOUT_SECONDS)      # the server reads what it has not hashed yet
    return made or wanted


def name_of(path: str) -> str:
    """Return the name that a file or folder gives its model."""
    plain = re.sub(r"(-\d{5}-of-\d{5})?\.(gguf|safetensors)$", "", os.path.basename(os.path.abspath(path)))
    return check_name(_UNUSUAL.sub("-", plain).strip("-.") or "model", "model name")


def import_engine(client: ControlClient, path: str, sha256: str, engine: str, version: str) -> str:
    """Put an engine's archive into the mirror; its sha256 must be ``sha256``. Return the version."""
    source, expected = gather([path])[0], sha256_hex(sha256.strip().lower())
    name = os.path.basename(path)
    source = replace(source, name=name if _ASSET.fullmatch(name) else source.name)     # builds of Python have a +
    version = version or version_of(source.name, engine)
    digest, _, size_bytes = _hash(source)
    if digest != expected:
        raise DigestMismatch(source.path, expected=expected, actual=digest)
    upload(client, source, digest, size_bytes)
    client.json("PUT", paths.fill(paths.MIRROR_ENGINE, engine=engine, version=version, asset=source.name),
                {"sha256": digest, "size_bytes": size_bytes}, timeout=PIECE_TIMEOUT_SECONDS)
    return version


def engine_of(path: str) -> str:
    """Return what the file is an archive of, by its name: llama.cpp, uv or Python."""
    name = os.path.basename(path)
    return next((engine for engine, pattern in _RELEASES.items() if pattern.fullmatch(name)), LLAMA_CPP)


def version_of(file_name: str, engine: str) -> str:
    """Return the version in a release archive's own file name, as llama-b10991-bin-ubuntu-x64.tar.gz."""
    if engine not in (*ENGINES, *TOOLS):
        raise UsageError(f"unknown engine {engine!r:.60}", hint="known: " + ", ".join((*ENGINES, *TOOLS)))
    found = _RELEASES[engine].fullmatch(file_name) if engine in _RELEASES else None
    if found is None or not found.group(1):
        raise UsageError(f"{file_name}: its name does not tell the version",
                         hint="name it with --version, and keep the release's own file name")
    return found.group(1)


def gather(named: Sequence[str]) -> List[Source]:
    """Return every file that is meant, folders opened; refuse a missing, doubled or incomplete one."""
    sources: List[Source] = []
    for path in named:
        if os.path.isdir(path):
            with files.storing("read", path):
                sources += [Source(entry.path, entry.name) for entry in sorted(os.scandir(path), key=_by_name)
                            if entry.is_file() and not entry.name.startswith(".")]
        else:
            sources.append(Source(path, os.path.basename(path)))
    for source in sources:
        _check_readable(source.path)
    sources = [Source(source.path, plain(source.name)) for source in sources]
    names = [source.name for source in sources]
    if not sources or len(set(names)) != len(names):
        raise UsageError(f"no files in {', '.join(named)}" if not sources else "two files have the same name")
    file_checks.check_split(names)
    return sources


def plain(name: str) -> str:
    """Return a name that is one on every node: blanks and the like become dashes."""
    return check_name(_UNUSUAL.sub("-", name).lstrip("-."), "file name")


def _by_name(entry: "os.DirEntry[str]") -> str:
    return entry.name


def _check_readable(path: str) -> None:
    if not os.path.exists(path):
        raise UsageError(f"there is no file {path}")
    if not os.path.isfile(path):
        raise UsageError(f"{path}: not a file")
    with files.storing("read", path), open(path, "rb"):
        pass
    if os.path.getsize(path) == 0:
        raise ParseError(f"{path}: the file is empty")


def _hash(source: Source, progress_of: MakeProgress = Progress) -> Tuple[str, Tuple[str, ...], int]:
    progress = progress_of(f"reading {source.name}", os.path.getsize(source.path))
    result = hashing.hash_file(source.path, progress)
    progress.done()
    return result


def upload(client: ControlClient, source: Source, digest: str, size_bytes: int,
           progress_of: MakeProgress = Progress) -> None:
    """Send what the server lacks of a file, from where an earlier try ended, and have it verified."""
    where = paths.fill(paths.UPLOAD, digest=digest)
    state = client.json("GET", where)
    if state["complete"] and _is_kept_whole(client, source, digest, size_bytes):
        output.say(f"{source.name}: the server has it already")
        return
    if state["complete"]:
        state = client.json("GET", where)
    at = int(state["received_bytes"])
    if at:
        output.say(f"{source.name}: goes on at {output.size(at)}")
    progress = progress_of(f"sending {source.name}", size_bytes)
    with files.storing("read", source.path), open(source.path, "rb") as data:
        while at < size_bytes:
            progress.at(at)
            data.seek(at)
            at = _send_piece(client, where, at, data.read(paths.PIECE_BYTES))
    progress.at(size_bytes)
    progress.done()
    client.json("POST", paths.fill(paths.UPLOAD_FINISH, digest=digest), {"size_bytes": size_bytes},
                timeout=FINISH_TIMEOUT_SECONDS)


def _is_kept_whole(client: ControlClient, source: Source, digest: str, size_bytes: int) -> bool:
    """Let the server read again what it has; a blob that rotted on its disk is gone after that."""
    try:
        client.json("POST", paths.fill(paths.UPLOAD_FINISH, digest=digest), {"size_bytes": size_bytes},
                    timeout=FINISH_TIMEOUT_SECONDS)
        return True
    except ApiError as error:
        if error.reason != DigestMismatch.reason:
            raise
        output.say(f"{source.name}: what the server had of it was damaged, it is sent again")
        return False


def _send_piece(client: ControlClient, where: str, at: int, piece: bytes) -> int:
    """Send one piece and return where the next begins, which only the server knows after a fault."""
    if not piece:
        raise UsageError("the file became shorter while it was sent", hint="import it again")
    for turn in range(TRIES):
        try:
            client.request("PUT", f"{where}?offset={at}", body=piece,
                           content_type="application/octet-stream", timeout=PIECE_TIMEOUT_SECONDS)
            return at + len(piece)
        except ApiError as error:
            if error.status != 409:
                raise
            return int(client.json("GET", where)["received_bytes"])
        except Unreachable as error:
            if turn == TRIES - 1:
                error.hint = "run the same command again: it goes on where it stopped"
                raise
            time.sleep(FIRST_WAIT_SECONDS * 2 ** turn)
            try:
                if int(client.json("GET", where)["received_bytes"]) != at:
                    return int(client.json("GET", where)["received_bytes"])
            except Unreachable:
                continue
    raise AssertionError("every turn returns or raises")
