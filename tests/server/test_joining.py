"""A real server off loopback: its certificates, who joins and with what, and the end of it."""
from __future__ import annotations

import contextlib
import json
import os
import pathlib
import socket
import ssl
import threading

import pytest

from llmgw.api import joining, paths
from llmgw.api.client import ControlClient
from llmgw.domain import join
from llmgw.domain.errors import ApiError, ConfigError, Forbidden, Unreachable
from llmgw.domain.join import JoinRequest
from llmgw.domain.secret import Secret
from llmgw.system import tls
from llmgw.system.http_client import HttpClient
from tests.fakes.certificates import TestCa
from tests.server.running import DEADLINE, RunningServer, StandInNode, StandInRouter, until

CONFIG = """
cluster: test
engines:
  llama.cpp: {version: b10991}
names: [control.example]
models:
  - name: m
    engine: llama.cpp
    weights: mirror:m
    context_length: 2048
    placement: {nodes: [doomed]}
"""


class TlsServer(RunningServer):
    """Listens on every address, and is asked through 127.0.0.1."""

    def command(self, *more):
        words = super().command(*more)
        words[words.index("--listen") + 1] = "0.0.0.0:0"
        return words

    def start(self, **environment):
        super().start(**environment)
        known = json.loads((self.data / "endpoint.json").read_text())
        self.ca_pem = pathlib.Path(known["ca_file"]).read_text()
        return self

    def client(self, role="admin", token=None):
        token = token or Secret((self.data / "tokens" / role).read_text().strip())
        made = ControlClient([self.url], token, ca_pem=self.ca_pem, timeout=DEADLINE)
        self._clients.append(made)
        return made

    def make(self, role="node", **more):
        """Return (view, secret) of a new token."""
        made = self.client().json("POST", paths.TOKENS, {"role": role, "ttl_seconds": 600, **more})
        return made, made["secret"]

    def join(self, folder, text, name="n", role="node"):
        return joining.credential(str(folder / "credential.json"), role, [self.url], join.read(text),
                                  JoinRequest(name, "machine"), stop=lambda: True)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    running = TlsServer(tmp_path_factory.mktemp("server"), CONFIG).start()
    running.import_model()
    yield running
    assert running.stop() == 0


@contextlib.contextmanager
def recorder(context=None):
    """A server that shows anything, keeps every byte that it is sent, and answers each request with a CA of its own."""
    heard, listening = [], socket.create_server(("127.0.0.1", 0))

    def serve():
        while True:
            try:
                sock, _ = listening.accept()
            except OSError:
                return
            sock.settimeout(DEADLINE)
            with contextlib.suppress(OSError), contextlib.closing(
                    context.wrap_socket(sock, server_side=True) if context else sock) as peer:
                while True:
                    data = peer.recv(1 << 16)
                    heard.append(data)
                    if not data:
                        break
                    if b"\r\n\r\n" in data:
                        body = recorder.body
                        peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listening.getsockname()[1], heard
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join(DEADLINE)


def test_the_files_are_closed_to_others_and_the_server_key_is_no_ca(server):
    folder = server.data / "tls"
    assert folder.stat().st_mode & 0o777 == 0o700
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix in (".key", ".pem") and path.name != "server-ca.pem":
            assert path.stat().st_mode & 0o077 == 0, path
    assert not [path for path in folder.iterdir() if path.name.startswith(".making")]


def test_the_server_answers_to_its_names_and_no_other(server):
    for host, status in (("control.example", 200), ("evil.example", 421)):
        asking = HttpClient(server.url, ca_pem=server.ca_pem, server_name="control.example")
        with asking.stream("GET", "/healthz", headers={"Host": host}) as answer:
            assert answer.status == status


def test_a_join_string_lets_one_machine_in_and_a_second_one_not(server, tmp_path):
    view, text = server.make()
    assert join.read(text).ca_sha256 == tls.pin(server.ca_pem) and view["uses"] == 1
    held = server.join(tmp_path / "a", text)
    assert (held.role, held.name) == ("node", "n") and (tmp_path / "a" / "credential.json").stat().st_mode & 0o077 == 0
    assert server.join(tmp_path / "a", text) == held                # started again: nothing is asked
    with pytest.raises(ApiError, match="has been used"):
        server.join(tmp_path / "b", text)
    listed = {item["id"]: item for item in server.client().json("GET", paths.TOKENS)["items"]}
    assert (listed[view["id"]]["used"], listed[view["id"]]["secret"]) == (1, "")
    assert text not in json.dumps(listed)


def test_a_second_join_of_a_machine_makes_a_new_node(server, tmp_path):
    _, text = server.make(uses=2)
    first, second = server.join(tmp_path / "a", text, "twin"), server.join(tmp_path / "b", text, "twin")
    assert (first.name, second.name) == ("twin", "twin-2") and first.tls_name != second.tls_name


def test_uses_are_counted_when_many_join_at_once(server, tmp_path):
    _, text = server.make(uses=3)
    found = []

    def one(number):
        try:
            found.append(server.join(tmp_path / str(number), text, f"crowd-{number}").name)
        except ApiError as error:
            found.append(error.reason)
    threads = [threading.Thread(target=one, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert found.count("Unauthorized") == 5 and sum(name.startswith("crowd-") for name in found) == 3


def test_not_one_byte_of_a_secret_goes_to_a_server_with_another_ca(server, tmp_path):
    _, text = server.make()
    other = TestCa(tmp_path / "other")
    secret = join.read(text).secret.reveal().encode()
    with recorder(tls.server_context(*other.certificate("127.0.0.1"))) as (port, heard):
        # it shows its own CA, and then the right one without having its key
        for recorder.body, words in ((other.pem.encode(), "its CA is not the one"), (b"hello", "shows no CA")):
            with pytest.raises(Forbidden, match=words):
                joining.credential(str(tmp_path / "c"), "node", [f"https://127.0.0.1:{port}"], join.read(text),
                                   JoinRequest("n"), stop=lambda: True)
        recorder.body = server.ca_pem.encode()
        with pytest.raises(Unreachable, match="certificate is not trusted"):
            joining.credential(str(tmp_path / "c"), "node", [f"https://127.0.0.1:{port}"], join.read(text),
                               JoinRequest("n"), stop=lambda: True)
    everything = b"".join(heard)
    assert everything.count(b"GET /v1/ca HTTP/1.1") == 3
    assert secret not in everything and b"llmgw_join" not in everything and b"uthorization" not in everything
    assert server.join(tmp_path / "d", text).name                   # the string is still good


def test_joining_over_plain_http_is_refused_before_a_byte_is_sent(server, tmp_path):
    _, text = server.make()
    with recorder() as (port, heard), pytest.raises(ConfigError, match="over TLS only"):
        joining.credential(str(tmp_path / "c"), "node", [f"http://127.0.0.1:{port}"], join.read(text), JoinRequest("n"))
    assert not heard


def test_a_credential_opens_what_is_its_own_and_nothing_else(server, tmp_path):
    _, text = server.make(uses=2)
    mine, other = server.join(tmp_path / "a", text, "own"), server.join(tmp_path / "b", text, "other")
    node, shared = StandInNode(server, mine.name), StandInNode(server, mine.name)
    node.client = server.client(token=mine.token)
    node.beat()
    shared.client = server.client("node")
    with pytest.raises(ApiError, match="has a credential of its own"):
        shared.beat()
    node.client = server.client(token=other.token)
    with pytest.raises(ApiError, match="this is the credential of other"):
        node.beat()
    with pytest.raises(ApiError, match="this is the credential of other"):
        node.client.json("POST", paths.fill(paths.LOG_TAIL, node="own"), {"request": "x", "text": "x"})
    for method, path in (("GET", paths.NODES), ("GET", paths.KEYS), ("GET", paths.ROUTES), ("POST", paths.TOKENS),
                         ("POST", paths.JOIN), ("GET", paths.BACKUP)):
        with pytest.raises(ApiError) as caught:
            node.client.json(method, path)
        assert caught.value.status == 403


def names_of(pem, ca_pem):
    """Return the names in a certificate, as a TLS client that trusts the CA reads them."""
    import tempfile
    with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
        file.write(pem)
        file.flush()
        context = tls.server_context(file.name)
    reading, writing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = tls.client_context(ca_pem)
    client.check_hostname = False
    one = client.wrap_bio(reading, writing)
    other = context.wrap_bio(writing, reading, server_side=True)
    for _ in range(4):
        for side in (one, other):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    return {value for _, value in one.getpeercert()["subjectAltName"]}


def with_key(held):
    return held.certificate + held.key.reveal()


def test_a_gate_has_a_certificate_for_its_own_name_only_and_renews_it(server, tmp_path):
    _, text = server.make()
    held = server.join(tmp_path / "a", text, "renewing")
    assert names_of(with_key(held), held.fleet_ca) == {held.tls_name} and held.tls_name.endswith(join.GATE_DOMAIN)
    with pytest.raises(ssl.SSLError):                               # it can never pass for the control plane
        names_of(with_key(held), server.ca_pem)
    now, taken = [held.renew_at - 1], []
    renewal = joining.Renewal(server.client(token=held.token), str(tmp_path / "a" / "credential.json"), held,
                              lambda: ["127.0.0.1", "control.example"], lambda: now[0], taken.append)
    renewal.turn()
    assert not taken
    now[0] += 2
    renewal.turn()
    renewal.turn() if now[0] < taken[0].renew_at else None
    assert taken[0].certificate != held.certificate and joining.kept(str(tmp_path / "a" / "credential.json")) == taken[0]
    assert names_of(with_key(taken[0]), held.fleet_ca) == {held.tls_name}
    with pytest.raises(ApiError, match="only who has joined"):
        server.client("node").json("POST", paths.CERTIFICATE, {})


def test_a_router_gets_the_names_that_clients_use_but_none_of_a_gate(server, tmp_path):
    _, text = server.make("router")
    with pytest.raises(ConfigError, match="is for a router, not for a node"):
        server.join(tmp_path / "x", text)
    _, text = server.make("router", name="front")
    held = joining.credential(str(tmp_path / "r"), "router", [server.url], join.read(text), JoinRequest(
        "r", names=("api.example", "127.0.0.1", f"x.{join.GATE_DOMAIN}")), stop=lambda: True)
    assert held.name == "front"
    assert {"api.example", "127.0.0.1"} < names_of(with_key(held), held.fleet_ca)
    assert f"x.{join.GATE_DOMAIN}" not in names_of(with_key(held), held.fleet_ca)
    router = StandInRouter(server, "r")
    router.client = server.client(token=held.token)
    until(lambda: router.poll() is not None)
    assert router.table.ca == held.fleet_ca
    with pytest.raises(ApiError, match="this is the credential of front"):
        router.report()


def test_a_revoked_node_is_refused_at_once_and_leaves_the_routing_table(server, tmp_path):
    _, text = server.make(uses=2)
    held = server.join(tmp_path / "a", text, "doomed")
    node, router = StandInNode(server, held.name), StandInRouter(server)
    node.client = server.client(token=held.token)

    def routed():
        with contextlib.suppress(ApiError):
            node.beat()
        return [row for model in router.poll().models for row in model.replicas if row.node == held.name]
    row = until(routed, "a replica of the node in the routing table")[0]
    assert row.tls_name == held.tls_name
    server.client().json("POST", paths.fill(paths.REVOKE_NODE, node=held.name), {})
    with pytest.raises(ApiError, match="was revoked") as caught:
        node.beat()
    assert caught.value.status == 401
    with pytest.raises(ApiError, match="was revoked"):
        node.client.json("POST", paths.CERTIFICATE, {})
    until(lambda: not routed(), "its leaving the table")
    again = server.join(tmp_path / "b", text, "doomed")             # the name is free, the certificate is another's
    assert again.name == "doomed" and again.tls_name != held.tls_name
    with pytest.raises(ApiError, match="no such node"):
        server.client().json("POST", paths.fill(paths.REVOKE_NODE, node="nobody"), {})


def test_tokens_for_people_open_their_role_until_they_are_revoked(server):
    view, secret = server.make("viewer", name="wall")
    reader = server.client(token=Secret(secret))
    assert "items" in reader.json("GET", paths.NODES)
    with pytest.raises(ApiError, match="does not open"):
        reader.json("GET", paths.TOKENS)
    server.client().json("DELETE", paths.fill(paths.TOKEN, token=view["id"]))
    with pytest.raises(ApiError, match="was revoked"):
        reader.json("GET", paths.NODES)


@pytest.mark.parametrize("body, words", [
    ({"role": "infer", "ttl_seconds": 5}, "no such role"), ({"role": "node"}, "ttl_seconds"),
    ({"role": "node", "ttl_seconds": 0}, "lives from 1 second"), ({"role": "node", "ttl_seconds": 1e9}, "lives from"),
    ({"role": "node", "ttl_seconds": 5, "uses": 0}, "1 to 10000 uses"), ({"ttl_seconds": 5}, "needs a role"),
    ({"role": "node", "ttl_seconds": 5, "uses": True}, "whole number"), ({"role": "node", "ttl_seconds": 5, "name": "-x"}, "not allowed"),
])
def test_a_wish_that_makes_no_sense_is_refused(server, body, words):
    with pytest.raises(ApiError, match=words):
        server.client().json("POST", paths.TOKENS, body)


def test_the_servers_own_tokens_cannot_be_revoked_by_mistake(server):
    own = (server.data / "tokens" / "admin").read_text().split("_")[2]
    with pytest.raises(ApiError, match="the server's own token"):
        server.client().json("DELETE", paths.fill(paths.TOKEN, token=own))


def test_what_was_made_is_still_there_after_a_restart(tmp_path):
    running = TlsServer(tmp_path, CONFIG).start()
    _, text = running.make()
    held = running.join(tmp_path / "a", text)
    before = running.ca_pem
    running.stop()
    running.start()
    assert running.ca_pem == before
    node = StandInNode(running, held.name)
    node.client = running.client(token=held.token)
    node.beat()
    running.stop()
    kept = b"".join(path.read_bytes() for path in running.data.rglob("*") if path.is_file())
    for secret in (held.token.reveal(), text, join.read(text).secret.reveal(), held.key.reveal().split("\n")[1]):
        assert secret not in running.log.read_text() and secret.encode() not in kept


@pytest.mark.slow
@pytest.mark.parametrize("place", ["tls-ca-before-rename", "tls-certificate-before-names", "write-atomic-before-rename"])
def test_a_kill_while_certificates_are_made_is_repaired_by_the_next_start(tmp_path, place):
    running = TlsServer(tmp_path, CONFIG)
    with pytest.raises(AssertionError):
        running.start(LLMGW_FAILPOINT=f"{place}:kill")
    running.start()
    with HttpClient(running.url, ca_pem=running.ca_pem).stream("GET", "/healthz") as answer:
        assert answer.status == 200
    assert not [path for path in (running.data / "tls").iterdir() if path.name.startswith(".making")]
    running.stop()


def test_the_operators_own_certificate_is_shown_and_pinned(tmp_path):
    ca = TestCa(tmp_path / "ca")
    certificate, key = ca.certificate("127.0.0.1", "localhost")
    running = TlsServer(tmp_path, CONFIG + f"tls: {{certificate: {certificate}, key: {key}, ca: {ca.files[0]}}}\n").start()
    assert running.ca_pem.split() == ca.pem.split()
    _, text = running.make()
    assert running.join(tmp_path / "a", text).name == "n"
    running.stop()


def test_a_loopback_server_makes_no_join_strings_and_says_why(tmp_path):
    running = RunningServer(tmp_path, CONFIG).start()
    with pytest.raises(ApiError, match="listens on loopback"):
        running.client().json("POST", paths.TOKENS, {"role": "node", "ttl_seconds": 60})
    assert running.client().json("POST", paths.TOKENS, {"role": "viewer", "ttl_seconds": 60})["secret"]
    running.stop()
    assert not (running.data / "tls").exists()


def test_a_missing_openssl_stops_the_start_with_the_packages_name(tmp_path):
    import subprocess
    running = TlsServer(tmp_path, CONFIG)
    python = pathlib.Path(running.command()[0])
    (tmp_path / "bin").mkdir()
    code = "import sys; from llmgw.system import openssl; openssl._path = lambda: '/none'; " \
           "from llmgw.cli import main; main(sys.argv[1:])"
    ended = subprocess.run([str(python), "-c", code, *running.command()[5:]], capture_output=True, text=True,
                           timeout=DEADLINE, env=dict(os.environ))
    assert ended.returncode == 1 and "install the package openssl" in ended.stderr, ended.stderr
