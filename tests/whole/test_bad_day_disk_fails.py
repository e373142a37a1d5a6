"""The disk itself fails: a real ext4 meets an error and turns read-only under server, agent, router and engine at once."""
from __future__ import annotations

import contextlib
import json
import sqlite3

import pytest

from tests.whole.asking import ANSWER
from tests.whole.bad_day import NOWHERE, failing_disk, repeated
from tests.whole.cluster import MODEL, Cluster, until

pytestmark = pytest.mark.slow


class OnOneDisk(Cluster):
    """All data of all parts lies on one disk; their logs do not."""

    def dir(self, name):
        return self.folder / "disk" / name

    def start_all(self):
        self.start_server()
        self.start_agent()
        self.start_router()

    def answers(self):
        with contextlib.suppress(OSError):           # the router has to learn of key and replica first
            return self.answer()

    def told(self, *words):
        """Return what ctl says on both outputs, its lines joined."""
        done = self.ctl(*words, ok=False)
        return " ".join((done.stdout + done.stderr).split())


@pytest.fixture
def place(pyz, release_archive, gemma, qa_template, tmp_path):
    with failing_disk(tmp_path / "disk", 1 << 30) as disk:
        made = OnOneDisk(pyz, tmp_path, qa_template)
        made.env["LLMGW_GITHUB_API"] = NOWHERE
        made.disk = disk
        try:
            made.start_all()
            made.ctl("mirror", "import-engine", release_archive.path, "--sha256", release_archive.sha256)
            made.ctl("mirror", "import", gemma, "--name", MODEL)
            made.wait_ready()
            made.key = json.loads(made.ctl("keys", "create", "test", "--json"))["secret"]
            until("an answer", made.answers)
            yield made
        finally:
            made.close()


def test_all_goes_on_without_its_disk_and_says_so_and_is_right_again_after_the_repair(place):
    place.disk.fail()
    for _ in range(3):
        assert ANSWER in place.answer()
    done = place.ctl("keys", "create", "somebody", ok=False)
    assert done.returncode == 75 and done.stdout == ""
    assert f"llmgw: cannot write {place.dir('server')}/llmgw.db: " in done.stderr and "  try: look at dmesg" in done.stderr
    before = place.config.read_text()
    place.config.write_text(before.replace("context_length: 1024", "context_length: 512"))
    until("the edit is refused", lambda: "server.yaml is not used as it is now: cannot write" in place.told("models"))
    until("the node tells", lambda: f"cannot write {place.dir('node-1')}: the filesystem is read-only; look at dmesg"
          in place.told("nodes"), 120)
    (replica,) = place.items("replicas")
    assert replica["state"] == "ready"
    assert ANSWER in place.answer()
    place.check()
    assert repeated(place) == []
    assert {name: place.stop(name) for name in list(place.children)[::-1]} == {"router": 0, "node-1": 0, "server": 0}
    assert not place.left()

    place.disk.repair()
    with contextlib.closing(sqlite3.connect(place.dir("server") / "llmgw.db")) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    place.start_all()
    assert ANSWER in until("an answer", place.answers, 120)
    assert [key["name"] for key in place.items("keys", "list")] == ["test"]
    until("the edit is in force", lambda: place.items("models")[0]["context_length"] == 512)
    assert "read-only" not in place.told("nodes")
    assert not [name for name in place.children if "Traceback" in place.log(name).read_text()]
