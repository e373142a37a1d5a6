"""What clients may ask, with which key, and what they are told."""
from __future__ import annotations

import json

import pytest

from llmgw.domain.model import Task
from llmgw.system.attempts import MOST_ON_LOOPBACK
from tests.fakes.raw_client import RawClient, request
from tests.fakes.router_process import KEY, REPLICA_KEY, chat, model, table


def test_a_request_reaches_the_stand_in_unchanged_but_for_its_credentials(router, upstream):
    engine = upstream()
    body = b'{ "model":"m", "messages":[], "k":12345678901234567890, "f":1.50, "tools":[{"function":{"name":"x"}}] }'
    answer = router(engine.port).ask(body=body, fields=[
        "Cookie: a=b", "X-Api-Key: y", "OpenAI-Organization: o", "X-Session-Id: s1", "Traceparent: t", "X-Request-Id: my-id.1",
        "Accept: */*", "Accept-Encoding: gzip", "X-Forwarded-For: 1.2.3.4", "Connection: keep-alive, x-y", "TE: trailers"])
    assert answer.status == 200 and answer.json["choices"][0]["message"]["content"] == "Paris"
    (seen,) = engine.requests
    assert seen.body == body
    assert [value for name, value in seen.fields if name.lower() == "authorization"] == [f"Bearer {REPLICA_KEY}"]
    assert set(seen.headers) == {"host", "accept-encoding", "authorization", "content-type", "accept", "traceparent",
                                 "x-session-id", "x-request-id", "content-length"}
    assert seen.headers["host"] == f"127.0.0.1:{engine.port}" and seen.headers["accept-encoding"] == "identity"
    assert seen.headers["x-request-id"] == answer.headers["x-request-id"] == "my-id.1"


@pytest.mark.parametrize("given", ["a b", "x" * 129, "a\"b", "é"])
def test_a_request_id_that_could_harm_is_replaced(shared, given):
    answer = shared[1].ask(fields=[f"X-Request-Id: {given}"])
    assert answer.headers["x-request-id"].startswith("req-")


@pytest.mark.parametrize("key, code", [(None, "missing_api_key"), ("wrong", "invalid_api_key"), (KEY + "x", "invalid_api_key"),
                                       (REPLICA_KEY, "invalid_api_key")])
@pytest.mark.parametrize("method, path", [("POST", "/v1/chat/completions"), ("POST", "/v1/embeddings"), ("GET", "/v1/models"),
                                          ("GET", "/v1/models/m")])
def test_nobody_without_a_known_key(shared, key, code, method, path):
    engine, started = shared
    answer = started.ask(method, path, key=key)
    assert answer.status == 401 and answer.error["code"] == code and answer.error["type"] == "authentication_error"
    assert answer.headers["www-authenticate"] == "Bearer" and not engine.requests


def test_wrong_keys_are_slowed_down_and_right_ones_never(router, upstream):
    started = router(upstream().port)
    with RawClient(started.port) as client:
        client.send(request("GET", "/v1/models", key="canary-guess") * (MOST_ON_LOOPBACK + 2))
        assert [client.answer().status for _ in range(MOST_ON_LOOPBACK)] == [401] * MOST_ON_LOOPBACK
        last = client.answer()
        assert last.status == 429 and last.error["code"] == "too_many_wrong_keys" and last.headers["retry-after"] == "60"
        assert client.closed(), "a guess more costs a connection"
    assert started.ask(key="wrong").status == 429
    assert started.ask().status == 200 and started.ask(key=None).status == 401
    assert started.log().count("many wrong keys from=127.0.0.1") == 1 and "canary" not in started.log()


def test_basic_authorization_is_no_key(shared):
    answer = shared[1].ask(key=None, fields=[f"Authorization: Basic {KEY}"])
    assert answer.status == 401


def test_a_key_for_some_models_opens_only_those(router, upstream):
    engine = upstream()
    routes = table(model(engine.port), model(engine.port, name="org/other"), keys=[(KEY, ("org/other",))])
    started = router(routes)
    assert started.ask().status == 404
    assert started.ask(body=chat().replace(b'"m"', b'"org/other"')).status == 200
    assert [item["id"] for item in started.ask("GET", "/v1/models").json["data"]] == ["org/other"]
    assert started.ask("GET", "/v1/models/m").status == 404


def test_models_are_listed_and_found_with_slashes_encoded_or_not(router, upstream):
    port = upstream().port
    started = router(table(model(port, name="org/name:q4", aliases=("large",), context_length=8192), model(port)))
    listed = started.ask("GET", "/v1/models")
    assert listed.headers["content-type"] == "application/json" and listed.json["object"] == "list"
    assert [item["id"] for item in listed.json["data"]] == ["org/name:q4", "large", "m"]
    for path in ("org/name:q4", "org%2Fname:q4", "org%2fname%3Aq4"):
        found = started.ask("GET", f"/v1/models/{path}")
        assert found.status == 200
        assert {"id": "org/name:q4", "object": "model", "created": 1700000000, "owned_by": "llmgw"}.items() <= (
            found.json.items())
    missing = started.ask("GET", "/v1/models/org/none")
    assert missing.status == 404 and missing.error["code"] == "model_not_found"


def test_an_alias_becomes_the_models_name_and_nothing_else_changes(router, upstream):
    engine = upstream()
    started = router(table(model(engine.port, aliases=("large",))))
    started.ask(body=b'{"messages" : [{"role":"user","content":"model"}],\n "model" : "large", "n":1.0}')
    assert engine.requests[0].body == b'{"messages" : [{"role":"user","content":"model"}],\n "model" : "m", "n":1.0}'


def test_an_unknown_model_is_a_404_and_reaches_no_stand_in(router, upstream):
    engine = upstream()
    answer = router(engine.port).ask(body=b'{"model":"gpt-4","messages":[]}')
    assert answer.status == 404 and answer.error["code"] == "model_not_found" and answer.error["param"] == "model"
    assert not engine.requests


@pytest.mark.parametrize("task, path, other", [(Task.EMBED, "/v1/embeddings", "/v1/chat/completions"),
                                               (Task.CHAT, "/v1/completions", "/v1/embeddings"),
                                               (Task.RERANK, "/v1/rerank", "/v1/completions")])
def test_each_task_has_its_endpoint(router, upstream, task, path, other):
    engine = upstream(lambda exchange: exchange.answer())
    started = router(table(model(engine.port, task=task)))
    assert started.ask(path=path).status == 200
    refused = started.ask(path=other)
    assert refused.status == 400 and refused.error["code"] == "wrong_endpoint"
    assert [seen.path for seen in engine.requests] == [path]


@pytest.mark.parametrize("body, code", [(b"{", "invalid_body"), (b"[]", "invalid_body"), (b"", "invalid_body"),
                                        (b"{}", "missing_model"), (b'{"model":"m","model":"m"}', "duplicate_model"),
                                        (b"[" * 100000, "invalid_body"),
                                        (b'{"model":"m","prompt_embeds":"x"}', "refused_parameter"),
                                        (b'{"model":"m","n_discard":-1}', "refused_parameter")])
def test_a_body_that_is_refused_reaches_no_stand_in(shared, body, code):
    engine, started = shared
    answer = started.ask(body=body)
    assert answer.status == 400 and answer.error["code"] == code and answer.error["type"] == "invalid_request_error"
    assert answer.headers["x-llmgw-error-code"] == code and not engine.requests


@pytest.mark.parametrize("method, path", [("POST", "/api/chat"), ("POST", "/api/generate"), ("GET", "/api/tags"),
                                          ("POST", "/completion"), ("POST", "/chat/completions"), ("GET", "/models"),
                                          ("POST", "/generate")])
def test_paths_of_other_servers_point_to_v1(shared, method, path):
    answer = shared[1].ask(method, path)
    assert answer.status == 404 and "/v1/chat/completions" in answer.error["message"]


@pytest.mark.parametrize("method, path", [("GET", "/"), ("GET", "/nope"), ("POST", "/slots/0"), ("GET", "/v1"),
                                          ("GET", "/v1/../metrics"), ("POST", "//v1/chat/completions"),
                                          ("POST", "/v1/chat%2Fcompletions"), ("POST", "http://other/v1/chat/completions")])
def test_any_other_path_is_a_404_and_reaches_no_stand_in(shared, method, path):
    engine, started = shared
    answer = started.ask(method, path)
    assert answer.status == 404 and answer.error["code"] == "not_found" and not engine.requests


@pytest.mark.parametrize("method, path, allowed", [("GET", "/v1/chat/completions", "POST, OPTIONS"),
                                                   ("DELETE", "/v1/models/m", "GET, HEAD, OPTIONS"),
                                                   ("POST", "/v1/models", "GET, HEAD, OPTIONS"),
                                                   ("POST", "/healthz", "GET, HEAD, OPTIONS")])
def test_the_wrong_method_is_a_405(shared, method, path, allowed):
    answer = shared[1].ask(method, path)
    assert answer.status == 405 and answer.headers["allow"] == allowed


def test_options_needs_no_key(shared):
    answer = shared[1].ask("OPTIONS", "/v1/chat/completions", key=None)
    assert answer.status == 204 and answer.body == b"" and "access-control-allow-origin" not in answer.headers


def test_head_has_no_body(shared):
    with RawClient(shared[1].port) as client:
        client.send(request("HEAD", "/healthz") + request("GET", "/healthz"))
        assert client.answer(to_head=True).status == 200
        assert client.answer().json == {"status": "ok"}


def test_health_and_readiness_need_no_key(router, upstream):
    started = router(upstream().port)
    assert started.ask("GET", "/healthz", key=None).json == {"status": "ok"}
    ready = started.ask("GET", "/ready", key=None)
    assert ready.status == 200 and ready.json["table_revision"] == 1 and ready.json["table_age_seconds"] >= 0


def test_a_model_without_a_replica_says_why_in_the_nodes_own_words(router):
    started = router(table(model(why_not="node a: libgomp.so.1 is missing", retry_after_seconds=7)))
    answer = started.ask()
    assert answer.status == 503 and answer.headers["retry-after"] == "7"
    assert "libgomp.so.1 is missing" in answer.error["message"] and answer.error["code"] == "model_not_ready"


def test_the_metrics_page_counts_by_model_and_code(router, upstream):
    engine = upstream()
    started = router(engine.port)
    started.ask()
    started.ask(body=chat(stream=True))
    started.ask(body=b'{"model":"unknown\\"}"}')
    page = started.metrics()
    assert page['llmgw_router_requests_total{model="m",endpoint="chat/completions",code="200"}'] == 2
    assert page['llmgw_router_requests_total{model="",endpoint="",code="404"}'] == 1
    assert page['llmgw_router_tokens_total{model="m",kind="prompt"}'] == 7
    assert page['llmgw_router_tokens_total{model="m",kind="completion"}'] == 1
    assert page['llmgw_router_request_seconds_count{model="m"}'] == 2
    assert page['llmgw_router_ttft_seconds_count{model="m"}'] == 1
    assert not any("unknown" in name for name in page)


def test_no_prompt_and_no_key_reaches_the_log(router, upstream):
    started = router(upstream().port)
    started.ask(body=chat("a-secret-prompt"))
    started.ask(key="llmgw_infer_00000000_wrong-key-of-somebody")
    log = started.log()
    assert "a-secret-prompt" not in log and "wrong-key" not in log and KEY not in log and REPLICA_KEY not in log


def test_off_loopback_the_router_refuses_to_listen(tmp_path):
    import subprocess
    import sys
    ended = subprocess.run([sys.executable, "-m", "llmgw", "router", "--listen", "0.0.0.0:0", "--data-dir", str(tmp_path)],
                           stderr=subprocess.PIPE, text=True, timeout=60)
    assert ended.returncode == 78 and "needs TLS" in ended.stderr


def test_a_taken_port_and_a_taken_folder_are_said_in_one_sentence(router, upstream, tmp_path):
    import subprocess
    import sys
    started = router(upstream().port)
    command = [sys.executable, "-m", "llmgw", "router", "--listen", f"127.0.0.1:{started.port}", "--data-dir"]
    for folder, words in ((str(tmp_path / "new"), "cannot listen on"), (started.folder, "uses this data folder")):
        ended = subprocess.run([*command, folder], stderr=subprocess.PIPE, text=True, timeout=60)
        assert ended.returncode == 1 and words in ended.stderr and "Traceback" not in ended.stderr


def test_the_real_size_of_json_is_no_limit_below_the_cap(router, upstream):
    engine = upstream()
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * (8 << 20)}]}).encode()
    assert router(engine.port).ask(body=body).status == 200
    assert engine.requests[0].body == body
