"""The internet as it is: proxies, portals, loops, limits, drips."""
from __future__ import annotations

import socket
import threading
import time

import pytest

from llmgw.domain.errors import ConfigError, DownloadFailed, NotFound, ParseError, Unauthorized, Unreachable
from llmgw.system import internet
from llmgw.system.internet import Internet, RateLimited, WebPage, bypasses
from tests.fakes.web import FakeWeb, Reply

JSON = {"Content-Type": "application/json"}


def serve(replies):
    return FakeWeb(lambda path, headers: replies[path] if isinstance(replies, dict) else replies)


def client(url, **options):
    return Internet(url, proxies={}, no_proxy="", **options)


def test_an_answer_is_read_whole():
    with serve(Reply(200, b'{"a": 1}', JSON)) as web:
        found = client(web.url)
        assert found.get_json(web.url + "/x") == {"a": 1}
        assert web.requests[0]["user-agent"].startswith("llmgw/")


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_followed(status):
    with serve({"/a": Reply(status, headers={"Location": "/b"}), "/b": Reply(200, b"x")}) as web:
        assert client(web.url).get(web.url + "/a").body == b"x"


def test_a_redirect_loop_ends():
    with serve({"/a": Reply(302, headers={"Location": "/b"}), "/b": Reply(302, headers={"Location": "/a"})}) as web:
        with pytest.raises(DownloadFailed, match="more than 6 redirects"):
            client(web.url).get(web.url + "/a")
        assert len(web.requests) == internet.MAX_REDIRECTS + 1


@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://x/y", "gopher://x", "http://a b/"])
def test_a_redirect_to_something_else_than_http_is_refused(target):
    with serve(Reply(302, headers={"Location": target})) as web, pytest.raises(DownloadFailed, match="a redirect to"):
        client(web.url).get(web.url + "/a")


@pytest.mark.parametrize("old, new, words", [
    ("https://a.example/x", "http://a.example/x", "without TLS"),
    ("https://a.example/x", "https://169.254.169.254/latest", "into the local network"),
    ("https://a.example/x", "https://127.0.0.1:22/", "into the local network"),
    ("https://a.example/x", "https://[::1]/", "into the local network"),
    ("https://a.example/x", "https://localhost/", "into the local network")])
def test_a_redirect_that_leaves_tls_or_climbs_in_is_refused(old, new, words):
    with pytest.raises(DownloadFailed, match=words):
        client("https://a.example")._next(old, new)


def test_a_token_stays_with_its_origin(tmp_path):
    (tmp_path / "t").write_text("secret\n")
    with serve(Reply(200, b"x")) as other, serve({"/a": Reply(302, headers={"Location": "/b"}),
                                                  "/b": Reply(307, headers={"Location": other.url + "/c"})}) as web:
        client(web.url, token_file=str(tmp_path / "t")).get(web.url + "/a")
        assert [request.get("authorization") for request in web.requests] == ["Bearer secret"] * 2
        assert [request.get("authorization") for request in other.requests] == [None]


@pytest.mark.parametrize("content", ["", "two words", "a\nb", "\x00"])
def test_a_token_file_without_a_token_is_refused(tmp_path, content):
    (tmp_path / "t").write_text(content)
    with pytest.raises(ConfigError, match="holds no token"):
        client("http://127.0.0.1:1", token_file=str(tmp_path / "t")).get("http://127.0.0.1:1/")


def test_a_captive_portal_is_named():
    with serve(Reply(200, b"<html>", {"Content-Type": "Text/HTML; charset=x"})) as web:
        with pytest.raises(WebPage, match="answered with a web page instead of data"):
            client(web.url).get(web.url + "/x")


@pytest.mark.parametrize("status, headers, error", [
    (401, {}, Unauthorized), (403, {}, Unauthorized), (404, {}, NotFound), (410, {}, NotFound), (407, {}, Unreachable),
    (429, {}, RateLimited), (403, {"X-RateLimit-Remaining": "0"}, RateLimited), (500, {}, Unreachable),
    (503, {}, Unreachable), (400, {}, DownloadFailed), (204, {}, DownloadFailed), (304, {}, DownloadFailed)])
def test_every_other_status_is_an_error_of_ours(status, headers, error):
    with serve(Reply(status, b"", headers)) as web, pytest.raises(error):
        client(web.url).get(web.url + "/x")


@pytest.mark.parametrize("headers, least, most", [
    ({"retry-after": "7"}, 7, 7), ({"x-ratelimit-reset": "1"}, 1, 1), ({}, 60, 60), ({"retry-after": "9999999"}, 86400, 86400),
    ({"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, 60, 60), ({"retry-after": "-1"}, 60, 60)])
def test_how_long_to_wait_is_read_from_the_answer(headers, least, most):
    with pytest.raises(RateLimited, match=r"allows no more requests now, again at \d\d:\d\d UTC") as caught:
        internet.check(429, headers, "https://h/x?secret=1")
    assert least <= caught.value.seconds <= most and "secret" not in caught.value.message


def test_a_time_of_day_to_wait_for_is_read_from_the_answer():
    headers = {"x-ratelimit-reset": str(int(time.time()) + 1000)}    # now, not when the tests were collected
    with pytest.raises(RateLimited) as caught:
        internet.check(429, headers, "https://h/x")
    assert 900 <= caught.value.seconds <= 1000


def test_not_json_is_a_sentence():
    with serve(Reply(200, b"nope", JSON)) as web, pytest.raises(ParseError, match="not JSON"):
        client(web.url).get_json(web.url + "/x")


def test_a_body_that_is_cut_off_is_noticed():
    with serve(Reply(200, b"x" * 1000, cut_after=100)) as web, pytest.raises(Unreachable, match="off 900 bytes early"):
        client(web.url).get(web.url + "/x")


def test_a_body_that_is_too_large_is_refused():
    with serve(Reply(200, b"x" * 1000)) as web, pytest.raises(DownloadFailed, match="more than 100 bytes"):
        client(web.url).get(web.url + "/x", max_body=100)


def test_a_server_that_says_nothing_more_is_given_up():
    with serve(Reply(200, b"x" * 1000, stall_after=10)) as web, pytest.raises(Unreachable, match="no answer in time"):
        client(web.url, timeout=0.3).get(web.url + "/x")


def test_a_range_is_asked_for_from_the_offset():
    with serve(Reply(200, b"0123456789")) as web, client(web.url).open(web.url + "/x", 4) as source:
        assert source.status == 206 and source.headers["content-range"] == "bytes 4-9/10"
        assert source.read(100) == b"456789" and source.read(100) == b""


def dripping(pieces, every):
    """Return (port, thread) of a server that sends one answer in small pieces."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run():
        with listener:
            peer, _ = listener.accept()
            with peer:
                try:
                    for piece in pieces:
                        peer.sendall(piece)
                        time.sleep(every)
                except OSError:
                    pass
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return listener.getsockname()[1], thread


def test_a_body_that_drips_meets_the_deadline_of_the_whole():
    port, thread = dripping([b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"] + [b"x"] * 600, 0.05)
    started = time.monotonic()
    with pytest.raises(Unreachable, match="did not come within 0.5 seconds"):
        client("http://127.0.0.1:1").get(f"http://127.0.0.1:{port}/", seconds=0.5)
    assert time.monotonic() - started < 20
    thread.join(60)


def test_a_head_that_drips_is_ended(monkeypatch):
    monkeypatch.setattr(internet, "ANSWER_SECONDS", 0.5)
    port, thread = dripping([b"HTTP/1.1 200 OK\r\n"] + [b"X: y\r\n"] * 600, 0.05)
    with pytest.raises(Unreachable, match="no answer in time"):
        client("http://127.0.0.1:1").get(f"http://127.0.0.1:{port}/")
    thread.join(60)


def test_a_name_that_does_not_exist_is_a_sentence():
    with pytest.raises(Unreachable, match="cannot be resolved"):
        client("http://nothing.invalid").get("http://nothing.invalid/")


def test_a_proxy_is_used_and_left_out_as_configured():
    with serve(Reply(200, b"x")) as proxy, serve(Reply(200, b"y")) as web:
        through = Internet(web.url, proxies={"http": proxy.url, "https": proxy.url}, no_proxy="")
        assert through.get("http://nowhere.invalid/x").body == b"x"
        assert proxy.requests[0]["path"] == "http://nowhere.invalid/x"
        with pytest.raises(Unreachable):
            through.get("https://nowhere.invalid/x")
        assert proxy.requests[1] == {"path": "nowhere.invalid:443", "method": "CONNECT"}
        around = Internet(web.url, proxies={"http": proxy.url}, no_proxy="10.0.0.0/8, 127.0.0.0/8")
        assert around.get(web.url + "/x").body == b"y" and len(proxy.requests) == 2


def test_the_proxy_of_the_environment_is_read(monkeypatch):
    with serve(Reply(200, b"x")) as proxy:
        for name in ("http_proxy", "no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        assert Internet("http://nowhere.invalid").get("http://nowhere.invalid/").body == b"x"


@pytest.mark.parametrize("host, listed, expected", [
    ("a.example", "a.example", True), ("x.a.example:443", "a.example", True), ("x.a.example", ".a.example", True),
    ("x.a.example", "*.a.example", True), ("ba.example", "a.example", False), ("A.Example", "a.example", True),
    ("10.1.2.3:80", "10.0.0.0/8", True), ("11.1.2.3", "10.0.0.0/8", False), ("10.1.2.3", "10.1.2.3", True),
    ("[fd00::1]:80", "fd00::/8", True), ("h", "*", True), ("h", "", False), ("h", ", ,", False),
    ("h", "not/anetwork", False), ("10.1.2.3", "2.3", False), ("h:80", "h:80", True)])
def test_no_proxy_knows_names_and_networks(host, listed, expected):
    assert bypasses(host, listed) is expected


@pytest.mark.parametrize("url", ["", "x", "ftp://x", "http://", "http://a b", "http://a\r\nb", "http://a:99999"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(ConfigError, match="not an address"):
        Internet(url)
