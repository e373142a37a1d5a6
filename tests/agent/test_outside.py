"""An engine that listens where other machines reach it is found out."""
from __future__ import annotations

import sys

import pytest

from llmgw.agent.readiness import MayListen, listens_outside
from llmgw.domain.command import Command
from llmgw.engines import registry
from llmgw.system import spawn
from tests.agent.conftest import wait_for

LISTEN = """
import socket, sys, time, subprocess
sockets = []
for host in sys.argv[1:]:
    sockets.append(socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET))
print("listens", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("hosts, outside", [(["127.0.0.1"], []), (["0.0.0.0"], ["0.0.0.0"]), (["127.0.0.1", "0.0.0.0"], ["0.0.0.0"]),
                                            (["::"], ["::"])])
def test_what_a_program_and_its_children_open_to_others_is_found(tmp_path, hosts, outside):
    marker = ("LLMGW_TEST_MARK", str(tmp_path))
    identity = spawn.start(Command((sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])", sys.executable,
                                    "-c", LISTEN, *hosts), env={"PATH": "/usr/bin:/bin"}), marker, str(tmp_path / "log"))
    try:
        wait_for(lambda: (tmp_path / "log").read_text(), what="it listens")
        assert "listens" in (tmp_path / "log").read_text() or pytest.skip("no IPv6 here")
        assert [where.split()[0] for where in listens_outside(identity)] == outside
        assert listens_outside(identity, MayListen(tuple(outside))) == ()
        ports = tuple(int(where.split()[-1]) for where in listens_outside(identity))
        assert listens_outside(identity, MayListen(ports=ports)) == listens_outside(identity, MayListen(more_ports=1)) == ()
    finally:
        assert spawn.stop(marker, grace_seconds=2.0) == []
        spawn.forget(identity.pid)


def test_one_port_more_than_may_be_open_shows_all_of_them(tmp_path):
    marker = ("LLMGW_TEST_MARK", str(tmp_path))
    identity = spawn.start(Command((sys.executable, "-c", LISTEN, "0.0.0.0", "0.0.0.0"), env={"PATH": "/usr/bin:/bin"}), marker, str(tmp_path / "log"))
    try:
        wait_for(lambda: (tmp_path / "log").read_text(), what="it listens")
        assert len(listens_outside(identity, MayListen(more_ports=1))) == 2
        assert listens_outside(identity, MayListen(more_ports=2)) == ()
    finally:
        assert spawn.stop(marker, grace_seconds=2.0) == []
        spawn.forget(identity.pid)


@pytest.mark.parametrize("name", sorted(registry.ENGINES))
def test_the_gate_lets_nothing_in_that_changes_or_opens_an_engine(name):
    allowed = registry.get(name).allowed_paths
    assert ("POST", "/v1/chat/completions") in allowed and ("GET", "/v1/models") in allowed
    for path in ("/invocations", "/tokenize", "/detokenize", "/pause", "/resume", "/sleep", "/wake_up", "/update_weights", "/update_weights_from_disk",
                 "/release_memory", "/flush_cache", "/reset_prefix_cache", "/collective_rpc", "/v1/load_lora_adapter", "/props", "/slots",
                 "/start_profile", "/docs", "/openapi.json", "/server_info", "/generate", "/abort_request", "/scale_elastic_ep"):
        assert ("POST", path) not in allowed, path
    assert all(path.startswith("/v1/") for method, path in allowed if method == "POST")
