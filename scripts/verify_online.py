"""Ask the real GitHub and Hugging Face what the tests can only ask stand-ins; one line per check.

Exit 3 when a check fails. Downloads about 20 MB into a folder that is removed again.
"""
from __future__ import annotations

import hashlib
import os
import pathlib
import sys
import tarfile
import tempfile
import time
from typing import Callable, List, Optional, Tuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "src"))

from llmgw.domain.engine import DEFAULT_VERSIONS, LLAMA_CPP, Asset
from llmgw.domain.errors import CheckFailed, LlmgwError
from llmgw.domain.model import Weights
from llmgw.parse import github_release, weights_source
from llmgw.server.hub import Hub
from llmgw.server.releases import Releases
from llmgw.up_model import FIRST_MODEL

VERSION = DEFAULT_VERSIONS[LLAMA_CPP]
WITH_CUDA = "b11434"          # a release known to hold CUDA archives for Linux
SMALL_MODEL = "hf:ggml-org/models-moved:tinyllamas/stories260K.gguf"
NEWEST_DRIVER = "999.0"
DEADLINE_SECONDS = 600.0


def main() -> int:
    """Run every check, whatever the others said; return the exit code."""
    failed = 0
    with tempfile.TemporaryDirectory(prefix="llmgw-verify-") as folder:
        for name, check in checks(folder):
            try:
                print(f"ok    {name}: {check()}", flush=True)
            except LlmgwError as error:
                failed += 1
                print(f"FAIL  {name}: {error.message}" + (f" ({error.hint})" if error.hint else ""), flush=True)
    print(f"{failed} checks failed" if failed else "all checks passed")
    return CheckFailed.exit_code if failed else 0


def checks(folder: str) -> List[Tuple[str, Callable[[], str]]]:
    releases, hub = Releases(folder), Hub(folder)
    return [
        (f"GitHub lists {VERSION} with digests", lambda: _listed(releases, VERSION)),
        (f"{VERSION} has a CPU archive for x86_64", lambda: _picked(releases, VERSION, "x86_64", None)),
        (f"{VERSION} has a CPU archive for aarch64", lambda: _picked(releases, VERSION, "aarch64", None)),
        (f"{WITH_CUDA} has a CUDA archive and its runtime",
         lambda: _picked(releases, WITH_CUDA, "x86_64", NEWEST_DRIVER)),
        (f"{VERSION}'s CPU archive comes whole", lambda: _fetched(releases)),
        ("the first model of `make run` is there", lambda: _first_model(hub)),
        ("a small GGUF comes whole from Hugging Face", lambda: _pulled(hub)),
    ]


def _assets(releases: Releases, version: str) -> Tuple[Asset, ...]:
    deadline = time.monotonic() + 120
    while True:
        assets, problem = releases.assets(LLAMA_CPP, version)
        if assets:
            return assets
        if "is being asked" not in problem or time.monotonic() > deadline:
            raise CheckFailed(problem)
        time.sleep(0.1)


def _listed(releases: Releases, version: str) -> str:
    assets = _assets(releases, version)
    _, problem = releases.assets(LLAMA_CPP, version)
    return f"{len(assets)} files" + (f"; {problem}" if problem else "")


def _picked(releases: Releases, version: str, arch: str, driver: Optional[str]) -> str:
    picked = github_release.pick(_assets(releases, version), version, arch, driver, False)
    return f"{picked.binary.name}" + (f" and {picked.runtime.name}" if picked.runtime else "")


def _fetched(releases: Releases) -> str:
    asset = github_release.pick(_assets(releases, VERSION), VERSION, "x86_64", None, True).binary
    path = releases.fetch(LLAMA_CPP, VERSION, asset.name)
    with open(path, "rb") as source:
        if hashlib.sha256(source.read()).hexdigest() != asset.sha256:
            raise CheckFailed(f"{asset.name}: its bytes are not what its digest says")
    with tarfile.open(path) as archive:
        names = archive.getnames()
    if f"llama-{VERSION}/llama-server" not in names:
        raise CheckFailed(f"{asset.name}: holds no llama-{VERSION}/llama-server; it begins with {names[:5]}")
    return f"{asset.name}, {asset.size_bytes} bytes, {len(names)} members"


def _first_model(hub: Hub) -> str:
    commit, chosen = hub.look(FIRST_MODEL)
    source = weights_source.hub(FIRST_MODEL)
    return f"{source.repo} at {commit[:12]}: {', '.join(f'{file.name} {file.size_bytes} bytes' for file in chosen)}"


def _pulled(hub: Hub) -> str:
    weights = _wait(hub, SMALL_MODEL)
    return (f"{weights.files[0].name}, {weights.size_bytes} bytes, context {weights.context_train}, "
            f"{weights.kv_bytes_per_token} bytes of KV cache per token")


def _wait(hub: Hub, source: str) -> Weights:
    deadline = time.monotonic() + DEADLINE_SECONDS
    hub.want(source, "small")
    while True:
        weights, sentence = hub.status(source)
        if weights is not None:
            return weights
        if not hub.activity() or time.monotonic() > deadline:
            raise CheckFailed(sentence)
        time.sleep(0.1)


if __name__ == "__main__":
    os.umask(0o022)
    sys.exit(main())
