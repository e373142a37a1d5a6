"""The fleet's lists of packages: whose, as of when, and what becomes of them."""
from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from llmgw.domain.engine import Asset, EngineWanted, Tool
from llmgw.domain.errors import Conflict, NotFound, ParseError
from llmgw.parse import lock, utc
from llmgw.server.engine_assets import EngineAssets
from llmgw.server.engine_locks import SETTLED_SECONDS, EngineLocks
from llmgw.server.events import Events
from llmgw.server.mirror import Mirror
from llmgw.server.store_sqlite import SqliteStore

DEFAULT = EngineWanted("vllm", "0.30.0")
OTHER = EngineWanted("vllm", "0.31.0")
X86, ARM = "x86_64-manylinux_2_31", "aarch64-manylinux_2_31"
PUBLISHED = "2026-11-01T10:00:00Z"
AS_OF = "2026-11-02T10:00:00Z"
FOUND = f"vllm==0.31.0 --hash=sha256:{'a' * 64}\nidna==3.20 --hash=sha256:{'b' * 64}\n"


class Clock:
    def __init__(self):
        self.now = utc.seconds(AS_OF) + SETTLED_SECONDS + 60.0

    def monotonic(self):
        return self.now

    def wall(self):
        return self.now


class Releases:
    """Stands in for GitHub."""

    def __init__(self):
        self.date, self.problem, self.asked = PUBLISHED, "", []

    def published(self, engine, version):
        self.asked.append((engine, version))
        return ("", self.problem) if self.problem else (self.date, "")

    def assets(self, engine, version):
        self.asked.append((engine, version))
        names = {"vllm": [], "uv": ["uv-x86_64-unknown-linux-musl.tar.gz", "uv-x86_64-pc-windows-msvc.zip"],
                 "python": [f"cpython-{version}-x86_64-unknown-linux-gnu-install_only_stripped.tar.gz"]}[engine]
        return tuple(Asset(name, 1, "c" * 64) for name in names), ""

    def activity(self):
        return ()

    def cannot(self, engine, version):
        return False


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def store(tmp_path):
    made = SqliteStore(str(tmp_path))
    yield made
    made.close()


@pytest.fixture
def releases():
    return Releases()


@pytest.fixture
def locks(store, clock, releases):
    return EngineLocks(store, clock, Events(store, clock), releases)


def test_the_list_of_the_default_version_came_with_llmgw_for_both_processors(locks, releases):
    wanted = locks.complete(DEFAULT)
    assert wanted.as_of == "2026-09-23T05:22:21Z" and wanted.assets_problem == "" and releases.asked == []
    views = locks.views(DEFAULT)
    assert [(view.platform, view.packages, view.source) for view in views] == [(ARM, 196, "llmgw"), (X86, 196, "llmgw")]
    assert dict(wanted.locks)[X86] == views[0].sha256
    assert lock.digest(lock.read(locks.text(DEFAULT, X86), "x")) == views[0].sha256


def test_the_first_node_lists_the_packages_of_another_version(locks):
    assert locks.complete(OTHER).locks == () and locks.complete(OTHER).as_of == AS_OF
    made = locks.propose(OTHER, X86, AS_OF, FOUND, "n1")
    assert (made.packages, made.source, made.platform) == (2, "node/n1", X86)
    assert locks.complete(OTHER).locks == ((X86, made.sha256),)
    assert lock.digest(lock.read(locks.text(OTHER, X86), "x")) == made.sha256
    second = locks.propose(OTHER, X86, AS_OF, FOUND.replace("3.20", "3.19"), "n2")
    assert second == made                          # the second is told what is in force
    with pytest.raises(NotFound, match="no list of the packages of vllm 0.31.0 for aarch64"):
        locks.text(OTHER, ARM)


def test_of_many_that_come_at_once_one_wins(locks):
    texts = [FOUND.replace("3.20", f"3.{number}") for number in range(8)]
    kept = []
    threads = [threading.Thread(target=lambda text=text: kept.append(locks.propose(OTHER, X86, AS_OF, text, "n")))
               for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len({view.sha256 for view in kept}) == 1 and len(kept) == 8


@pytest.mark.parametrize("platform, as_of, text, error", [
    (X86, "2026-11-03T10:00:00Z", FOUND, Conflict), (X86, AS_OF, FOUND + "--index-url https://evil.example\n", ParseError),
    ("../x", AS_OF, FOUND, ParseError), (X86, AS_OF, FOUND.replace("0.31.0", "0.30.0"), ParseError), (X86, AS_OF, "", ParseError)])
def test_what_is_no_list_for_what_is_wanted_is_not_kept(locks, platform, as_of, text, error):
    with pytest.raises(error):
        locks.propose(OTHER, platform, as_of, text, "n1")
    assert locks.complete(OTHER).locks == ()


def test_a_version_of_the_last_days_waits_unless_somebody_decides(locks, clock):
    clock.now = utc.seconds(AS_OF) + SETTLED_SECONDS - 10
    wanted = locks.complete(OTHER)
    assert wanted.as_of == "" and wanted.assets_problem.startswith(
        "vllm 0.31.0 was published at 2026-11-01T10:00:00Z: it is installed from 2026-11-05T10:00:00Z on")
    decided = replace(OTHER, as_of="2026-11-01T12:00:00Z")
    assert locks.complete(decided).as_of == "2026-11-01T12:00:00Z"


def test_a_date_that_nobody_knows_is_asked_of_a_person(store, clock):
    lonely = EngineLocks(store, clock, Events(store, clock), None)
    assert "as_of: under engines: in server.yaml" in lonely.complete(OTHER).assets_problem
    with pytest.raises(NotFound, match="when vllm 0.31.0 was published is not known"):
        lonely.views(OTHER)


def test_what_github_answers_not_is_told_until_a_list_is_kept(locks, releases):
    releases.problem = "the date of vllm 0.31.0 is not known: api.example: no answer"
    assert locks.complete(OTHER).assets_problem == releases.problem
    releases.problem = ""
    locks.propose(OTHER, X86, AS_OF, FOUND, "n1")
    releases.problem = "no internet"
    assert locks.complete(OTHER).as_of == AS_OF    # it was known once


def test_another_date_means_another_list(locks):
    locks.propose(OTHER, X86, AS_OF, FOUND, "n1")
    assert locks.complete(replace(OTHER, as_of="2026-11-04T00:00:00Z")).locks == ()
    assert locks.complete(replace(DEFAULT, as_of="2026-11-04T00:00:00Z")).locks == ()


def test_relock_forgets_a_list_and_the_next_node_makes_one(locks):
    old = locks.propose(OTHER, X86, AS_OF, FOUND, "n1")
    assert locks.relock(OTHER) == [old]
    assert locks.complete(OTHER).locks == ((X86, ""),)     # nodes that have the old one are told
    with pytest.raises(NotFound):
        locks.text(OTHER, X86)
    new = locks.propose(OTHER, X86, AS_OF, FOUND.replace("3.20", "3.21"), "n2")
    assert new.sha256 != old.sha256 and locks.complete(OTHER).locks == ((X86, new.sha256),)


def test_relock_with_another_date_has_nodes_make_a_list_of_that_date(locks):
    old = locks.propose(OTHER, X86, AS_OF, FOUND, "n1")
    later = replace(OTHER, as_of="2026-12-24T00:00:00Z")
    assert locks.complete(later).locks == ()               # a date alone changes no node
    (told,) = locks.relock(later)
    assert (told.platform, told.sha256) == (X86, old.sha256) and locks.complete(later).locks == ((X86, ""),)
    assert locks.relock(later) == []                       # said once is enough
    default = replace(DEFAULT, as_of="2026-12-24T00:00:00Z")
    assert {view.platform for view in locks.relock(default)} == {ARM, X86}
    assert locks.complete(default).locks == ((ARM, ""), (X86, ""))


def test_relock_of_the_default_version_sets_the_shipped_list_aside(locks):
    assert len(locks.relock(DEFAULT)) == 2
    assert locks.complete(DEFAULT).locks == ((ARM, ""), (X86, ""))
    found = FOUND.replace("0.31.0", "0.30.0")
    made = locks.propose(DEFAULT, X86, "2026-09-23T05:22:21Z", found, "n1")
    assert dict(locks.complete(DEFAULT).locks) == {ARM: "", X86: made.sha256}
    assert locks.relock(DEFAULT) == [made]


def test_only_lists_that_came_with_llmgw_or_from_an_admin_are_vouched_for(locks):
    assert set(locks.complete(DEFAULT).vouched) == {view.sha256 for view in locks.views(DEFAULT)}
    found = locks.propose(OTHER, X86, AS_OF, FOUND, "n1")
    assert locks.complete(OTHER).vouched == ()
    mine = locks.vouch(OTHER, X86, AS_OF, FOUND)
    assert mine.sha256 == found.sha256 and mine.source == "admin" and locks.complete(OTHER).vouched == (mine.sha256,)
    other = locks.vouch(OTHER, X86, AS_OF, FOUND.replace("3.20", "3.21"))
    assert locks.complete(OTHER).locks == ((X86, other.sha256),)
    shipped = locks.vouch(DEFAULT, X86, "2026-09-23T05:22:21Z", locks.text(DEFAULT, X86))
    assert shipped.source == "llmgw"               # it is the same
    with pytest.raises(ParseError):
        locks.vouch(OTHER, X86, AS_OF, "--index-url https://evil.example")


def test_nobody_is_asked_about_python_engines_before_a_node_has_a_gpu(locks, releases, store, clock, tmp_path):
    engines = EngineAssets(Mirror(str(tmp_path / "mirror"), store, clock), releases, locks)
    assert engines.wanted(OTHER) == OTHER and releases.asked == []
    engines.has_gpus = True
    wanted = engines.wanted(replace(OTHER, tools=(Tool("uv", "0.14.0"),)))
    assert wanted.as_of == AS_OF and wanted.assets == ()
    assert [(tool.name, tool.version, [asset.name for asset in tool.assets]) for tool in wanted.tools] == [
        ("uv", "0.14.0", ["uv-x86_64-unknown-linux-musl.tar.gz"]),
        ("python", "3.12.16+20261110", ["cpython-3.12.16+20261110-x86_64-unknown-linux-gnu-install_only_stripped.tar.gz"])]


def test_a_release_without_an_archive_for_linux_is_told(locks, releases, store, clock, tmp_path):
    engines = EngineAssets(Mirror(str(tmp_path / "mirror"), store, clock), releases, locks)
    engines.has_gpus = True
    releases.assets = lambda engine, version: ((Asset("uv.zip", 1, "c" * 64),), "")
    assert [tool.problem for tool in engines.wanted(OTHER).tools] == [
        "the release of uv 0.13.9 has no archive for Linux", "the release of python 3.12.16+20261110 has no archive for Linux"]
