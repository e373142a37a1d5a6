"""GitHub's API: where it is, and what it says of a release."""
from __future__ import annotations

import os
from urllib.parse import quote

from llmgw.domain.errors import NotFound
from llmgw.system.internet import Internet

API = "https://api.github.com"
_HEADERS = {"Accept": "application/vnd.github+json", "X-GitHub-Api-Version": "2022-11-28"}


class Github:
    """``internet`` fetches the files of its releases as well."""

    def __init__(self, api_url: str = "", token_file: str = "", proxy: str = "") -> None:
        self.api = (api_url or os.environ.get("LLMGW_GITHUB_API", "") or API).rstrip("/")
        self.internet = Internet(self.api, token_file=token_file or os.environ.get("LLMGW_GITHUB_TOKEN_FILE", ""),
                                 proxies={"http": proxy, "https": proxy} if proxy else None)

    def release(self, repository: str, tag: str) -> bytes:
        """Return the JSON of a release; NotFound when there is none."""
        url = f"{self.api}/repos/{repository}/releases/tags/{quote(tag, safe='')}"
        try:
            return self.internet.get(url, headers=_HEADERS).body
        except NotFound:
            raise NotFound(f"{repository} has no release {tag}") from None
