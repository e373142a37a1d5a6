"""Which version of a package an environment holds: asked of its own Python, at once."""
from __future__ import annotations

from llmgw.domain.command import Command
from llmgw.domain.errors import CommandFailed, EngineFailed
from llmgw.system.process import Processes

_ASK = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
_ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C.UTF-8", "PYTHONNOUSERSITE": "1"}


def version_of(processes: Processes, python: str, package: str, seconds: float) -> str:
    """Return the version of ``package`` in the environment of ``python``; EngineFailed in words when there is none."""
    try:
        outcome = processes.run(Command((python, "-c", _ASK, package), env=_ENV, cwd="/"), timeout=seconds)
    except CommandFailed as error:
        raise EngineFailed(error.message) from error
    if outcome.code == 0 and outcome.out.strip():
        return outcome.out.strip().splitlines()[-1]
    if "PackageNotFoundError" in outcome.err:
        raise EngineFailed(f"{python} has no package {package}")
    last = [line.strip() for line in outcome.err.splitlines() if line.strip()]
    raise EngineFailed(f"{python} does not run: it ends with code {outcome.code}: "
                       + (last[-1][:300] if last else "no word"))
