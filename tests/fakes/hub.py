"""A Hugging Face on loopback: revisions, trees in pages, files by redirect, and its faults."""
from __future__ import annotations

import hashlib
import json
from typing import Dict, Set
from urllib.parse import parse_qs, unquote, urlsplit

from tests.fakes.web import FakeWeb, Reply

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class FakeHub:
    """``repos[repo][path]`` are the files; those over ``small`` bytes are large files with a sha256."""

    def __init__(self, repos: Dict[str, Dict[str, bytes]], small: int = 100) -> None:
        self.repos, self.small = repos, small
        self.commits: Dict[str, str] = {"main": COMMIT, COMMIT: COMMIT}
        self.page_size = 1000
        self.gated: Set[str] = set()
        self.token = ""                            # what gated repositories want
        self.wrong_digest: Set[str] = set()
        self.cuts: Dict[str, list] = {}
        self.gated_files = False                   # the list is open, the files want a token
        self.spoil: Dict[str, int] = {}            # path -> a byte that comes wrong, once
        self.lies: Dict[str, int] = {}             # path -> how many bytes more it claims to have
        self.ranges = True
        self.files_at = ""                         # another host that has the files themselves
        self.rate_limited = 0
        self.endless_pages = False
        self.web = FakeWeb(self._answer)

    @property
    def url(self) -> str:
        return self.web.url

    def downloads(self, path: str) -> int:
        return sum(found == f"/cdn/{path}" for found in self.web.paths())

    def _answer(self, path: str, headers: Dict[str, str]) -> Reply:
        parts = urlsplit(path)
        steps = [unquote(step) for step in parts.path.strip("/").split("/")]
        if steps[0] == "cdn":
            return self._cdn("/".join(steps[1:]))
        if self.rate_limited:
            self.rate_limited -= 1
            return Reply(429, b"slow down", {"Retry-After": "1"})
        api = steps[:2] == ["api", "models"]
        steps = steps[2:] if api else steps
        repo = "/".join(steps[:2])
        if repo not in self.repos or (repo in self.gated and headers.get("authorization") != f"Bearer {self.token}"):
            return Reply(401, b'{"error":"Repository not found"}', {"Content-Type": "application/json"})
        if api and steps[2] == "revision":
            return self._revision(steps[3])
        if api:
            return self._tree(repo, parse_qs(parts.query))
        return self._resolve(repo, steps[3], "/".join(steps[4:]), headers)

    def _revision(self, revision: str) -> Reply:
        if revision not in self.commits:
            return Reply(404, b'{"error":"Invalid rev id"}', {"Content-Type": "application/json"})
        return Reply(200, json.dumps({"sha": self.commits[revision]}).encode(), {"Content-Type": "application/json"})

    def _tree(self, repo: str, query) -> Reply:
        start = int(query.get("cursor", ["0"])[0])
        entries = [self._entry(path, data) for path, data in self.repos[repo].items()]
        page = entries[start:start + self.page_size]
        headers = {"Content-Type": "application/json"}
        if start + self.page_size < len(entries) or self.endless_pages:
            headers["Link"] = (f'<{self.url}/api/models/{repo}/tree/{COMMIT}?recursive=true'
                               f'&cursor={start + self.page_size}>; rel="next"')
        return Reply(200, json.dumps(page).encode(), headers)

    def _entry(self, path: str, data: bytes):
        if len(data) <= self.small:
            return {"type": "file", "path": path, "size": len(data),
                    "oid": "0" * 40 if path in self.wrong_digest else git_oid(data)}
        oid = "0" * 64 if path in self.wrong_digest else hashlib.sha256(data).hexdigest()
        return {"type": "file", "path": path, "size": len(data), "oid": git_oid(b"pointer"),
                "lfs": {"oid": oid, "size": len(data), "pointerSize": 135}}

    def _resolve(self, repo: str, commit: str, path: str, headers: Dict[str, str]) -> Reply:
        if commit not in self.commits.values() or path not in self.repos[repo]:
            return Reply(404, b"Entry not found")
        data = self.repos[repo][path]
        if self.gated_files and headers.get("authorization") != f"Bearer {self.token}":
            return Reply(403, b"Access to this model is restricted", {"X-Error-Code": "GatedRepo"})
        if len(data) > self.small:
            return Reply(302, headers={"Location": f"{self.files_at or self.url}/cdn/{path}"})
        return Reply(200, data, {"Content-Type": "text/plain; charset=utf-8"})

    def _cdn(self, path: str) -> Reply:
        data = next(files[path] for files in self.repos.values() if path in files)
        if path in self.spoil:
            at = self.spoil.pop(path)
            data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1:]
        reply = Reply(200, data, ranges=self.ranges)
        if path in self.lies:
            reply.headers["Content-Length"] = str(len(data) + self.lies[path])
            reply.ranges, reply.close = False, True
        if self.cuts.get(path):
            reply.cut_after = self.cuts[path].pop(0)
        return reply

    def __enter__(self):
        self.web.__enter__()
        return self

    def __exit__(self, *unused: object) -> None:
        self.web.__exit__()
