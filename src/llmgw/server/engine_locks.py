"""The fleet's lists of packages: one per engine, version and platform, so that every node has the same environment.

A list comes with llmgw, or is the first that a node found. No node is trusted with
it: each resolves for itself and refuses what differs.
"""
from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import Any, Dict, List, Mapping, Optional, Tuple

from llmgw.api import wire
from llmgw.domain.engine import EngineWanted
from llmgw.domain.errors import Conflict, NotFound, ParseError
from llmgw.domain.view import LockView
from llmgw.engines import recipes
from llmgw.engines.recipes import RECIPES, Recipe
from llmgw.parse import lock, utc
from llmgw.server import records
from llmgw.server.events import Events
from llmgw.server.store import ABSENT, Compare, Delete, Operation, Put, Store
from llmgw.system import shipped
from llmgw.system.clock import Clock

log = logging.getLogger(__name__)

SETTLED_SECONDS = 3 * utc.DAY_SECONDS      # a package that turns out to be bad is withdrawn within that time
LLMGW, ADMIN = "llmgw", "admin"
_PLATFORM = re.compile(r"(x86_64|aarch64)-manylinux_[0-9]{1,2}_[0-9]{1,3}(-ray)?")


class EngineLocks:
    """``releases`` says when a version was published; None on a site without internet."""

    def __init__(self, store: Store, clock: Clock, events: Events, releases: Optional[Any],
                 known: Mapping[str, Recipe] = RECIPES) -> None:
        self._known = known
        self._store, self._clock, self._events, self._releases = store, clock, events, releases
        self._shipped: Dict[Tuple[str, str], Tuple[LockView, ...]] = {}

    def as_of(self, engine: EngineWanted) -> Tuple[str, str]:
        """Return the time whose packages are taken, or in words why there is none yet."""
        if engine.as_of:
            return engine.as_of, ""
        published = self._known[engine.name].published.get(engine.version, "")
        if not published and self._releases is not None:
            published, problem = self._releases.published(engine.name, engine.version)
            if problem:
                kept = self._kept_as_of(engine)
                return kept, "" if kept else problem
        if not published:
            return "", (f"when {engine.name} {engine.version} was published is not known: "
                        "as_of: under engines: in server.yaml says whose packages to take")
        cut_off = utc.later(published, utc.DAY_SECONDS)
        settled = utc.later(cut_off, SETTLED_SECONDS)
        if self._clock.wall() < utc.seconds(settled):
            return "", (f"{engine.name} {engine.version} was published at {published}: it is installed from {settled} "
                        "on, when bad packages of those days have been withdrawn (as_of: in server.yaml decides "
                        "otherwise)")
        return cut_off, ""

    def _kept_as_of(self, engine: EngineWanted) -> str:
        """Return the date of the list that is kept already: it was known once, and may be unreachable now."""
        found = [wire.LOCK_VIEW.decode(entry.value, entry.key)
                 for entry in self._store.range(f"{records.LOCKS}{engine.name}/{engine.version}/")]
        return max((view.as_of for view in found), default="")

    def complete(self, engine: EngineWanted) -> EngineWanted:
        """Return the engine with its date and the digests of its lists, or with the reason why there is no date."""
        as_of, problem = self.as_of(engine)
        kept = self._views(engine.name, engine.version, as_of) if as_of else []
        return replace(engine, as_of=as_of, locks=tuple((view.platform, view.sha256) for view in kept),
                       vouched=tuple(view.sha256 for view in kept if view.sha256 and view.source in (LLMGW, ADMIN)),
                       assets_problem=problem)

    def views(self, engine: EngineWanted) -> List[LockView]:
        """Return the lists that are in force, by platform."""
        as_of, problem = self.as_of(engine)
        if not as_of:
            raise NotFound(problem)
        return self._views(engine.name, engine.version, as_of)

    def _views(self, name: str, version: str, as_of: str) -> List[LockView]:
        found = {view.platform: view for view in self._of_llmgw(name, version) if view.as_of == as_of}
        for entry in self._store.range(f"{records.LOCKS}{name}/{version}/"):
            view = wire.LOCK_VIEW.decode(entry.value, entry.key)
            if view.as_of == as_of:
                found[view.platform] = view
        return [found[platform] for platform in sorted(found)]

    def _of_llmgw(self, name: str, version: str) -> Tuple[LockView, ...]:
        if (name, version) not in self._shipped:
            text, recipe = shipped.lock(name, version), self._known[name]
            self._shipped[name, version] = () if text is None else _shipped_views(name, version, text, recipe)
        return self._shipped[name, version]

    def _earlier(self, engine: EngineWanted) -> List[LockView]:
        """Return the lists of this version by whatever date, one per platform."""
        found = {view.platform: view for view in self._of_llmgw(engine.name, engine.version)}
        for entry in self._store.range(f"{records.LOCKS}{engine.name}/{engine.version}/"):
            view = wire.LOCK_VIEW.decode(entry.value, entry.key)
            found[view.platform] = view
        return [view for view in found.values() if view.sha256]

    def text(self, engine: EngineWanted, platform: str) -> str:
        """Return the list in force; NotFound while there is none."""
        for view in self.views(engine):
            if view.platform == platform and view.sha256:
                if view.source == LLMGW:
                    return lock.write(lock.read(shipped.lock(engine.name, engine.version) or "", "the shipped list"))
                entry = self._store.get(records.LOCK_TEXTS + view.sha256)
                if entry is not None:
                    return str(entry.value["text"])
        raise NotFound(f"there is no list of the packages of {engine.name} {engine.version} for {platform:.60} yet")

    def propose(self, engine: EngineWanted, platform: str, as_of: str, text: str, node: str) -> LockView:
        """Keep what a node found when nothing is kept yet, and return what is in force."""
        view, text = self._view(engine, platform, as_of, text, f"node/{node}")
        while True:
            found = next((item for item in self._views(engine.name, engine.version, as_of)
                          if item.platform == platform and item.sha256), None)
            if found is not None:
                return found
            if self._keep(view, text):
                self._events.add(f"engine/{engine.name}", "PackagesListed",
                                 f"{engine.name} {engine.version}: {view.packages} packages for {platform} "
                                 f"as of {as_of}, first found by node {node}")
                return view

    def vouch(self, engine: EngineWanted, platform: str, as_of: str, text: str) -> LockView:
        """Keep an admin's list, whatever was kept: nodes without an index may install it as it is."""
        view, text = self._view(engine, platform, as_of, text, ADMIN)
        for found in self._views(engine.name, engine.version, as_of):
            if (found.platform, found.source, found.sha256) == (platform, LLMGW, view.sha256):
                return found
        while not self._keep(view, text):
            continue
        self._events.add(f"engine/{engine.name}", "PackagesListed",
                         f"{engine.name} {engine.version}: {view.packages} packages for {platform} as of {as_of}, "
                         "named by an admin")
        return view

    def _view(self, engine: EngineWanted, platform: str, as_of: str, text: str, source: str) -> Tuple[LockView, str]:
        """Return a list that may be kept, and its text; refuse one for something else."""
        pins = lock.read(text, f"the list of {source:.70}")
        wanted, problem = self.as_of(engine)
        if as_of != wanted:
            raise Conflict(problem or f"{engine.name} {engine.version} is wanted as of {wanted}, not {as_of:.40}")
        if not _PLATFORM.fullmatch(platform):
            raise ParseError(f"not a platform: {platform!r:.60}")
        package = self._known[engine.name].package
        if not any((pin.name, pin.version) == (package, engine.version) for pin in pins):
            raise ParseError(f"the list of {source:.70} does not hold {package} {engine.version}")
        return LockView(engine.name, engine.version, platform, as_of, lock.digest(pins), len(pins), source,
                        self._clock.wall()), lock.write(pins)

    def _keep(self, view: LockView, text: str) -> bool:
        key = _key(view)
        before = self._store.get(key)
        operations: List[Operation] = [Put(key, wire.LOCK_VIEW.encode(view)),
                                       Put(records.LOCK_TEXTS + view.sha256, {"text": text})]
        compare = Compare(key, before.revision if before is not None else ABSENT)
        return self._store.txn([compare], operations) is not None

    def relock(self, engine: EngineWanted) -> List[LockView]:
        """Forget the lists in force, or of an earlier date: the next node makes new ones. Return what was forgotten."""
        views = self.views(engine)
        gone = [view for view in views if view.sha256] or [
            replace(view, as_of=self.as_of(engine)[0]) for view in self._earlier(engine)
            if view.platform not in {known.platform for known in views}]
        for view in gone:
            empty = replace(view, sha256="", packages=0, source="", made_at=self._clock.wall())
            self._store.txn([], [Put(_key(view), wire.LOCK_VIEW.encode(empty)),
                                 Delete(records.LOCK_TEXTS + view.sha256)])
            log.info("list of packages forgotten engine=%s version=%s platform=%s sha256=%s", view.engine, view.version,
                     view.platform, view.sha256)
        if gone:
            self._events.add(f"engine/{engine.name}", "PackagesForgotten",
                             f"{engine.name} {engine.version}: a new list of packages is made by the next node")
        return gone


def _shipped_views(name: str, version: str, text: str, recipe: Recipe) -> Tuple[LockView, ...]:
    pins = lock.read(text, f"the shipped list of {name} {version}")
    as_of = utc.later(recipe.published[version], utc.DAY_SECONDS)
    return tuple(LockView(name, version, recipes.platform(recipe, arch), as_of, lock.digest(pins), len(pins), LLMGW)
                 for arch in recipes.ARCHES)


def _key(view: LockView) -> str:
    return f"{records.LOCKS}{view.engine}/{view.version}/{view.platform}"
