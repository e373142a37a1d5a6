"""The built file as separate processes, a real engine, a real model, and the real openai client."""
from __future__ import annotations

import base64
import json
import re
import tarfile

import openai
import pytest

from tests.fakes import ollama_tree, projector
from tests.whole.cluster import MODEL, Cluster, until

pytestmark = pytest.mark.slow
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ASK = {"model": MODEL, "messages": QUESTION, "temperature": 0, "stop": ["\n"], "max_tokens": 16}


@pytest.fixture(scope="module")
def cluster(pyz, release_archive, gemma, qa_template, tmp_path_factory):
    """Server, agent and router; engine and model through the mirror's doors, the model out of Ollama's folder.

    It is a vision model: the projector is real in all but what it has learned.
    """
    made = Cluster(pyz, tmp_path_factory.mktemp("cluster"), qa_template)
    try:
        made.start_server()
        made.start_agent()
        made.start_router()
        made.ctl("mirror", "import-engine", release_archive.path, "--sha256", release_archive.sha256)
        (made.folder / "projector.gguf").write_bytes(projector.build())
        ollama = ollama_tree.make(made.folder / "ollama", gemma, projector=made.folder / "projector.gguf")
        made.ctl("mirror", "import-ollama", "gemma3:270m", "--dir", ollama, "--name", MODEL)
        made.wait_ready()
        made.key = json.loads(made.ctl("keys", "create", "test", "--json"))["secret"]
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def client(cluster):
    """The client of a user whose key the router has learned."""
    with openai.OpenAI(base_url=cluster.router["url"] + "/v1", api_key=cluster.key, max_retries=0, timeout=60) as made:
        until("the router knows the key and the model", lambda: knows(made))
        yield made


def knows(client):
    try:
        return MODEL in [model.id for model in client.models.list()]
    except openai.APIStatusError:
        return False


def test_a_plain_answer_is_right(client):
    answer = client.chat.completions.create(**ASK)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop" and answer.usage.completion_tokens > 0


def test_a_streamed_answer_is_right_and_comes_in_pieces(client):
    pieces = list(client.chat.completions.create(**ASK, stream=True))
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert "Paris" in text
    assert [piece.choices[0].finish_reason for piece in pieces if piece.choices][-1] == "stop"


def test_a_second_fact_proves_that_it_is_the_model_that_answers(client):
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Who wrote Hamlet?"}], temperature=0, stop=["\n"])
    assert "Shakespeare" in answer.choices[0].message.content


def test_plain_completions_work(client):
    answer = client.completions.create(model=MODEL, prompt="Question: What is the capital of France?\nAnswer:",
                                       temperature=0, stop=["\n"], max_tokens=16)
    assert "Paris" in answer.choices[0].text


def test_an_image_reaches_the_model_through_its_projector(client, cluster):
    words = {"type": "text", "text": "What is it?"}
    image = "data:image/png;base64," + base64.b64encode(projector.red_square()).decode()
    plain, seen = (client.chat.completions.create(model=MODEL, temperature=0, max_tokens=4, messages=[
        {"role": "user", "content": content}]) for content in (
            [words], [words, {"type": "image_url", "image_url": {"url": image}}]))
    assert seen.usage.prompt_tokens - plain.usage.prompt_tokens >= projector.IMAGE_TOKENS and seen.usage.completion_tokens
    assert "vision: yes" in cluster.ctl("models")
    assert any("llama-server" in words and "--mmproj" in words for words in cluster.left().values())


def test_an_alias_is_answered_like_the_model(client):
    assert "Paris" in client.chat.completions.create(**{**ASK, "model": "small"}).choices[0].message.content


def test_models_are_listed_in_openais_form(client):
    listed = client.models.list()
    assert listed.object == "list" and MODEL in [model.id for model in listed]


def test_a_wrong_key_is_refused_with_401(cluster):
    with openai.OpenAI(base_url=cluster.router["url"] + "/v1", api_key="llmgw_infer_00000000_wrong",
                       max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError) as caught:
            stranger.chat.completions.create(**ASK)
    assert caught.value.status_code == 401 and caught.value.body["message"]


def test_an_unknown_model_is_refused_with_404(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(**{**ASK, "model": "no-such-model"})
    assert "no-such-model" in caught.value.body["message"]


def test_what_the_engine_refuses_reaches_the_client_as_it_is(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{**ASK, "messages": "no list"})
    assert caught.value.status_code == 400


def test_ctl_shows_the_node_the_engine_and_the_replica(cluster):
    node, = cluster.items("nodes")
    assert node["name"] == "node-1" and node["state"] == "ready"
    replica, = cluster.items("replicas")
    assert (replica["model"], replica["state"]) == (MODEL, "ready")
    for words in (["nodes"], ["models"], ["replicas"], ["engines"], ["mirror", "list"], ["keys", "list"]):
        assert cluster.ctl(*words).strip()


def test_the_model_came_out_of_ollamas_folder_with_its_notes(cluster):
    assert cluster.items("mirror", "list")["models"][0]["source"] == "ollama:gemma3:270m"
    assert "Gemma Terms of Use" in cluster.ctl("mirror", "show", MODEL)
    assert cluster.ctl("mirror", "verify").strip() == ""


def test_no_secret_is_in_any_command_line_or_log(cluster, client):
    client.chat.completions.create(**ASK)
    secrets = [cluster.key] + [cluster.token(role).read_text().strip() for role in ("admin", "node", "router")]
    seen = "\n".join(cluster.left().values()) + cluster.logs() + "\n".join(
        path.read_text(errors="replace") for path in cluster.folder.rglob("*.log"))
    assert "llama-server" in seen
    assert [secret[:20] for secret in secrets if secret in seen] == []
    assert not re.search(r"--api-key\s", seen)


def test_a_support_bundle_of_all_this_has_states_and_logs_and_neither_secrets_nor_prompts(cluster, client, tmp_path):
    client.chat.completions.create(**{**ASK, "messages": [{"role": "user", "content": "Is Zanzibar-4711 the capital of Xanadu?"}]})
    cluster.ctl("support-bundle", tmp_path / "b.tar.gz")
    with tarfile.open(tmp_path / "b.tar.gz") as archive:
        found = {member.name.partition("/")[2]: archive.extractfile(member).read().decode() for member in archive}
    (replica,) = cluster.items("replicas")
    assert set(found) == {"about.json", "nodes.json", "models.json", "replicas.json", "engines.json", "mirror.json", "events.json",
                          f"logs/{replica['id']}.log"}
    assert "model" in found[f"logs/{replica['id']}.log"] and replica["id"] in found["replicas.json"]
    keys = [path.read_text().strip() for path in cluster.dir("node-1").glob("shards/*/key")]
    secrets = [cluster.key, *keys, *(path.read_text().strip() for path in (cluster.dir("server") / "tokens").iterdir())]
    everything = "\n".join(found.values())
    assert keys and [secret[:16] for secret in secrets if secret.split("_", 3)[-1] in everything] == []
    assert "Zanzibar" not in everything and "Xanadu" not in everything


def test_stopping_leaves_no_process_behind(cluster):
    """Last: it ends the cluster. The agent is owned, so its gate and engine end with it."""
    assert any("llama-server" in words for words in cluster.left().values())
    for name in ("router", "node-1", "server"):
        assert cluster.stop(name) == 0, cluster.log(name).read_text()[-3000:]
    until("nothing is left", lambda: not cluster.left(), 30)
