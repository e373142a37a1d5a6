"""GitHub, asked by this node itself: only for what the control plane says it cannot bring."""
from __future__ import annotations

from dataclasses import replace
from typing import Callable, Dict, Tuple

from llmgw.domain.engine import Asset, EngineWanted, Tool
from llmgw.domain.errors import ApiError, DownloadFailed, LlmgwError, NotFound, TryAgain
from llmgw.engines import recipes
from llmgw.parse import github_release
from llmgw.parse.github_release import Release
from llmgw.system.download import Source
from llmgw.system.github import Github

# What the control plane answers when it is the internet that fails it, and not the file or the question.
CANNOT = ("Unreachable", "DownloadFailed", "RateLimited", "WebPage")
Opener = Callable[[int], Source]      # opens a file at an offset
BY_HAND = "a machine with internet can bring it: llmgw.pyz ctl mirror import-engine ARCHIVE --sha256 HEX"


class Outside:
    """Knows what it has once been told of a release; digests are demanded as the control plane demands them."""

    def __init__(self, proxy: str = "") -> None:
        self._github = Github(proxy=proxy)
        self._known: Dict[Tuple[str, str], Release] = {}

    def listed(self, item: EngineWanted) -> EngineWanted:
        """Return the engine with the list of its archives, as GitHub tells it to this node."""
        try:
            return replace(item, assets=self._release(item.name, item.version).assets)
        except NotFound as error:
            raise NotFound(f"{item.name} {item.version}: {error.message}",
                           hint="check the version under engines: in server.yaml") from None
        except LlmgwError as error:
            # nothing is wrong here that would not mend itself
            raise TryAgain(_neither(item.assets_problem, error), hint=BY_HAND) from error

    def listed_tool(self, tool: Tool) -> Tool:
        """The same for what environments are made with."""
        asked = EngineWanted(tool.name, tool.version, assets_problem=tool.problem)
        return replace(tool, assets=self.listed(asked).assets)

    def bring(self, fetch: Callable[[Opener], None], at_server: Opener, name: str, version: str, asset: Asset,
              told: Callable[[str], None]) -> None:
        """Fetch from the control plane as long as it is busy bringing it, from GitHub when it cannot."""
        while True:
            try:
                return fetch(at_server)
            except ApiError as error:
                if error.reason in CANNOT:
                    told(f"downloading {asset.name} from GitHub: the control plane cannot")
                    return fetch(self.opener(name, version, asset, error))
                if error.reason != TryAgain.reason:
                    raise
                told(f"the control plane is {error.message}")         # and has waited with it

    def opener(self, name: str, version: str, asset: Asset, refused: ApiError) -> Opener:
        """Return what opens exactly this file; an error with both sides' words when it is not to be had here either."""
        try:
            release = self._release(name, version)
        except LlmgwError as error:
            raise DownloadFailed(_neither(refused.message, error), hint=BY_HAND) from error
        if asset not in release.assets:
            raise DownloadFailed(f"{refused.message}; GitHub lists no {asset.name} with the same digest to this node",
                                 hint=BY_HAND)
        url = release.urls[asset.name]
        if self._github.api.startswith("https:") and not url.startswith("https:"):
            raise DownloadFailed(f"{asset.name}: its address is without TLS: {url[:200]}")
        return lambda offset: self._github.internet.open(url, offset)

    def _release(self, name: str, version: str) -> Release:
        key = (name, version)
        if key not in self._known:
            repository, tag = recipes.release(name, version)
            self._known[key] = github_release.parse(self._github.release(repository, tag), tag)
        return self._known[key]


def _neither(said: str, error: LlmgwError) -> str:
    """Return why the control plane cannot, and why this node cannot help itself."""
    return f"the control plane: {said}; this node itself: {'the same' if error.message in said else error.message}"
