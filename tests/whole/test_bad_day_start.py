"""What cannot start says why: one sentence, what to try, an exit code, and no traceback."""
from __future__ import annotations

import json

import pytest

from tests.whole.bad_day import NOWHERE, TOKEN, ended, others_folder, small_disk, taken_port
from tests.whole.cluster import Cluster

pytestmark = pytest.mark.slow
GOOD = "listen: 127.0.0.1:0\nengines: {}\n"
ROLES = ("server", "agent", "router")
MODEL = "engines:\n  llama.cpp: {version: b10991}\nmodels:\n  - name: %s\n    engine: llama.cpp\n    weights: mirror:x\n"


@pytest.fixture(scope="module")
def place(pyz, qa_template, tmp_path_factory):
    """A folder with a good server.yaml and a token, and nothing that runs."""
    made = Cluster(pyz, tmp_path_factory.mktemp("start"), qa_template)
    made.env["LLMGW_GITHUB_API"] = NOWHERE
    made.config.write_text(GOOD)
    (made.folder / "token").write_text(TOKEN + "\n")
    yield made
    made.close()


def words_of(place, role, data_dir):
    if role == "server":
        return ["server", "--config", place.config, "--data-dir", data_dir]
    token = ["--server", NOWHERE, "--token-file", place.folder / "token", "--data-dir", data_dir]
    return [role, *token, *(["--listen", "127.0.0.1:0"] if role == "router" else ["--gate-port", "29999", "--owned"])]


# The file. -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("text, says, advice", [
    ("engines: {}\nmodels:\n\t- name: x\n", "line 3: a tab", "indent with spaces"),
    ("engines: {}\nengines: {}\n", "line 2: engines: this key stands here a second time", "keep one of them"),
    ("engines: {}\nmodles: []\n", "line 2: modles: unknown key, did you mean models", "known here: cluster, listen"),
    (MODEL % "m" + "    replcas: 2\n", "line 7: models[0].replcas: unknown key, did you mean replicas", "known here"),
    (MODEL % "-x", "line 4: models[0].name: name '-x' is not allowed", "not starting with -"),
    (GOOD + "#" * 10_000_000, "server.yaml: larger than 1048576 bytes", "check that this is the right file"),
    ("cluster: h\u00f6me\n".encode("latin-1"), "line 1: not UTF-8", "save the file as UTF-8"),
    (GOOD.encode("utf-16"), "line 1: not UTF-8", "save the file as UTF-8"),
    ("store: {etcd: [https://10.0.0.1:2379]}\n", "line 1: store.etcd: etcd is not supported yet", ""),
    (MODEL % "m" + "    chat_template: gone.jinja\n", "line 7: models[0].chat_template: cannot read", "beside server.yaml"),
], ids=["a tab", "a key twice", "an unknown key", "an unknown key of a model", "a name with a dash", "10 MB", "latin-1",
        "utf-16", "etcd", "no template"])
def test_a_server_yaml_that_cannot_be_used_is_one_sentence_and_exit_78(place, tmp_path, text, says, advice):
    path = tmp_path / "server.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    found = ended(place, "server", "--config", path, "--data-dir", tmp_path / "data")
    assert found.code == 78 and found.sentence.startswith(str(path)), found
    assert says in found.sentence and advice in found.advice, found


def test_a_server_yaml_that_is_not_there_is_a_folder_or_not_ours_is_exit_78_too(place, tmp_path):
    with others_folder(tmp_path / "closed") as closed:
        for path, says in ((tmp_path / "gone.yaml", "no such file"), (tmp_path, "Is a directory"),
                           (closed / "server.yaml", "permission denied")):
            found = ended(place, "server", "--config", path, "--data-dir", tmp_path / "data", powerless=True)
            assert found.code == 78 and says in found.sentence and str(path) in found.sentence, found
            assert found.advice, found


@pytest.mark.parametrize("change", [lambda text: "\ufeff" + text, lambda text: text.replace("\n", "\r\n"),
                                    lambda text: "---\n" + text], ids=["a BOM", "CRLF", "---"])
def test_what_editors_leave_in_a_file_harms_nothing(place, change):
    place.config.write_bytes(change(GOOD).encode())
    try:
        place.start_server()
        assert place.stop("server") == 0
    finally:
        place.config.write_text(GOOD)


# The port. -----------------------------------------------------------------------------------------------------------

def test_a_taken_port_is_a_sentence_of_server_router_and_gate(place, tmp_path):
    with taken_port() as port:
        table = tmp_path / "table.json"
        table.write_text(json.dumps({"host": "127.0.0.1", "port": port, "entries": []}))
        for who, words, advice in (
                ("server", [*words_of(place, "server", tmp_path / "s"), "--listen", f"127.0.0.1:{port}"], "--listen"),
                ("router", [*words_of(place, "router", tmp_path / "r"), "--listen", f"127.0.0.1:{port}"], "--listen"),
                ("gate", ["gate", "--table", table], "--gate-port")):
            found = ended(place, *words)
            assert found.code == 1, found
            assert found.sentence == f"the {who} cannot listen on 127.0.0.1:{port}: another program listens there"
            assert found.advice.startswith("stop it, or ") and advice in found.advice


# The data folder. ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("role", ROLES)
def test_a_data_folder_of_somebody_else_is_a_sentence(place, tmp_path, role):
    with others_folder(tmp_path / "closed") as closed:
        for folder, what in ((closed, f"open {closed}/lock"), (closed / "new", f"make the folder {closed}/new")):
            found = ended(place, *words_of(place, role, folder), powerless=True)
            assert (found.code, found.sentence) == (1, f"cannot {what}: permission denied"), found
            assert found.advice == "check who owns it, and which user llmgw runs as"


@pytest.mark.parametrize("role", ROLES)
def test_a_data_folder_that_is_a_file_is_a_sentence(place, tmp_path, role):
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        found = ended(place, *words_of(place, role, folder))
        assert (found.code, found.sentence) == (
            1, f"cannot make the folder {folder}: there is a file where a folder is needed")
        assert "--data-dir" in found.advice
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("role", ROLES)
def test_a_read_only_data_folder_is_a_sentence(place, tmp_path, role):
    with small_disk(tmp_path / "disk", options=",ro") as disk:
        found = ended(place, *words_of(place, role, disk.path))
        assert (found.code, found.sentence) == (1, f"cannot open {disk.path}/lock: the filesystem is read-only")
        assert found.advice.endswith("or choose another folder with --data-dir")


@pytest.mark.parametrize("role", ["server", "router"])
def test_a_full_disk_at_the_start_is_a_sentence(place, tmp_path, role):
    """The agent starts all the same: what runs on its node needs it (test_bad_day_disk)."""
    with small_disk(tmp_path / "disk") as disk:
        (disk.path / "data").mkdir()
        disk.fill()
        found = ended(place, *words_of(place, role, disk.path / "data"))
        assert found.code == 1 and "no space left on the device" in found.sentence, found
        assert str(disk.path) in found.sentence and found.advice.startswith("free some space"), found


def test_a_second_of_each_role_on_one_data_folder_is_refused_with_the_first_ones_pid(place):
    """Two agents on one folder, two servers on one database, two routers on one table."""
    place.start_server()
    place.start_agent("node-1")
    place.start_router()
    for name, role in (("server", "server"), ("node-1", "agent"), ("router", "router")):
        found = ended(place, *words_of(place, role, place.dir(name)))
        pid = place.children[name].pid
        assert (found.code, found.sentence) == (
            1, f"{place.dir(name)}: another {role} (pid {pid}) uses this data folder"), found
        assert found.advice == "stop it, or give this one another folder with --data-dir"
    place.check()
    assert [node["state"] for node in place.items("nodes")] == ["ready"]
