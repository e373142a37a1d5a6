"""Machines that joined with the printed line: TLS everywhere, a real engine, a real model, and the end of a node."""
from __future__ import annotations

import json
import os
import pathlib
import re
import socket
import ssl
import subprocess

import openai
import pytest

from llmgw.domain import join
from llmgw.system import addresses
from llmgw.system.http_client import HttpClient
from tests.whole.cluster import MODEL, SERVER_YAML, Cluster, free_block, processes_of, until

pytestmark = pytest.mark.slow
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ASK = {"model": MODEL, "messages": QUESTION, "temperature": 0, "stop": ["\n"], "max_tokens": 16}
CANARY = "a-prompt-that-nobody-may-log"


class Joined(Cluster):
    """The server listens on every address; node and router know nothing but their line."""

    def __init__(self, pyz, folder, template):
        super().__init__(pyz, folder, template)
        self.host = next((item for item in addresses.own_addresses() if ":" not in item), "127.0.0.1")
        self.config.write_text(SERVER_YAML.replace("127.0.0.1:0", "0.0.0.0:0") + f"names: [{self.host}]\n")
        self.secrets = {"prompt": CANARY}

    def start_server(self):
        super().start_server()
        self.env["LLMGW_CA"] = self.server["ca_file"]

    def line(self, role):
        """Return the printed line for one more machine."""
        text = self.ctl("token", "create", "--role", role).strip()
        self.secrets[f"join string of {role}"] = re.search(r"llmgw1\.[A-Za-z0-9._-]+", text).group(0)
        assert text.count("\n") == 0 and len(text.split(" && ")) == 3 and "|" not in text.replace("| sha256sum -c -", "")
        return text

    def run_line(self, name, line, *more):
        """Run a line as printed, in a folder of its own; words are only added at its end."""
        place = self.folder / f"{name}-machine"
        place.mkdir()
        with open(self.log(name), "ab") as log:
            self.children[name] = subprocess.Popen(
                ["sh", "-c", " ".join([line.replace("sh ./llmgw.pyz", "exec sh ./llmgw.pyz"), *map(str, more)])],
                env={key: value for key, value in self.env.items() if key != "LLMGW_CA"},
                cwd=str(place), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        return place


@pytest.fixture(scope="module")
def cluster(pyz, llama_archive, gemma, qa_template, tmp_path_factory):
    made = Joined(pyz, tmp_path_factory.mktemp("joined"), qa_template)
    try:
        made.start_server()
        ports = free_block(16)
        made.run_line("node-1", made.line("node"), "--node", "node-1", "--data-dir", made.dir("node-1"),
                      "--gate-port", ports, "--engine-ports", ports + 1, "--owned")
        made.run_line("router", made.line("router").replace("0.0.0.0:7801", "0.0.0.0:0"), "--data-dir", made.dir("router"))
        made.router = made.endpoint("router")
        made.ctl("mirror", "import-engine", llama_archive.path, "--sha256", llama_archive.sha256)
        made.ctl("mirror", "import", gemma, "--name", MODEL)
        made.wait_ready()
        made.key = json.loads(made.ctl("keys", "create", "test", "--json"))["secret"]
        made.secrets["user's key"] = made.key
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def client(cluster):
    """A client that trusts only the CA that the router names."""
    with pytest.MonkeyPatch.context() as patch, openai.OpenAI(
            base_url=cluster.router["url"] + "/v1", api_key=cluster.key, max_retries=0, timeout=5) as stranger:
        with pytest.raises(openai.APIConnectionError):
            stranger.models.list()
        patch.setenv("SSL_CERT_FILE", cluster.router["ca_file"])
        made = openai.OpenAI(base_url=cluster.router["url"] + "/v1", api_key=cluster.key, max_retries=0, timeout=120)
    with made:
        def knows():
            try:
                return MODEL in [model.id for model in made.models.list()]
            except openai.APIStatusError:
                return False
        until("the router knows the key and the model", knows)
        yield made


def test_the_printed_lines_end_in_a_node_that_is_ready_and_says_where_it_is(cluster):
    node, = cluster.items("nodes")
    assert (node["name"], node["state"], node["identity"]["address"]) == ("node-1", "ready", cluster.host)
    assert cluster.server["url"].startswith("https://") and cluster.router["url"].startswith("https://")


def test_the_real_model_answers_through_three_hops_of_tls(client):
    assert "Paris" in client.chat.completions.create(**ASK).choices[0].message.content
    text = "".join(piece.choices[0].delta.content or "" for piece in client.chat.completions.create(**ASK, stream=True)
                   if piece.choices)
    assert "Paris" in text
    client.chat.completions.create(**{**ASK, "messages": [{"role": "user", "content": CANARY}]})


def test_the_gate_shows_its_own_name_and_refuses_plain_http(cluster):
    table = json.loads((cluster.dir("router") / "table.json").read_text())
    replica = table["models"][0]["replicas"][0]
    assert replica["tls_name"].endswith(join.GATE_DOMAIN) and replica["host"] == cluster.host
    trust = ssl.create_default_context(cadata=table["ca"])
    with socket.create_connection((replica["host"], replica["port"]), 60) as plain, trust.wrap_socket(
            plain, server_hostname=replica["tls_name"]) as gate:
        assert gate.version() in ("TLSv1.2", "TLSv1.3")
    with socket.create_connection((replica["host"], replica["port"]), 60) as plain, pytest.raises(
            ssl.SSLCertVerificationError):
        trust.wrap_socket(plain, server_hostname=replica["host"])
    with HttpClient(f"http://{replica['host']}:{replica['port']}").stream("GET", "/healthz") as answer:
        assert (answer.status, answer.read(100)) == (400, b"this port speaks TLS: use https://\n")


def test_started_again_node_and_router_need_nothing_but_their_folders(cluster, client):
    before = (cluster.dir("node-1") / "state" / "credential.json").read_bytes()
    port = cluster.router["url"].rpartition(":")[2]
    cluster.stop("router")
    cluster.start("router", "router", "--data-dir", cluster.dir("router"), "--listen", f"0.0.0.0:{port}")
    cluster.endpoint("router")
    assert (cluster.dir("node-1") / "state" / "credential.json").read_bytes() == before
    until("it answers again", lambda: "Paris" in client.chat.completions.create(**ASK).choices[0].message.content)


def test_ctl_elsewhere_needs_the_pin_only(cluster):
    pin = cluster.secrets["join string of node"].split(".")[1]
    named = {**cluster.env, "LLMGW_CA": f"sha256:{pin}"}
    for env, code in ((named, 0), ({**named, "LLMGW_CA": "sha256:" + "A" * 43}, 1), (
            {key: value for key, value in named.items() if key != "LLMGW_CA"}, 1)):
        done = subprocess.run([*_ctl(cluster), "nodes", "--server", f"https://{cluster.host}:"
                               f"{cluster.server['url'].rpartition(':')[2]}", "--token-file", str(cluster.token("admin"))],
                              env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == code, done.stderr


def test_a_wrong_hash_in_the_line_runs_nothing(cluster):
    line = re.sub(r"echo '[0-9a-f]{8}", "echo '00000000", cluster.line("node"))
    place = cluster.run_line("wrong", line)
    child = cluster.children.pop("wrong")
    assert child.wait(120) != 0 and sorted(item.name for item in place.iterdir()) == ["llmgw.pyz"]
    assert "FAILED" in cluster.log("wrong").read_text()


def test_a_wrong_pin_in_the_line_loads_nothing(cluster):
    line = re.sub(r"sha256//[A-Za-z0-9+/]{8}", "sha256//AAAAAAAA", cluster.line("node"))
    place = cluster.run_line("mitm", line)
    child = cluster.children.pop("mitm")
    assert child.wait(120) == 90 and not [item for item in place.iterdir() if item.stat().st_size]


def test_no_secret_is_in_a_log_or_a_command_line(cluster, client):
    for path in cluster.folder.rglob("credential.json"):
        held = json.loads(path.read_text())
        cluster.secrets[f"token of {path}"] = held["token"]
        cluster.secrets[f"key of {path}"] = held["key"].split("\n")[1]
        assert path.stat().st_mode & 0o077 == 0
    for role in ("admin", "viewer", "node", "router"):
        cluster.secrets[role] = cluster.token(role).read_text().strip()
    words = "\n".join(processes_of(cluster.folder).values())
    logs = {path: path.read_bytes() for path in cluster.folder.rglob("*.log")}
    assert len(logs) >= 5
    for what, secret in cluster.secrets.items():
        assert secret not in words, f"{what} is in a command line"
        for path, log in logs.items():
            assert secret.encode() not in log, f"{what} is in {path}"


def test_a_revoked_node_gets_no_new_request_and_says_how_to_join_again(cluster, client):
    """The last one: the node is lost by it."""
    cluster.ctl("nodes", "revoke", "node-1")

    def refused():
        try:
            client.chat.completions.create(**ASK)
        except openai.APIStatusError as error:
            return error.status_code == 503
        return False
    until("no request reaches it", refused, 60)
    until("the agent says so", lambda: "llmgw.pyz ctl token create" in cluster.log("node-1").read_text(), 60)
    assert cluster.children["node-1"].poll() is None


def _ctl(cluster):
    import sys
    return [sys.executable, "-I", cluster.pyz, "ctl"]


def test_where_the_file_is_loaded_from_is_no_secret_and_nothing_else_is_open(cluster):
    answer = subprocess.run(["curl", "-sk", "-o", os.devnull, "-w", "%{http_code}", cluster.server["url"] + "/v1/nodes"],
                            capture_output=True, text=True, timeout=60)
    assert answer.stdout == "401" and pathlib.Path(cluster.pyz).exists()
