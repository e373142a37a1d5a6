"""The page's shell: its three files, their headers, and what must never be in them."""
from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
import zipfile

import pytest

from llmgw.api import paths
from llmgw.server import page
from llmgw.system.routes import PUBLIC, Request
from tests.conftest import ROOT
from tests.fakes import example_cluster
from tests.fakes.view_server import ViewServer

STATIC = ROOT / "src" / "llmgw" / "server" / "static"
KINDS = {"/": "text/html; charset=utf-8", "/page.js": "text/javascript; charset=utf-8",
         "/page.css": "text/css; charset=utf-8"}


@pytest.fixture
def server():
    server = ViewServer(**example_cluster.whole(example_cluster.THREE))
    yield server
    server.close()


def get(server, path, **headers):
    connection = http.client.HTTPConnection(server.url.partition("//")[2], timeout=20)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer, answer.read()
    finally:
        connection.close()


def test_only_the_shell_is_public():
    assert [(route.method, route.pattern, route.roles) for route in page.routes()] == [
        ("GET", path, (PUBLIC,)) for path in KINDS]


@pytest.mark.parametrize("path", KINDS)
def test_the_shell_is_served_to_anybody_with_headers_that_confine_it(server, path):
    answer, body = get(server, path)

    assert answer.status == 200
    assert answer.headers["Content-Type"] == KINDS[path]
    assert answer.headers["Content-Security-Policy"] == (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; frame-ancestors 'none'; form-action 'none'")
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Referrer-Policy"] == "no-referrer"
    assert answer.headers["Cache-Control"] == "no-cache"
    assert "Set-Cookie" not in answer.headers
    name = "page.html" if path == "/" else path[1:]
    assert body == (STATIC / name).read_bytes()


def test_an_unchanged_file_is_not_sent_again(server):
    first, _ = get(server, "/page.js")
    again, body = get(server, "/page.js", **{"If-None-Match": first.headers["ETag"]})
    other, _ = get(server, "/page.js", **{"If-None-Match": '"something else"'})

    assert (again.status, body, other.status) == (304, b"", 200)


def test_the_lists_are_not_open_without_a_token(server):
    for path in (paths.NODES, paths.MODELS, paths.REPLICAS, paths.ENGINES, paths.EVENTS):
        assert get(server, path)[0].status == 401


def test_the_shell_comes_out_of_a_zip_too(tmp_path):
    archive = tmp_path / "llmgw.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        for path in sorted((ROOT / "src").rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                packed.write(path, path.relative_to(ROOT / "src").as_posix())
    asked = ("import json; from llmgw.server import page; from llmgw.system.routes import Request; "
             "print(json.dumps({r.pattern: len(r.handler(Request('GET', r.pattern)).body) for r in page.routes()}))")
    ran = subprocess.run([sys.executable, "-c", asked], env={"PYTHONPATH": str(archive)}, cwd=tmp_path,
                         stdout=subprocess.PIPE, text=True, timeout=60, check=True)

    assert json.loads(ran.stdout) == {route.pattern: len(route.handler(Request("GET", route.pattern)).body)
                                      for route in page.routes()}


FORBIDDEN = {
    "markup made of text": r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|srcdoc|"
                           r"createContextualFragment|setHTML|\.append\(|\.html\(",
    "code made of text": r"\beval\b|new Function|setTimeout\(\s*[\"'`]|import\(|javascript:",
    "kept beyond the tab": r"localStorage|indexedDB|document\.cookie|caches\.|serviceWorker",
    "something from elsewhere": r"//(?!www\.w3\.org/2000/svg)[a-z0-9-]+\.[a-z]|@import|\burl\(",
    "what the policy blocks": r"\sstyle=|\son[a-z]+=|<style|<script>|<script(?![^>]*\bsrc=)",
}


@pytest.mark.parametrize("what", FORBIDDEN)
@pytest.mark.parametrize("name", ["page.html", "page.js", "page.css"])
def test_the_files_hold_none_of(what, name):
    assert re.findall(FORBIDDEN[what], (STATIC / name).read_text(encoding="utf-8"), re.IGNORECASE) == []


def test_the_page_asks_for_the_lists_that_the_api_has():
    script = (STATIC / "page.js").read_text(encoding="utf-8")
    asked = dict(re.findall(r'(\w+): "(v1/\w+)"', script))

    assert {name: f"/{path}" for name, path in asked.items()} == {
        "models": paths.MODELS, "nodes": paths.NODES, "replicas": paths.REPLICAS, "engines": paths.ENGINES,
        "events": paths.EVENTS}
