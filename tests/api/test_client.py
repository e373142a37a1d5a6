"""The control client against real sockets."""
import http.server
import json
import socket
import threading

import pytest

from llmgw.api import paths, wire
from llmgw.api.client import ControlClient
from llmgw.domain.errors import ApiError, ConfigError, ParseError, Unreachable
from llmgw.domain.secret import Secret
from llmgw.domain.view import EventView


class Answers(http.server.BaseHTTPRequestHandler):
    """Says what ``server.answers[path]`` holds: (status, headers, body)."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self):
        length = int(self.headers.get("Content-Length") or 0)
        self.server.seen.append((self.command, self.path, dict(self.headers), self.rfile.read(length)))
        status, headers, body = self.server.answers[self.path]
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = self.close_connection or self.server.closing

    do_POST = do_GET

    def log_message(self, *unused):
        pass


@pytest.fixture
def server():
    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    made.daemon_threads = True
    made.answers, made.seen, made.closing = {}, [], False
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


@pytest.fixture
def client():
    made = []

    def make(*servers, timeout=20.0):
        return made_of([f"http://127.0.0.1:{item.server_port}" for item in servers], timeout)

    def made_of(urls, timeout=20.0):
        made.append(ControlClient(urls, Secret("hush"), timeout=timeout))
        return made[-1]

    make.of = made_of
    yield make
    for item in made:
        item.close()


def test_a_call_sends_the_token_and_returns_the_value(server, client):
    event = EventView(1, 2.0, "node/a", "Ready", "it is ready")
    server.answers["/v1/events"] = (200, {}, wire.dumps(wire.EVENT_VIEW, event))

    assert client(server).call("GET", "/v1/events", receive=wire.EVENT_VIEW) == event
    assert server.seen[0][2]["Authorization"] == "Bearer hush"


def test_a_refusal_carries_the_servers_own_words(server, client):
    body = json.dumps({"reason": "Conflict", "message": "in use by m-1", "hint": "stop it"}).encode()
    server.answers["/x"] = (409, {}, body)

    with pytest.raises(ApiError) as refused:
        client(server).json("POST", "/x", {"a": 1})

    assert (refused.value.status, refused.value.reason, refused.value.message, refused.value.hint) == (
        409, "Conflict", "in use by m-1", "stop it")
    assert server.seen[0][3] == b'{"a":1}'


def test_a_refusal_without_our_shape_still_names_path_and_status(server, client):
    server.answers["/x"] = (502, {}, b"<html>proxy</html>")

    with pytest.raises(ApiError, match=r"/x: HTTP 502"):
        client(server).json("GET", "/x")


def test_a_connection_is_kept_and_a_closed_one_is_replaced(server, client):
    server.answers["/x"] = (200, {}, b"{}")
    calls = client(server)
    server.closing = True                       # the server closes without saying so
    for _ in range(3):
        calls.json("GET", "/x")

    assert len(server.seen) == 3


def test_a_body_that_stops_early_is_no_answer(server, client):
    server.answers["/x"] = (200, {"Content-Length": "100"}, b'{"half": ')
    server.closing = True

    with pytest.raises(Unreachable, match="cut off"):
        client(server).json("GET", "/x")


def test_a_silent_server_is_given_up_at_the_deadline(client):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        calls = client.of([f"http://127.0.0.1:{silent.getsockname()[1]}"], 0.5)
        with pytest.raises(Unreachable, match="no answer in time"):
            calls.json("GET", "/x")


def test_a_server_that_drips_is_given_up_at_the_deadline(client):
    """A timeout per socket call alone would wait for ever."""
    def drip(listener, stop):
        peer, _ = listener.accept()
        with peer:
            peer.recv(65536)
            peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
            while not stop.wait(0.05):
                try:
                    peer.sendall(b"x")
                except OSError:
                    return

    with socket.create_server(("127.0.0.1", 0)) as listener:
        stop = threading.Event()
        thread = threading.Thread(target=drip, args=(listener, stop), daemon=True)
        thread.start()
        calls = client.of([f"http://127.0.0.1:{listener.getsockname()[1]}"], 0.6)
        with pytest.raises(Unreachable, match="no answer in time"):
            calls.json("GET", "/x")
        stop.set()
        thread.join(20)


def test_the_next_control_plane_is_tried_and_kept(server, client):
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    server.answers["/x"] = (200, {}, b"{}")
    calls = client.of([f"http://127.0.0.1:{port}", f"http://127.0.0.1:{server.server_port}"])

    calls.json("GET", "/x")

    assert calls.url.endswith(str(server.server_port))


def test_a_standby_is_passed_over(server, client):
    server.answers["/x"] = (503, {"X-Llmgw-Leader": "http://127.0.0.1:1"}, b"{}")

    with pytest.raises(Unreachable, match="standby"):
        client(server).json("GET", "/x")


def test_lists_are_decoded_item_by_item(server, client):
    server.answers["/v1/events"] = (200, {}, b'{"items": [{"id": 1}]}')

    with pytest.raises(ParseError, match=r"/v1/events\[0\]"):
        client(server).items("/v1/events", wire.EVENT_VIEW)


def test_a_stream_that_is_cut_says_how_much_is_missing(server, client):
    server.answers["/blob"] = (200, {"Content-Length": "10"}, b"12345")
    server.closing = True
    with client(server).stream("/blob") as stream:
        assert stream.read(5) == b"12345"
        with pytest.raises(Unreachable, match="5 bytes early"):
            stream.read(5)


@pytest.mark.parametrize("url", ["localhost:7800", "ftp://x", "http://", "http://h/path"])
def test_what_is_no_server_address_is_refused(url):
    with pytest.raises(ConfigError):
        ControlClient([url], Secret("k"))


def test_every_segment_of_a_path_is_encoded():
    assert paths.fill(paths.MIRROR_MODEL, model="org/name:x y") == "/v1/mirror/models/org%2Fname%3Ax%20y"
