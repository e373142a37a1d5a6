"""Install packages of the system with its own package manager, as root, and say why when that fails."""
from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from typing import Dict, List, Sequence, Tuple

from llmgw.domain.errors import PackagesFailed
from llmgw.parse.package_problem import Problem, Why, problem
from llmgw.system import rehearsal
from llmgw.system.files import storing

DEADLINE_SECONDS = 900.0          # a slow mirror; what is stuck is told, and tried again later
GRACE_SECONDS = 30.0
OUTPUT_BYTES = 256 << 10
PLACES = "/usr/sbin:/usr/bin:/sbin:/bin"
_PROXIES = ("http_proxy", "https_proxy", "ftp_proxy", "no_proxy")


def managers(names: Sequence[str]) -> Tuple[str, ...]:
    """Return those of ``names`` that this machine has."""
    return tuple(name for name in names if shutil.which(name, path=_path()))


def is_root() -> bool:
    """Say whether this process may install packages."""
    return hasattr(os, "geteuid") and os.geteuid() == 0


def has_compiler() -> bool:
    """Say whether there are gcc and the headers of the C library."""
    return bool(shutil.which("gcc", path=PLACES + ":/usr/local/bin")) and os.path.exists("/usr/include/stdio.h")


def install(argv: Sequence[str], refresh: Sequence[str], log_path: str, *,
            deadline_seconds: float = DEADLINE_SECONDS) -> None:
    """Run the package manager. PackagesFailed says what is in the way.

    When it knows no such package, or its mirror no longer has it, the lists of
    packages are fetched with ``refresh`` and it is tried once more.
    """
    code, text = _run(argv, log_path, deadline_seconds)
    if code and refresh and problem(text).why is Why.STALE:
        _, text = _run(refresh, log_path, deadline_seconds)
        code, more = _run(argv, log_path, deadline_seconds)
        text += "\n" + more       # fetching the lists "succeeds" with no network, and said why not
    if code:
        raise _failed(argv[0], problem(text), log_path)


def _failed(program: str, found: Problem, log_path: str) -> PackagesFailed:
    said, hint = _SENTENCES.get(found.why, _SENTENCES[Why.OTHER])
    values = {"program": program, "detail": found.detail or "it says nothing", "pid": found.pid, "log": log_path}
    return PackagesFailed(said.format(**values), hint=hint.format(**values) or None,
                          waits=found.why in (Why.LOCKED, Why.OFFLINE))


_SENTENCES: Dict[Why, Tuple[str, str]] = {
    Why.LOCKED: ("{program} is used by another program: {detail}", "it is tried again when that one is done"),
    Why.OFFLINE: ("{program} does not reach its servers: {detail}",
                  "check this node's network, and the proxy that {program} uses"),
    Why.STALE: ("{program} finds no such package: {detail}", "check where {program} takes packages from"),
    Why.UNKNOWN_PACKAGE: ("{program} finds no such package: {detail}", "check where {program} takes packages from"),
    Why.BROKEN: ("the packages of this system are not in order: {detail}",
                 "mend that first; what {program} said is in {log}"),
    Why.READ_ONLY: ("the system is read-only: {detail}", "install the package the way this system does it, and reboot"),
    Why.FULL: ("{program} has no room: {detail}", "free some space on the system's disk"),
    Why.OTHER: ("{program} fails: {detail}", "what it said is in {log}"),
}


def _run(argv: Sequence[str], log_path: str, deadline_seconds: float) -> Tuple[int, str]:
    """Return (code, output). The output goes to a file: should we end meanwhile, the package manager does not."""
    with storing("write", log_path):
        log = os.open(log_path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        try:
            child = subprocess.Popen(list(argv), env=_environment(), cwd="/", stdin=subprocess.DEVNULL, stdout=log,
                                     stderr=log, start_new_session=True, umask=0o022)
        except OSError as error:
            raise PackagesFailed(f"cannot run {argv[0]}: {error.strerror or error}") from error
        try:
            code = child.wait(deadline_seconds)
        except subprocess.TimeoutExpired:
            _end(child)
            text = _text(log)
            if problem(text).why is Why.LOCKED:
                raise _failed(argv[0], problem(text), log_path) from None
            raise PackagesFailed(f"{argv[0]} is not done after {deadline_seconds:g} seconds, ended",
                                 hint=f"what it said is in {log_path}", waits=True) from None
        return code, _text(log)
    finally:
        os.close(log)


def _end(child: "subprocess.Popen[bytes]") -> None:
    """Interrupt it as Ctrl-C does, so that it leaves things in order; kill it when that does not help."""
    for number in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_SECONDS)
            return


def _text(log: int) -> str:
    size = os.fstat(log).st_size
    return os.pread(log, OUTPUT_BYTES, max(0, size - OUTPUT_BYTES)).decode("utf-8", "replace")


def _environment() -> Dict[str, str]:
    ours: List[str] = [name for name in os.environ if name.lower() in _PROXIES]
    return {"PATH": _path(), "HOME": "/root", "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive",
            # Ubuntu's would restart services that have nothing to do with us
            "NEEDRESTART_SUSPEND": "1", **{name: os.environ[name] for name in ours}}


def _path() -> str:
    rehearsed = rehearsal.places("PACKAGE_PATH")
    return rehearsed or PLACES
