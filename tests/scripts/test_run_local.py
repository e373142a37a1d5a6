"""scripts/run_local.py: which way it goes, and that its server.yaml is one llmgw accepts."""
from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from llmgw.parse import cluster_yaml
from tests.conftest import ROOT, load_script


@pytest.fixture(scope="module")
def run_local():
    return load_script(ROOT / "scripts" / "run_local.py")


@pytest.fixture
def answering():
    """Start a stand-in web server that answers everything with one status; return its address."""
    servers = []

    def start(status):
        class Answer(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *unused):
                pass

        server = HTTPServer(("127.0.0.1", 0), Answer)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}/"
    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("status, there", [(200, True), (403, True), (429, True), (503, False), (404, False)])
def test_stand_in_a_host_counts_as_reachable_when_it_answers_as_itself(run_local, answering, status, there):
    assert run_local.answers_at(answering(status)) is there


def test_a_host_that_refuses_is_not_reachable(run_local, free_port):
    assert run_local.answers_at(f"http://127.0.0.1:{free_port}/") is False


def test_the_server_yaml_it_writes_is_accepted_and_written_once(run_local, tmp_path, monkeypatch):
    monkeypatch.setenv("LLMGW_DEV_CACHE", str(tmp_path))
    path = run_local.write_config()
    config = cluster_yaml.decode(path.read_bytes(), str(path), lambda name: (path.parent / name).read_bytes(), {})
    assert [model.name for model in config.models] == [run_local.NAME]
    assert (path.parent / "qa.jinja").read_text() == run_local.TEMPLATE.read_text()
    before = path.stat().st_mtime_ns
    assert run_local.write_config().stat().st_mtime_ns == before
