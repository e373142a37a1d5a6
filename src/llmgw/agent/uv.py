"""uv, run with nothing of the user's: its own cache, Pythons and home; index and proxy as this node is told.

Where the agent is root, uv runs as the engines' user. It writes only into folders
that were lent to it (see system/lent.py), and what it made is taken back before it
is used: neither uv nor an engine can change it then.
"""
from __future__ import annotations

import os
from typing import Callable, Dict, Mapping, Optional, Sequence, Tuple

from llmgw.agent.layout import Layout
from llmgw.domain.cluster import AgentConfig
from llmgw.domain.command import Command, Outcome, RunAs
from llmgw.domain.errors import DiskFull, EngineFailed, LlmgwError, Unreachable
from llmgw.parse import lock, uv_output
from llmgw.parse.lock import Pins
from llmgw.parse.uv_output import Trouble
from llmgw.system import files, follow, lent, spawn

MARKER = "LLMGW_INSTALL_MARK"     # =the agent's data folder: what an agent that was killed left running is found by it
QUICK_SECONDS = 300.0
RESOLVE_SECONDS = 1800.0
COMPILE_SECONDS = 3600.0
INSTALL_SECONDS = 6 * 3600.0      # some gigabytes over a slow line; what stands still ends by uv's own timeout
MAX_LIST_BYTES = 8 << 20
_CERTIFICATES = "SSL_CERT_FILE"
# What a node's administrator sets for uv and its like, and nothing else of the environment.
GIVEN = ("UV_DEFAULT_INDEX", "UV_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_INSECURE_HOST", "UV_NATIVE_TLS",
         "UV_SYSTEM_CERTS", "UV_HTTP_TIMEOUT", "UV_HTTP_RETRIES", "UV_CONCURRENT_DOWNLOADS", "SSL_CERT_FILE",
         "SSL_CERT_DIR", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy",
         "all_proxy", "no_proxy")

Line = Callable[[str], None]


def from_node(config: AgentConfig, environ: Mapping[str, str]) -> Dict[str, str]:
    """Return the index and proxy of this node: agent.yaml wins over the environment."""
    given = {name: environ[name] for name in GIVEN if environ.get(name)}
    if config.http_proxy:
        given = {name: value for name, value in given.items()
                 if name.lower() not in ("http_proxy", "https_proxy", "all_proxy")}
        given.update(HTTP_PROXY=config.http_proxy, HTTPS_PROXY=config.http_proxy)
    if config.package_index:
        given.pop("UV_INDEX_URL", None)
        given["UV_DEFAULT_INDEX"] = config.package_index
    return given


class Uv:
    """``given`` (see ``from_node``) may hold a login and is shown to nobody. ``label`` names the engine.

    ``run_as`` None: as we do.
    """

    def __init__(self, program: str, layout: Layout, given: Mapping[str, str], label: str,
                 stopping: Callable[[], bool], run_as: Optional[RunAs] = None) -> None:
        self._program, self._layout, self.label, self._stopping = program, layout, label, stopping
        self._run_as, self._given = run_as, dict(given)
        self._home = os.path.join(layout.tools, "home")
        self._lend(self._home)
        if run_as is None:
            return
        lent.lend(layout.uv_cache, run_as, keep=True)
        trusted = files.read_bytes(given[_CERTIFICATES]) if given.get(_CERTIFICATES) else None
        if trusted:                               # it may lie where only root can read it
            self._given[_CERTIFICATES] = os.path.join(self._home, "certificates.pem")
            files.write_atomic(self._given[_CERTIFICATES], trusted, mode=0o644)

    def _lend(self, folder: str) -> None:
        if self._run_as is not None:
            lent.lend(folder, self._run_as)
        elif folder == self._home:
            files.make_dir(folder)

    def take_back(self, folder: str) -> None:
        """Make what uv made in ``folder`` ours, so that nobody else can change it."""
        if self._run_as is not None:
            lent.take_back(folder, self._run_as)

    def install_python(self, listing: str, version: str, folder: str, line: Line) -> None:
        """Unpack the Python of a one-entry downloads list (a file) below ``folder``."""
        self._lend(folder)
        self._run(("python", "install", version, "--no-bin"), line, QUICK_SECONDS, "bringing its Python",
                  UV_PYTHON_DOWNLOADS_JSON_URL=listing, UV_PYTHON_INSTALL_DIR=folder, UV_PYTHON_DOWNLOADS="manual")

    def make_environment(self, python: str, folder: str) -> None:
        """Make an empty environment that may be moved."""
        self._lend(folder)
        self._run(("venv", "--relocatable", "--no-project", "--python", python, folder), _nothing, QUICK_SECONDS,
                  "making its environment")

    def resolve(self, requirements: Sequence[str], python: str, platform: str, as_of: str) -> Pins:
        """Return the packages that ``requirements`` need, as the index had them at ``as_of``."""
        wanted, found = os.path.join(self._home, "wanted.in"), os.path.join(self._home, "found.txt")
        files.remove(found)                       # uv would keep to what stands in it
        files.write_atomic(wanted, ("\n".join(requirements) + "\n").encode("ascii"), mode=0o644)
        self._run(("pip", "compile", "--generate-hashes", "--only-binary", ":all:", "--exclude-newer", as_of,
                   "--python", python, "--python-version", "3.12", "--python-platform", platform, "--no-header",
                   "--no-annotate", "--output-file", found, wanted), _nothing, RESOLVE_SECONDS,
                  "resolving its packages", as_of)
        text = files.read_regular(found, MAX_LIST_BYTES) or b""
        return lock.read(text.decode("utf-8", "replace"), f"what uv found for {self.label}")

    def install(self, listed: str, python: str, line: Line, wheels: str = "") -> None:
        """Install exactly the list in the file ``listed`` into the environment of ``python``.

        From the folder ``wheels`` and nowhere else, when there is one; else from the index.
        """
        source: Tuple[str, ...] = ("--no-index", "--offline", "--find-links", wheels) if wheels else ()
        self._run(("pip", "install", "--require-hashes", "--only-binary", ":all:", "--no-deps", *source,
                   "--python", python, "--requirements", listed), line, INSTALL_SECONDS, "installing its packages")

    def compile(self, python: str, folder: str) -> None:
        """Compile the packages in ``folder`` where engines may not write: else each start would do it again.

        By ``python`` -S, which runs nothing of them: uv's own --compile-bytecode runs their .pth files.
        What cannot be compiled is left as it is, as when it is imported.
        """
        if self._run_as is not None:
            follow.follow(
                Command((python, "-I", "-S", "-m", "compileall", "-qq", "-j", "0", folder), env=self._env(),
                        cwd=self._layout.tools, run_as=self._run_as),
                (MARKER, self._layout.root), seconds=COMPILE_SECONDS, line=_nothing, stopping=self._stopping)

    def _run(self, words: Sequence[str], line: Line, seconds: float, what: str, as_of: str = "",
             **more: str) -> Outcome:
        outcome = follow.follow(
            Command((self._program, *words), env={**self._env(), **more}, secret_env=self._given,
                    cwd=self._layout.tools, run_as=self._run_as),
            (MARKER, self._layout.root), seconds=seconds, line=line, stopping=self._stopping)
        if outcome.code != 0:
            raise self._error(what, uv_output.problem(outcome.err + "\n" + outcome.out), as_of)
        return outcome

    def _env(self) -> Dict[str, str]:
        return {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": self._home, "LC_ALL": "C.UTF-8", "NO_COLOR": "1",
                "UV_NO_CONFIG": "1", "UV_NO_ENV_FILE": "1", "UV_NO_PROGRESS": "1", "UV_KEYRING_PROVIDER": "disabled",
                "UV_CACHE_DIR": self._layout.uv_cache, "UV_PYTHON_DOWNLOADS": "never"}

    def _error(self, what: str, problem: uv_output.Problem, as_of: str) -> LlmgwError:
        if problem.trouble is Trouble.DISK_FULL:
            return DiskFull(f"{self.label}: no space left in {self._layout.root} while {what}",
                            hint=f"free some space on the filesystem of {self._layout.root}")
        said, hint = _SENTENCES.get(problem.trouble, _OTHER)
        values = {"label": self.label, "what": what, "name": problem.what, "as_of": as_of,
                  "engine": self.label.partition(" ")[0]}
        kind = Unreachable if problem.trouble in (Trouble.UNREACHABLE, Trouble.REFUSED) else EngineFailed
        return kind(said.format(**values), hint=hint.format(**values))


_INDEX_HINT = "check this node's network; package_index: and http_proxy: in agent.yaml name an index and a proxy"
_RELOCK_HINT = ("look into why; when another list of packages is what you want: llmgw.pyz ctl engines relock {engine}")
_OTHER = ("{label}: {what} failed: {name}", "the sentence is uv's own; it is tried again")
_SENTENCES: Mapping[Trouble, Tuple[str, str]] = {
    Trouble.WRONG_HASH: ("{label}: the package index gives another file for {name} than the one in the list of "
                         "packages (its sha256 is wrong): nothing of it was installed", _RELOCK_HINT),
    Trouble.NO_HASH: ("{label}: {name} has no hash in the list of packages", _RELOCK_HINT),
    Trouble.GONE: ("{label}: {what} failed: {name} was withdrawn from the package index, or never was there; "
                   "nothing else is taken instead", _RELOCK_HINT),
    Trouble.NO_DATES: ("{label}: the package index does not say when files were uploaded ({name}), so what there was "
                       "at {as_of} cannot be found out", "take an index that does: package_index: in agent.yaml"),
    Trouble.UNREACHABLE: ("{label}: the package index cannot be reached while {what}: {name}", _INDEX_HINT),
    Trouble.REFUSED: ("{label}: the package index wants a login, or another one: {name}",
                      "package_index: in agent.yaml may hold one: https://USER:PASSWORD@HOST/simple"),
}


def end_leftovers(layout: Layout) -> None:
    """End what an agent that was killed left running: it writes where we are about to."""
    spawn.stop((MARKER, layout.root), grace_seconds=1.0)


def _nothing(line: str) -> None:
    """Take a line and tell nobody."""
