"""TLS with real sockets and real certificates: who stalls, shouts or comes in crowds hinders nobody."""
from __future__ import annotations

import json
import os
import socket
import ssl
import subprocess
import threading
import time

import pytest

from llmgw.domain.errors import CommandFailed, ConfigError, ParseError, RequirementMissing, Unreachable
from llmgw.system import addresses, http_server, openssl, tls
from llmgw.system.http_client import HttpClient
from llmgw.system.http_server import HttpServer
from llmgw.system.routes import Response, Route, RouteTable, json_response
from tests.fakes.certificates import TestCa

DEADLINE = 60.0


@pytest.fixture(scope="module")
def ca(tmp_path_factory):
    return TestCa(tmp_path_factory.mktemp("a folder of a CA"))


@pytest.fixture
def blob(tmp_path):
    (tmp_path / "blob").write_bytes(os.urandom(3 << 20))
    return tmp_path / "blob"


@pytest.fixture
def server(ca, blob):
    table = RouteTable([
        Route("GET", "/healthz", ("public",), lambda request: json_response({"status": "ok"})),
        Route("POST", "/echo", ("public",), lambda request: json_response({"size": len(request.body)}), 8 << 20),
        Route("GET", "/blob", ("public",), lambda request: Response(file=open(blob, "rb"), etag="x")),
        Route("GET", "/pieces", ("public",), lambda request: Response(pieces=iter([b"a" * 70000, b"b"]))),
    ], lambda token: None)
    server = HttpServer("0.0.0.0", 0, table, context=tls.server_context(*ca.certificate("localhost", "127.0.0.1")))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def client():
    """Give clients of a server that trust a CA; they are closed at the end."""
    made = []

    def make(server, ca, **more):
        made.append(HttpClient(f"https://127.0.0.1:{server.port}", ca_pem=ca.pem, timeout=DEADLINE, **more))
        return made[-1]
    yield make
    for one in made:
        one.close()


def closed(sock):
    """Wait until the other side ends the connection."""
    sock.settimeout(DEADLINE)
    try:
        return sock.recv(1) == b""
    except OSError:
        return True


def test_a_client_that_trusts_the_ca_gets_answers_of_every_kind(server, ca, client, blob):
    asking = client(server, ca)
    assert json.loads(asking.request("GET", "/healthz").body) == {"status": "ok"}
    assert json.loads(asking.request("POST", "/echo", body=b"x" * (5 << 20)).body) == {"size": 5 << 20}
    assert asking.request("GET", "/blob").body == blob.read_bytes()
    assert asking.request("GET", "/blob", headers={"Range": "bytes=7-9"}).body == blob.read_bytes()[7:10]
    assert asking.request("GET", "/pieces").body == b"a" * 70000 + b"b"
    asking.close()
    assert server.url == f"https://127.0.0.1:{server.port}"


def test_another_ca_another_name_and_plain_http_are_refused_in_words(server, ca, client, tmp_path):
    with pytest.raises(Unreachable, match="certificate is not trusted"):
        client(server, TestCa(tmp_path / "other")).request("GET", "/healthz")
    with pytest.raises(Unreachable, match="certificate is not trusted.*somebody.example"):
        client(server, ca, server_name="somebody.example").request("GET", "/healthz")
    with pytest.raises(Unreachable, match="certificate is not trusted"):
        HttpClient(f"https://127.0.0.1:{server.port}").request("GET", "/healthz")
    with HttpClient(f"http://127.0.0.1:{server.port}").stream("GET", "/healthz") as plain:
        answer = plain.status, plain.read(100)
    assert answer == (400, b"this port speaks TLS: use https://\n")


def test_a_client_that_speaks_tls_to_a_plain_server_is_told_so(ca, client):
    plain = HttpServer("127.0.0.1", 0, RouteTable([], lambda token: None))
    plain.start()
    with pytest.raises(Unreachable, match="does not speak TLS"):
        client(plain, ca).request("GET", "/healthz")
    plain.stop()


@pytest.mark.slow
def test_handshakes_that_stall_are_ended_and_hinder_nobody(server, ca, client):
    silent = [socket.create_connection(("127.0.0.1", server.port), DEADLINE) for _ in range(20)]
    halfway = socket.create_connection(("127.0.0.1", server.port), DEADLINE)
    halfway.sendall(b"\x16\x03\x01\x02\x00\x01")
    for _ in range(20):
        assert client(server, ca).request("GET", "/healthz").status == 200
    assert all(closed(sock) for sock in [*silent, halfway])
    for sock in [*silent, halfway]:
        sock.close()


@pytest.mark.slow
def test_a_thousand_connections_at_once_block_nobody(server, ca, client):
    """One address may have 64 unfinished handshakes; the others are closed at once, and an established client goes on."""
    known = client(server, ca)
    assert known.request("GET", "/healthz").status == 200
    crowd = []
    for _ in range(1000):
        sock = socket.socket()
        sock.settimeout(DEADLINE)
        sock.connect(("127.0.0.1", server.port))
        crowd.append(sock)
    assert known.request("GET", "/healthz").status == 200
    assert max(server._shaking.values(), default=0) <= http_server.MAX_HANDSHAKES
    elsewhere = socket.create_connection(("127.0.0.1", server.port), DEADLINE, source_address=("127.0.0.2", 0))
    with tls.client_context(ca.pem).wrap_socket(elsewhere, server_hostname="127.0.0.1") as greeted:
        greeted.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert greeted.recv(100).startswith(b"HTTP/1.1 200")
    assert all(closed(sock) for sock in crowd)
    for sock in crowd:
        sock.close()
    deadline = time.monotonic() + DEADLINE
    while server._shaking and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not server._shaking and client(server, ca).request("GET", "/healthz").status == 200


def test_a_new_certificate_is_shown_without_a_restart(ca, server, client, tmp_path):
    newer = TestCa(tmp_path / "newer")
    with pytest.raises(Unreachable):
        client(server, newer).request("GET", "/healthz")
    tls.load(server._context, *newer.certificate("127.0.0.1"))
    assert client(server, newer).request("GET", "/healthz").status == 200


def test_many_clients_at_once_are_all_served(server, ca, client):
    answers = []

    def ask():
        one = client(server, ca)
        answers.append([one.request("GET", "/healthz").status for _ in range(5)])
        one.close()
    threads = [threading.Thread(target=ask) for _ in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert answers == [[200] * 5] * 30


def test_what_is_made_passes_the_strictest_reader(ca):
    certificate, _ = ca.certificate("node.example", "10.0.0.1", "::1")
    done = subprocess.run([openssl.program(), "verify", "-x509_strict", "-CAfile", ca.files[0], certificate],
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    context = tls.client_context(ca.pem)
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    left = openssl.ends_at(certificate) - time.time()
    assert 29.9 * 86400 < left < 30.1 * 86400
    assert tls.certificates(ca.pem * 2)[1] == tls.certificates(ca.pem)[0]
    assert os.stat(ca.files[1]).st_mode & 0o777 == 0o600


def test_the_pin_is_that_which_openssl_computes(ca):
    said = subprocess.run([openssl.program(), "x509", "-noout", "-fingerprint", "-sha256", "-in", ca.files[0]],
                          capture_output=True, text=True, timeout=60).stdout
    assert tls.pin(ca.pem) == said.partition("=")[2].strip().replace(":", "").lower()
    for text in ("", ca.pem * 2, "-----BEGIN CERTIFICATE-----\n!!!\n-----END CERTIFICATE-----"):
        with pytest.raises(ParseError):
            tls.pin(text)


def test_files_that_cannot_be_used_are_named(ca, tmp_path):
    certificate, key = ca.certificate("a.example")
    _, other_key = ca.certificate("b.example")
    rubbish = tmp_path / "rubbish.pem"
    rubbish.write_text("hello")
    for files, words in (((certificate, other_key), f"the key {other_key} does not belong to"),
                         ((str(rubbish), key), f"cannot use the certificate {rubbish}"),
                         ((certificate, str(tmp_path / "none")), f"cannot read {tmp_path}/none")):
        with pytest.raises(ConfigError, match=words):
            tls.server_context(*files)
    with pytest.raises(ConfigError, match="the CA cannot be used"):
        tls.client_context("hello")
    with pytest.raises(CommandFailed, match="openssl x509 failed"):
        openssl.ends_at(str(rubbish))


def test_a_missing_openssl_names_its_package(monkeypatch):
    monkeypatch.setattr(openssl, "_path", lambda: "/nonexistent")
    with pytest.raises(RequirementMissing) as caught:
        openssl.program()
    assert "openssl is missing" in caught.value.message and "install the package openssl" in caught.value.hint


def test_the_machines_own_names_are_names_and_addresses():
    found = addresses.own_names()
    assert found[:3] == ["localhost", "127.0.0.1", "::1"] and socket.gethostname().lower() in found
    assert not any(item.startswith("127.") for item in addresses.own_addresses())
