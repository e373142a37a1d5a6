"""A new version beside the old one, what is kept for going back, and an engine that nobody wants any more."""
from __future__ import annotations

import dataclasses
import os
import pathlib

import pytest

from tests.agent.conftest import wait_for
from tests.fakes.control_plane import engine_of, shard_of

pytestmark = pytest.mark.slow


def version_of(plane, archive, tag):
    """The same build under another spelling of its number: to the node that is another version."""
    asset = dataclasses.replace(engine_of(archive).assets[0], name=archive.name.replace("b10991", tag))
    plane.assets[asset.name] = pathlib.Path(archive.path)
    return dataclasses.replace(engine_of(archive), version=tag, assets=(asset,))


def test_the_new_one_comes_beside_the_old_one_that_serves_and_one_old_one_is_kept(served, node, plane, llama_archive,
                                                                                gemma_weights):
    engines, first = node.data / "engines" / "llama.cpp", node.engines()
    second, third = (version_of(plane, llama_archive, tag) for tag in ("b010991", "b0010991"))

    def usable(item):
        return lambda seen: any(engine.version == item.version and engine.usable for engine in seen.engines)
    plane.want([second], [served])
    seen = plane.wait(usable(second))
    assert usable(engine_of(llama_archive))(seen) and sorted(os.listdir(engines)) == ["b010991", "b10991"]
    assert node.engines() == first and node.ask(served.key.reveal())[0] == 200

    plane.want([second], [served, shard_of(gemma_weights, "r2.0", name="new", version="b010991")])
    node.ready("r2.0")
    (new,) = set(node.engines()) - set(first)
    assert "/b010991/" in os.readlink(f"/proc/{new}/exe")

    plane.want([third], [shard_of(gemma_weights, "r2.0", name="new", version="b010991")])
    plane.wait(usable(third))
    assert new in node.engines() and "b010991" in os.listdir(engines)

    plane.want([third], [])
    wait_for(lambda: sorted(os.listdir(engines)) == ["b0010991", "b010991"], what="the oldest is gone")
    beats = plane.heartbeats
    wait_for(lambda: plane.heartbeats > beats + 3, what="some more turns")
    assert sorted(os.listdir(engines)) == ["b0010991", "b010991"], "one is kept for going back"
    plane.want([second], [])
    plane.wait(usable(second), 60)
    assert sum(llama_archive.name.replace("b10991", "b010991") in asked for asked in plane.ranges) == 1, "without a download"

    plane.want([], [])
    wait_for(lambda: os.listdir(engines) == [], what="an engine that is not wanted at all leaves nothing")
    plane.wait(lambda seen: seen.engines == ())
