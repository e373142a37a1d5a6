"""An agent of root runs engines, and every look at them, as a user that can read none of its secrets.

As root only: elsewhere there is nobody else to run them as.
"""
from __future__ import annotations

import os
import pathlib
import shutil
import stat
import subprocess
import tempfile

import pytest

from llmgw.agent.shard_row import OWNER
from llmgw.domain.engine import EnginePhase
from llmgw.system import accounts, proc, spawn
from tests.agent.conftest import Node, free_block
from tests.fakes.control_plane import engine_of, shard_of

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: needs root, which makes "
                                                   "a user for the engines")]
if os.geteuid() == 0 and not accounts.sees_others():
    pytest.skip("NOT TESTED: this root may not look into the processes of others", allow_module_level=True)

READ = 'for p; do if test -d "$p"; then ls "$p"; else head -c 1 "$p"; fi >/dev/null 2>&1 && echo "$p"; done; true'


def ids(pid):
    """Return (uid, gid, groups) of a process."""
    lines = dict(line.split(":", 1) for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines())
    uids, gids = set(lines["Uid"].split()), set(lines["Gid"].split())
    assert len(uids) == len(gids) == 1, "real, effective, saved and filesystem ids must be the same"
    return int(uids.pop()), int(gids.pop()), {int(group) for group in lines["Groups"].split()}


def read_as(pid, paths):
    """Return which of these files and folders a program with the ids of ``pid`` can read."""
    uid, gid, groups = ids(pid)
    done = subprocess.run(["/bin/sh", "-c", READ, "sh", *map(str, paths)], user=uid, group=gid, cwd="/", env={},
                          extra_groups=sorted(groups), stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    return set(done.stdout.splitlines())


@pytest.fixture
def open_folder():
    """A folder that everybody may pass through, as /var/lib is."""
    made = pathlib.Path(tempfile.mkdtemp(prefix="llmgw-open-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def node(open_folder, plane, gemma, gemma_weights):
    made = Node(open_folder, plane, free_block())
    (open_folder / "token").chmod(0o600)
    blob = made.data / "blobs" / "sha256" / gemma_weights.files[0].sha256
    blob.parent.mkdir(parents=True, mode=0o700)       # as an agent had made it that ran engines as root
    shutil.copyfile(gemma, blob)
    blob.chmod(0o600)
    for folder in (made.data, made.data / "blobs", blob.parent):
        folder.chmod(0o700)
    yield made
    made.close()


def test_engines_run_as_a_user_that_reads_none_of_the_agents_secrets_nor_those_of_another_shard(
        node, plane, llama_archive, gemma, gemma_weights, qa_template):
    first = shard_of(gemma_weights, chat_template=qa_template.read_text())
    second = shard_of(gemma_weights, "r2.0", name="other", chat_template=first.model.chat_template)
    plane.offer(archive=llama_archive, weights=gemma_weights, path=pathlib.Path(gemma))
    plane.want([engine_of(llama_archive)], [first, second])
    node.start("--engine-user", "llmgw-engine")
    node.ready("r1.0"), node.ready("r2.0")
    user, observed = accounts.find("llmgw-engine"), plane.observed
    assert user.uid != 0 and not observed.facts.warnings
    one, two = (node.seen(observed, name).pid for name in ("r1.0", "r2.0"))
    for pid in (one, two):
        uid, gid, groups = ids(pid)
        assert uid == user.uid and 0 not in {gid} | groups and groups == set(user.groups)
        assert os.readlink(f"/proc/{pid}/cwd").endswith("/work")
    assert ids(one)[1] != ids(two)[1], "a group of its own keeps a shard out of the others"
    assert ids(node.gate())[0] == 0 and ids(node.process.pid)[0] == 0

    shard, other = node.data / "shards" / "r1.0", node.data / "shards" / "r2.0"
    assert stat.S_IMODE(os.stat(shard / "key").st_mode) == 0o600 and os.stat(shard / "key").st_uid == user.uid
    assert stat.S_IMODE(os.stat(node.data).st_mode) == 0o710
    own = [shard / "key", shard / "work", shard / "template.jinja", node.data / "engines" / "llama.cpp" / "b10991",
           node.data / "blobs" / "sha256" / gemma_weights.files[0].sha256, f"/proc/{one}/environ"]
    closed = [node.token, node.data, node.data / "state", node.data / "state" / "desired.json", node.data / "gate",
              node.data / "gate" / "table.json", node.data / "shards", shard, shard / "state.json",
              shard / "engine.log", other / "key", other / "work", other / "template.jinja", f"/proc/{two}/environ",
              f"/proc/{node.process.pid}/environ"]
    assert not [path for path in own + closed if not os.path.exists(path)]
    assert read_as(one, own + closed) == set(map(str, own))
    assert node.ask(first.key.reveal())[0] == 200 and node.ask(second.key.reveal())[0] == 200

    # another agent finds, keeps and ends what runs as somebody else
    node.kill9()
    plane.observed = None
    node.start("--engine-user", "llmgw-engine")
    again = plane.wait(lambda seen: len(seen.shards) == 2)
    assert {node.seen(again, name).pid for name in ("r1.0", "r2.0")} == {one, two}
    plane.want([engine_of(llama_archive)], [first])
    plane.wait(lambda seen: node.seen(seen, "r2.0") is not None and node.seen(seen, "r2.0").state.value == "stopped")
    assert node.engines() == [one] and not other.exists()


def test_a_folder_that_the_engines_user_may_not_enter_is_named_and_nothing_runs_as_root(node, plane, llama_archive,
                                                                                        open_folder):
    open_folder.chmod(0o700)
    plane.offer(archive=llama_archive)
    plane.want([engine_of(llama_archive)])
    node.start("--engine-user", "llmgw-engine")
    observed = plane.wait(lambda seen: seen.engines and seen.engines[0].phase is EnginePhase.MISSING)
    assert f"the user llmgw-engine, which may not enter {open_folder}," in observed.engines[0].message
    assert "data_dir" in observed.engines[0].hint and "engine_user: root" in observed.engines[0].hint
    assert any("may not enter" in warning for warning in observed.facts.warnings)
    open_folder.chmod(0o755)                          # mended: no restart is needed
    healed = plane.wait(lambda seen: seen.engines and seen.engines[0].usable)
    assert not healed.facts.warnings


def test_a_user_that_is_not_there_is_named_and_not_made(node, plane, llama_archive):
    plane.offer(archive=llama_archive)
    plane.want([engine_of(llama_archive)])
    node.start("--engine-user", "llmgw-nobody-of-that-name")
    observed = plane.wait(lambda seen: seen.engines and seen.engines[0].phase is EnginePhase.MISSING)
    assert "there is no user llmgw-nobody-of-that-name" in observed.engines[0].message
    assert accounts.find("llmgw-nobody-of-that-name") is None and spawn.tree((OWNER, str(node.data))) == []


def test_engines_of_root_run_as_root_when_that_is_said(node, plane, llama_archive, gemma, gemma_weights):
    plane.offer(archive=llama_archive, weights=gemma_weights, path=pathlib.Path(gemma))
    plane.want([engine_of(llama_archive)], [shard_of(gemma_weights)])
    node.start("--engine-user", "root")
    assert ids(node.ready().pid)[0] == 0 and proc.environ(node.engines()[0])["HOME"].endswith("/work")
