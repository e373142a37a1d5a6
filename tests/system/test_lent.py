"""Folders that another user works in, lent and taken back. As root only: elsewhere there is nobody to lend them to."""
from __future__ import annotations

import os
import pathlib
import shutil
import stat
import subprocess
import tempfile

import pytest

from llmgw.domain.errors import EngineFailed
from llmgw.system import accounts, lent

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: needs root, which makes a user for the engines")


@pytest.fixture
def user():
    return accounts.private(accounts.need(accounts.ENGINE_USER), 0)


@pytest.fixture
def folder():
    """A place that everybody may pass through, as /var/lib is."""
    made = pathlib.Path(tempfile.mkdtemp(prefix="llmgw-lent-"))
    made.chmod(0o755)
    yield made / "env"
    shutil.rmtree(made)


def work(user, script, group=None):
    return subprocess.run(["/bin/sh", "-c", f"umask 022; {script}"], user=user.uid, group=group or user.gid, extra_groups=[],
                          cwd="/", env={"PATH": "/usr/bin:/bin"}, stderr=subprocess.DEVNULL, timeout=60, check=False).returncode


def test_what_was_made_in_a_lent_folder_is_ours_afterwards_and_cannot_be_changed(user, folder):
    lent.lend(str(folder), user)
    assert lent.is_lent(str(folder)) and work(user, "true", 65533) == 0
    assert work(user, f"touch {folder}/x", accounts.find(user.name).gid) != 0, "an engine is in no group of uv's"
    secret = folder.parent / "secret"
    secret.write_text("s")
    secret.chmod(0o600)
    assert work(user, f"cd {folder} && mkdir -m 777 d && touch d/f && chmod 4777 d/f && mkfifo -m 666 /dev/null 2>/dev/null; "
                      f"ln -s {secret} d/link; ln d/f d/again; umask 077; touch d/closed") == 0
    lent.take_back(str(folder), user)
    seen = {path.name: path.lstat() for path in (folder, *folder.rglob("*"))}
    assert {each.st_uid for each in seen.values()} == {0} and {each.st_gid for each in seen.values()} == {0}
    modes = {name: stat.S_IMODE(each.st_mode) for name, each in seen.items() if not stat.S_ISLNK(each.st_mode)}
    assert modes == {"env": 0o755, "d": 0o755, "f": 0o755, "again": 0o755, "closed": 0o644}
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600, "what a link leads to is not touched"
    assert not lent.is_lent(str(folder))
    assert work(user, f"touch {folder}/d/new || echo > {folder}/d/f || mv {folder}/d {folder}/e") != 0


def test_what_is_no_file_folder_or_link_is_refused_and_the_folder_stays_lent(user, folder):
    lent.lend(str(folder), user)
    assert work(user, f"mkfifo {folder}/pipe") == 0
    with pytest.raises(EngineFailed, match="/pipe is no file of llmgw-engine"):
        lent.take_back(str(folder), user)
    assert lent.is_lent(str(folder))


def test_what_the_same_user_left_is_kept_only_where_that_is_said(user, folder):
    lent.lend(str(folder), user)
    assert work(user, f"touch {folder}/x") == 0
    lent.lend(str(folder), user, keep=True)
    assert (folder / "x").exists()
    os.chown(folder / "x", 65532, 65532)            # as another user for engines had left it
    lent.lend(str(folder), user, keep=True)
    assert not (folder / "x").exists()
    assert work(user, f"touch {folder}/x") == 0
    lent.lend(str(folder), user)
    assert not (folder / "x").exists()
