"""A package index on loopback: tiny wheels with upload times, and every fault it can be told to have."""
from __future__ import annotations

import base64
import hashlib
import io
import json
import zipfile
from typing import Dict, Set

from tests.fakes.web import FakeWeb, Reply

JSON = "application/vnd.pypi.simple.v1+json"


def wheel(name: str, version: str, needs=(), files=None) -> bytes:
    """Return a wheel with a module of its name, and more ``files`` (path: text)."""
    info = f"{name}-{version}.dist-info"
    texts = {f"{name}.py": f"VERSION = {version!r}\n", **(files or {}),
             f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
                                 + "".join(f"Requires-Dist: {need}\n" for need in needs),
             f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}
    record = "".join(f"{path},sha256={_b64(text.encode())},{len(text.encode())}\n" for path, text in texts.items())
    texts[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, text in texts.items():
            archive.writestr(zipfile.ZipInfo(path, (2026, 1, 1, 0, 0, 0)), text)
    return held.getvalue()


def _b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


class PackageIndex:
    """``files[name][file name]`` is (bytes, upload time). The other fields are its faults. Use it in ``with``."""

    def __init__(self) -> None:
        self.files: Dict[str, Dict[str, tuple]] = {}
        self.tampered: Set[str] = set()          # other bytes than the index says
        self.gone: Set[str] = set()              # listed, but 404 when fetched
        self.yanked: Dict[str, str] = {}         # why a file was withdrawn, by its name; it is still there
        self.dates = True
        self.login = ""
        self.hold = None                         # an event to wait for before a file is sent
        self.web = FakeWeb(self._answer)

    @property
    def url(self) -> str:
        return f"{self.web.url}/simple"

    def add(self, name: str, version: str, needs=(), at="2026-01-01T00:00:00Z", files=None) -> None:
        self.files.setdefault(name, {})[f"{name}-{version}-py3-none-any.whl"] = (wheel(name, version, needs, files), at)

    def __enter__(self):
        self.web.__enter__()
        return self

    def __exit__(self, *unused):
        self.web.__exit__(*unused)

    def _answer(self, path: str, headers: Dict[str, str]) -> Reply:
        given = {key.lower(): value for key, value in headers.items()}.get("authorization", "")
        if self.login and given != "Basic " + base64.b64encode(self.login.encode()).decode():
            return Reply(401, b"who are you?", {"WWW-Authenticate": "Basic"})
        parts = path.strip("/").split("/")
        if parts[0] == "files" and path.endswith(".metadata"):
            return self._metadata(parts[-1][:-len(".metadata")])
        if parts[0] == "files":
            return self._file(parts[-1])
        found = self.files.get(parts[-1])
        if not found:
            return Reply(404, b"no such project")
        listed = []
        for name, (data, at) in found.items():
            entry = {"filename": name, "url": f"{self.web.url}/files/{name}", "size": len(data),
                     "hashes": {"sha256": hashlib.sha256(data).hexdigest()}, "core-metadata": True}
            if name in self.yanked:
                entry["yanked"] = self.yanked[name]
            listed.append({**entry, "upload-time": at} if self.dates else entry)
        body = {"meta": {"api-version": "1.1"}, "name": parts[-1], "versions": [], "files": listed}
        return Reply(200, json.dumps(body).encode(), {"Content-Type": JSON})

    def _metadata(self, name: str) -> Reply:
        data = next(files[name][0] for files in self.files.values() if name in files)
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            inside = next(each for each in archive.namelist() if each.endswith("/METADATA"))
            return Reply(200, archive.read(inside), {"Content-Type": "application/octet-stream"}, ranges=False)

    def _file(self, name: str) -> Reply:
        if self.hold is not None:
            self.hold.wait(60)
        data = next((files[name][0] for files in self.files.values() if name in files), None)
        if data is None or name in self.gone:
            return Reply(404, b"Not Found")
        if name in self.tampered:
            data = wheel(*name.split("-")[:2], files={"evil.py": "print('evil')\n"})
        return Reply(200, data, {"Content-Type": "application/octet-stream"}, ranges=False)
