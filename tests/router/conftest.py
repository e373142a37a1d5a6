"""Routers and stand-ins that end with the test."""
from __future__ import annotations

import contextlib

import pytest

from tests.fakes.router_process import RouterProcess, StandInControlPlane, model, table
from tests.fakes.upstream import Upstream, wait_for, whole_answer


@pytest.fixture
def ends():
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def upstream(ends):
    """Start a stand-in engine that answers as told."""
    return lambda answer=whole_answer, **more: ends.enter_context(Upstream(answer, **more))


@pytest.fixture
def router(tmp_path, ends):
    """Start a router: with ports, one model ``m`` has a replica at each; else with the table given."""
    count = iter(range(10))

    def start(*ports_or_table, options=(), env=None, folder=None):
        if folder is None:
            folder = tmp_path / f"router{next(count)}"
            folder.mkdir()
        routes = ports_or_table[0] if len(ports_or_table) == 1 and not isinstance(ports_or_table[0], int) else (
            table(model(*ports_or_table)))
        started = RouterProcess(folder, routes, *options, env=env)
        ends.callback(started.stop)
        return started

    return start


@pytest.fixture
def control_plane(ends):
    """A stand-in for the control plane."""
    plane = StandInControlPlane()
    ends.callback(plane.close)
    return plane


@pytest.fixture
def token_file(tmp_path):
    path = tmp_path / "token"
    path.write_text("llmgw_router_00000000_x\n")
    return str(path)


@pytest.fixture
def nothing_in_flight():
    """Wait until a router counts nothing any more."""
    def check(started):
        wait_for(lambda: started.in_flight() == 0 and started.metrics()["llmgw_router_active_requests"] == 0,
                 what="nothing in flight")
    return check


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A stand-in engine and a router before it, for tests that leave nothing behind."""
    with Upstream() as engine:
        started = RouterProcess(tmp_path_factory.mktemp("shared"), table(model(engine.port)))
        try:
            yield engine, started
        finally:
            started.stop()


@pytest.fixture(autouse=True)
def forget_requests(request):
    if "shared" in request.fixturenames:
        request.getfixturevalue("shared")[0].requests.clear()
