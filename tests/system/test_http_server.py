"""The control API's server, fed by raw sockets."""
from __future__ import annotations

import errno
import json
import logging
import os
import socket
import threading
import time

import pytest

from llmgw.domain.errors import ConfigError, Conflict, PortTaken
from llmgw.system import attempts
from llmgw.system.http_client import HttpClient
from llmgw.system.http_server import HttpServer
from llmgw.system.routes import Caller, Response, Route, RouteTable, json_response

DEADLINE = 30.0


def echo(request):
    return json_response({"body": request.body.decode(), "args": dict(request.args), "role": request.caller.role,
                          "query": dict(request.query)})


def broken(request):
    raise RuntimeError("boom")


def read_only(request):
    raise OSError(errno.EROFS, os.strerror(errno.EROFS), "/data/blob")


def conflict(request):
    raise Conflict("it changed", hint="read it again")


def depth(request):
    return json_response({"ok": bool(request.json())})


@pytest.fixture
def blob(tmp_path):
    path = tmp_path / "blob"
    path.write_bytes(os.urandom(3 << 20))
    return path


@pytest.fixture
def server(blob):
    release, begun = threading.Event(), threading.Event()

    def slow(request):
        begun.set()
        release.wait(DEADLINE)
        return json_response({"slow": True})

    table = RouteTable([
        Route("GET", "/healthz", ("public",), echo),
        Route("GET", "/v1/things/{thing}", ("admin", "viewer"), echo),
        Route("POST", "/v1/things/{thing}", ("admin",), echo, body_bytes=1 << 20),
        Route("GET", "/v1/broken", ("admin",), broken),
        Route("GET", "/v1/read-only", ("admin",), read_only),
        Route("GET", "/v1/conflict", ("admin",), conflict),
        Route("GET", "/v1/slow", ("admin",), slow),
        Route("POST", "/v1/json", ("admin",), depth),
        Route("GET", "/v1/blob", ("admin",), lambda request: Response(
            file=open(blob, "rb"), content_type="application/octet-stream", etag="abc")),
        Route("GET", "/v1/pieces", ("admin",), lambda request: Response(pieces=iter([b"one", b"", b"two"]))),
        Route("GET", "/v1/nobody", (), echo),
    ], lambda token: Caller(token) if token in ("admin", "viewer") else None)
    server = HttpServer("127.0.0.1", 0, table, max_connections=50)
    server.release, server.begun = release, begun
    server.start()
    yield server
    release.set()
    server.stop()


def talk(server, data, *, close=False):
    """Send bytes and return everything that comes until the server closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE) as sock:
        sock.sendall(data)
        if close:
            sock.shutdown(socket.SHUT_WR)
        answer = b""
        while True:
            try:
                piece = sock.recv(1 << 16)
            except ConnectionResetError:
                return answer
            if not piece:
                return answer
            answer += piece


def head(method="GET", target="/healthz", *lines, host="127.0.0.1", token="admin", version="1.1"):
    text = [f"{method} {target} HTTP/{version}", f"Host: {host}", "Connection: close"]
    if token:
        text.append(f"Authorization: Bearer {token}")
    return "\r\n".join([*text, *lines, "", ""]).encode()


def status(answer):
    return int(answer.split(b" ", 2)[1])


def test_a_public_route_answers_without_a_token(server):
    assert status(talk(server, head(token=""))) == 200


@pytest.mark.parametrize("data", [
    b"GET /healthz HTTP/1.1\r\n\r\n",
    b"GET /healthz HTTP/1.1\nHost: 127.0.0.1\n\n\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\nX: 1\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\nHost: a/v2?x=\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer a\r\nAuthorization: Bearer b\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\nHost : 127.0.0.1\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX: a\r\n folded\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\nContent-Length: 0\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: +5\r\n\r\nhello",
    b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 5_0\r\n\r\nhello",
    b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -1\r\n\r\nhello",
    b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1, 1\r\n\r\nhello",
    b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1234567890123456\r\n\r\n",
    b"POST /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"GET  /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"get /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"POST_sigterm /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET http://evil/healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET /healthz HTTP/2.0\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET /healthz\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"X: 1\r\n" * 101 + b"\r\n",
    b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"a" * (33 << 10) + b"\r\n\r\n",
], ids=range(26))
def test_a_head_that_could_be_read_in_two_ways_is_a_400_and_the_connection_ends(server, data):
    answer = talk(server, data + b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    assert status(answer) == 400
    assert answer.count(b"HTTP/1.1 ") == 1
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["reason"] == "Malformed"


def test_roles_open_only_their_routes(server):
    assert status(talk(server, head("GET", "/v1/things/a", token=""))) == 401
    assert status(talk(server, head("GET", "/v1/things/a", token="wrong"))) == 401
    assert status(talk(server, head("GET", "/v1/things/a", token="viewer"))) == 200
    assert status(talk(server, head("POST", "/v1/things/a", token="viewer"))) == 403
    assert status(talk(server, head("GET", "/v1/nobody", token="admin"))) == 403


def test_an_unknown_path_is_told_only_to_somebody_with_a_token(server):
    assert status(talk(server, head("GET", "/v1/unknown", token=""))) == 401
    assert status(talk(server, head("GET", "/v1/unknown", token="viewer"))) == 404
    assert status(talk(server, head("DELETE", "/v1/things/a", token="viewer"))) == 405


def test_segments_are_decoded_once_and_slashes_stay_inside(server):
    answer = talk(server, head("GET", "/v1/things/a%2Fb%252F?x=1"))
    body = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert body["args"] == {"thing": "a/b%2F"} and body["query"] == {"x": "1"}
    assert status(talk(server, head("GET", "/v1/things/%ff"))) == 400
    assert status(talk(server, head("GET", "/v1/things/a?x=1&x=2"))) == 400


def test_our_errors_carry_reason_message_and_hint(server):
    answer = talk(server, head("GET", "/v1/conflict"))
    assert status(answer) == 409
    assert json.loads(answer.partition(b"\r\n\r\n")[2]) == {
        "reason": "Conflict", "message": "it changed", "hint": "read it again"}


def test_a_bug_is_a_500_and_its_traceback_is_only_in_the_log(server, caplog):
    with caplog.at_level(logging.ERROR):
        answer = talk(server, head("GET", "/v1/broken"))
    assert status(answer) == 500
    assert b"boom" not in answer
    assert "boom" in caplog.text


def test_a_disk_s_error_in_a_handler_is_told_and_does_not_look_like_a_client_that_left(server, caplog):
    with caplog.at_level(logging.ERROR):
        answer = talk(server, head("GET", "/v1/read-only"))
    assert status(answer) == 503 and b"cannot use /data/blob: the filesystem is read-only" in answer
    assert "was not translated: GET /v1/read-only" in caplog.text


def test_a_body_over_the_cap_is_refused_before_it_is_read(server):
    started = time.monotonic()
    answer = talk(server, head("POST", "/v1/things/a", f"Content-Length: {100 << 20}"))
    assert status(answer) == 413
    assert time.monotonic() - started < 10


def test_a_body_without_permission_is_never_read(server):
    answer = talk(server, head("POST", "/v1/things/a", "Content-Length: 9", token="viewer") + b"x" * 9)
    assert status(answer) == 403


def test_a_deep_body_is_refused_and_the_server_lives(server):
    for body in (b"[" * 200_000, b'{"a":' * 200_000, b'["' + b"[" * 100 + b'", ' + b"[" * 100):
        request = head("POST", "/v1/json", f"Content-Length: {len(body)}")
        assert status(talk(server, request + body)) == 400
    body = b'["' + b"[{" * 1000 + b'\\"[[["]'
    assert status(talk(server, head("POST", "/v1/json", f"Content-Length: {len(body)}") + body)) == 200


def test_a_cut_body_is_no_request(server):
    answer = talk(server, head("POST", "/v1/things/a", "Content-Length: 9") + b"xxx", close=True)
    assert answer == b""


def test_requests_follow_each_other_on_one_connection(server):
    one = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    post = (b"POST /v1/things/a HTTP/1.1\r\nHost: localhost:99\r\nAuthorization: Bearer admin\r\n"
            b"Content-Length: 5\r\n\r\nhello")
    answer = talk(server, one + post + head())
    assert answer.count(b"HTTP/1.1 200 OK") == 3
    assert b'"body":"hello"' in answer


def test_keep_alive_answers_do_not_stall(server):
    client = HttpClient(server.url)
    client.request("GET", "/healthz")
    seconds = []
    for _ in range(50):
        started = time.monotonic()
        assert client.request("GET", "/healthz").status == 200
        seconds.append(time.monotonic() - started)
    client.close()
    assert sorted(seconds)[10] < 0.035               # Nagle and delayed ACK would hold up each for 44 ms


def test_curl_s_expectation_is_answered_before_the_body(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE) as sock:
        sock.sendall(head("POST", "/v1/things/a", "Content-Length: 2", "Expect: 100-continue"))
        assert sock.recv(1000).startswith(b"HTTP/1.1 100 ")
        sock.sendall(b"hi")
        assert b'"body":"hi"' in sock.recv(10000)


def test_a_foreign_host_name_and_a_foreign_page_are_refused(server):
    assert status(talk(server, head(host="evil.example"))) == 421
    assert status(talk(server, head(host="192.168.1.1:7800"))) == 200
    assert status(talk(server, head("POST", "/v1/things/a", "Origin: http://evil.example"))) == 403
    assert status(talk(server, head("POST", "/v1/things/a", "Origin: http://127.0.0.1"))) == 200


def test_a_file_is_sent_whole_in_part_or_not_again(server, blob):
    client, admin = HttpClient(server.url), {"Authorization": "Bearer admin"}
    data = blob.read_bytes()
    assert client.request("GET", "/v1/blob", headers=admin).body == data
    part = client.request("GET", "/v1/blob", headers={**admin, "Range": "bytes=1000000-1000009"})
    assert (part.status, part.body) == (206, data[1000000:1000010])
    assert part.headers["content-range"] == f"bytes 1000000-1000009/{len(data)}"
    rest = client.request("GET", "/v1/blob", headers={**admin, "Range": "bytes=3000000-", "If-Range": '"abc"'})
    assert (rest.status, rest.body) == (206, data[3000000:])
    tail = client.request("GET", "/v1/blob", headers={**admin, "Range": "bytes=-7"})
    assert (tail.status, tail.body) == (206, data[-7:])
    other = client.request("GET", "/v1/blob", headers={**admin, "Range": "bytes=5-", "If-Range": '"old"'})
    assert other.status == 200
    assert client.request("GET", "/v1/blob", headers={**admin, "If-None-Match": '"abc"'}).status == 304
    outside = client.request("GET", "/v1/blob", headers={**admin, "Range": f"bytes={len(data)}-"})
    assert outside.status == 416
    several = client.request("GET", "/v1/blob", headers={**admin, "Range": "bytes=0-1,4-5"})
    assert several.status == 200
    client.close()


def test_pieces_are_chunked(server):
    client = HttpClient(server.url)
    answer = client.request("GET", "/v1/pieces", headers={"Authorization": "Bearer admin"})
    client.close()
    assert answer.body == b"onetwo"
    old = talk(server, head("GET", "/v1/pieces", version="1.0"))
    assert old.endswith(b"\r\n\r\nonetwo")


def test_silent_peers_do_not_hold_up_others(server):
    silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(40)]
    try:
        started = time.monotonic()
        assert status(talk(server, head())) == 200
        assert time.monotonic() - started < 5
    finally:
        for sock in silent:
            sock.close()


def test_beyond_the_most_connections_there_is_a_503(server):
    held = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(50)]
    try:
        deadline = time.monotonic() + DEADLINE
        while server.connections < 50:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE) as sock:
            assert status(sock.recv(1000)) == 503
    finally:
        for sock in held:
            sock.close()


def test_stop_lets_a_running_request_finish_and_ends_idle_connections(server):
    idle = socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(talk(server, head("GET", "/v1/slow"))))
    thread.start()
    assert server.begun.wait(DEADLINE)          # connected is not enough: until its request is read it is idle too
    deadline = time.monotonic() + DEADLINE
    while server.connections < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    stopper = threading.Thread(target=server.stop, args=(DEADLINE,))
    stopper.start()
    assert idle.recv(10) == b""
    server.release.set()
    thread.join(DEADLINE)
    stopper.join(DEADLINE)
    idle.close()
    assert status(answers[0]) == 200


def test_a_taken_port_is_a_sentence(server):
    with pytest.raises(PortTaken, match=f"127.0.0.1:{server.port}: another program listens there"):
        HttpServer("127.0.0.1", server.port, RouteTable([], lambda token: None))


def test_wrong_tokens_are_slowed_down_and_right_ones_never(server, monkeypatch, caplog):
    monkeypatch.setattr(attempts, "MOST_ON_LOOPBACK", 5)
    wrong = (b"GET /v1/things/a HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer nobody-canary\r\n"
             b"Connection: close\r\n\r\n")
    assert [status(talk(server, wrong)) for _ in range(8)] == [401] * 5 + [429] * 3
    assert b"Retry-After: " in talk(server, wrong)
    assert status(talk(server, wrong.replace(b"nobody-canary", b"admin"))) == 200
    assert status(talk(server, wrong.replace(b"Authorization: Bearer nobody-canary\r\n", b""))) == 401
    assert caplog.text.count("many wrong tokens from=127.0.0.1") == 1 and "canary" not in caplog.text


def test_attempts_are_counted_per_network_and_minute():
    now = [0.0]
    counted = attempts.FailedAttempts(lambda: now[0])
    assert [counted.count(f"10.0.0.{number}") for number in range(12)] == [0] * 10 + [1, 2]
    assert counted.count("::ffff:10.0.0.1") == 3 and counted.count("10.0.1.1") == 0
    assert [counted.count(f"2001:db8::{number}") for number in range(11)][-1] == 1
    assert counted.count("2001:db8:1::1") == 0
    now[0] = 61.0
    assert counted.count("10.0.0.1") == 0
    for number in range(attempts.REMEMBERED + 10):
        counted.count(f"10.{number >> 8}.{number & 255}.1")
    assert len(counted._seen) == attempts.REMEMBERED


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org", ""])
def test_off_loopback_nothing_listens_without_tls(host):
    with pytest.raises(ConfigError, match="with TLS only"):
        HttpServer(host, 7800, RouteTable([], lambda token: None))
