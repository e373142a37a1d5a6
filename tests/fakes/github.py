"""A GitHub on loopback: releases with digests, downloads by redirect, and every lie it can be told to tell."""
from __future__ import annotations

import hashlib
import json
from typing import Dict, Optional, Set

from tests.fakes.web import FakeWeb, Reply


REPOSITORIES = ("ggml-org/llama.cpp", "astral-sh/uv", "astral-sh/python-build-standalone", "vllm-project/vllm",
                "sgl-project/sglang")


class FakeGithub:
    """``releases[tag][name]`` are the files, ``published[tag]`` its date. The other fields are its faults.

    Use it in ``with``.
    """

    def __init__(self, releases: Dict[str, Dict[str, bytes]]) -> None:
        self.releases = releases
        self.published: Dict[str, str] = {}
        self.wrong_digest: Set[str] = set()
        self.null_digest: Set[str] = set()
        self.wrong_size: Dict[str, int] = {}      # name: by how much the list is wrong
        self.missing: Set[str] = set()            # listed, but 404 when fetched
        self.cuts: Dict[str, list] = {}           # name: where each transfer is cut off, in turn
        self.stalls: Dict[str, int] = {}
        self.ignores_range = False
        self.redirect_loop = False
        self.captive_api = False
        self.captive_files = False
        self.rate_limited = 0                     # answers still to be refused
        self.broken = 0                           # answers still to be 502
        self.elsewhere: Optional[str] = None      # another server to send downloads to
        self.web = FakeWeb(self._answer)

    @property
    def url(self) -> str:
        return self.web.url

    def downloads(self, name: str) -> int:
        """How often the bytes of a file were asked for."""
        return sum(path == f"/objects/{name}" for path in self.web.paths())

    def _answer(self, path: str, headers: Dict[str, str]) -> Reply:
        parts = path.strip("/").split("/")
        if parts[0] == "repos":
            return self._api(parts)
        if self.redirect_loop:
            return Reply(302, headers={"Location": path})
        if parts[0] == "download":
            return Reply(302, headers={"Location": f"{self.elsewhere or ''}/objects/{parts[2]}"})
        return self._object(parts[-1])

    def _api(self, parts) -> Reply:
        if self.captive_api:
            return Reply(200, b"<html>Please log in</html>", {"Content-Type": "text/html; charset=utf-8"})
        if self.rate_limited:
            self.rate_limited -= 1
            return Reply(403, b'{"message":"API rate limit exceeded"}', {
                "X-RateLimit-Remaining": "0", "Retry-After": "5", "Content-Type": "application/json"})
        if self.broken:
            self.broken -= 1
            return Reply(502, b"Bad Gateway")
        tag = parts[-1]
        if tag not in {**self.releases, **self.published} or "/".join(parts[1:3]) not in REPOSITORIES:
            return Reply(404, b'{"message":"Not Found"}', {"Content-Type": "application/json"})
        body = json.dumps({"tag_name": tag, "prerelease": True, "published_at": self.published.get(tag), "assets": [
            self._asset(tag, name, data) for name, data in self.releases.get(tag, {}).items()]})
        return Reply(200, body.encode(), {"Content-Type": "application/json; charset=utf-8"})

    def _asset(self, tag, name, data):
        digest = "0" * 64 if name in self.wrong_digest else hashlib.sha256(data).hexdigest()
        return {"name": name, "size": len(data) + self.wrong_size.get(name, 0), "state": "uploaded",
                "digest": None if name in self.null_digest else f"sha256:{digest}",
                "browser_download_url": f"{self.url}/download/{tag}/{name}"}

    def _object(self, name) -> Reply:
        data = next((files[name] for files in self.releases.values() if name in files), None)
        if data is None or name in self.missing:
            return Reply(404, b"Not Found")
        if self.captive_files:
            return Reply(200, b"<html>Please log in</html>", {"Content-Type": "text/html"})
        reply = Reply(200, data, ranges=not self.ignores_range)
        if self.cuts.get(name):
            reply.cut_after = self.cuts[name].pop(0)
        reply.stall_after = self.stalls.get(name)
        return reply

    def __enter__(self):
        self.web.__enter__()
        return self

    def __exit__(self, *unused: object) -> None:
        self.web.__exit__()
