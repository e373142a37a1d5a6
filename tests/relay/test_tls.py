"""The relay with TLS on both of its sides: bytes, back-pressure and hanging up are as without."""
from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import ssl
import subprocess
import sys
from dataclasses import replace

import pytest

from llmgw.api import wire
from llmgw.domain.gate import GateEntry, GateTable
from llmgw.relay import tls_door
from llmgw.relay.listener import Listener
from llmgw.relay.server import HIGH_WATER_BYTES
from llmgw.system import files, tls
from tests.fakes import router_process
from tests.fakes.certificates import TestCa
from tests.fakes.raw_client import request
from tests.fakes.router_process import REPLICA_KEY, RouterProcess
from tests.fakes.upstream import DONE, Upstream, delta, wait_for
from tests.relay.test_stall import PIECE, Flood

GATE = "0123456789ab.gate.llmgw.internal"
SECONDS = 60


@pytest.fixture(scope="module")
def ca(tmp_path_factory):
    return TestCa(tmp_path_factory.mktemp("ca"))


def connect(port, context, name="127.0.0.1"):
    plain = socket.create_connection(("127.0.0.1", port), SECONDS)
    try:
        return context.wrap_socket(plain, server_hostname=name)
    except BaseException:
        plain.close()
        raise


async def in_thread(*call):
    return await asyncio.wait_for(asyncio.get_running_loop().run_in_executor(None, *call), SECONDS)


def test_a_tls_client_that_takes_nothing_is_held_in_bounded_memory_and_seen_to_leave(ca):
    async def scenario():
        flood = Flood()
        listener = Listener(flood)
        port = await listener.listen("127.0.0.1", 0, tls.server_context(*ca.certificate("127.0.0.1")))
        client = await in_thread(connect, port, tls.client_context(ca.pem))
        client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        await asyncio.wait_for(flood.paused.wait(), SECONDS)
        connection, = listener.connections
        # of TLS there are two buffers: what is not encrypted yet, and what is
        assert flood.sent > HIGH_WATER_BYTES > len(PIECE)
        assert connection.transport.get_write_buffer_size() <= 2 * HIGH_WATER_BYTES + 2 * len(PIECE)
        client.close()
        await asyncio.wait_for(flood.gone.wait(), SECONDS)
        assert listener.connections == set()
        await listener.close()
    asyncio.run(scenario())


@pytest.mark.slow
def test_stalled_handshakes_plain_peers_and_crowds_hinder_nobody(ca):
    async def scenario():
        flood = Flood()
        flood.paused.set()
        listener = Listener(flood)
        port = await listener.listen("127.0.0.1", 0, tls.server_context(*ca.certificate("127.0.0.1")))
        silent = [await in_thread(socket.create_connection, ("127.0.0.1", port), SECONDS) for _ in range(100)]
        door = listener._door
        elsewhere = await in_thread(socket.create_connection, ("127.0.0.1", port), SECONDS, ("127.0.0.2", 0))
        client = await in_thread(lambda: tls.client_context(ca.pem).wrap_socket(elsewhere, server_hostname="127.0.0.1"))
        assert 0 < max(door._shaking.values()) <= tls_door.MAX_HANDSHAKES
        client.close()
        for sock in silent:
            sock.settimeout(SECONDS)
            assert await in_thread(_is_closed, sock)
            sock.close()
        with socket.create_connection(("127.0.0.1", port), SECONDS) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            answer = await in_thread(_all_of, plain)
        assert answer.startswith(b"HTTP/1.1 400 ") and answer.endswith(b"\r\n\r\nthis port speaks TLS: use https://\n")
        assert int(answer.split(b"Content-Length: ")[1].split(b"\r\n")[0]) == len(answer.split(b"\r\n\r\n")[1])
        with pytest.raises(ssl.SSLError):
            await in_thread(connect, port, tls.nobody_context())
        (await in_thread(connect, port, tls.client_context(ca.pem))).close()
        until = asyncio.get_running_loop().time() + SECONDS
        while door._shaking and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.01)
        assert not door._shaking
        listener.stop_accepting()
        again = await listener.listen("127.0.0.1", port, tls.server_context(*ca.certificate("127.0.0.1")))
        assert again == port                      # the old socket is gone at once
        (await in_thread(connect, port, tls.client_context(ca.pem))).close()
        await listener.close()
    asyncio.run(scenario())


def _is_closed(sock):
    try:
        return sock.recv(1) == b""
    except OSError:
        return True


def _all_of(sock):
    data = b""
    while True:
        more = sock.recv(4096)
        if not more:
            return data
        data += more


class Chain:
    """client → router → gate → stand-in engine, the two hops in the middle and the first with TLS."""

    def __init__(self, folder, ca, engine, name=GATE):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.gate_port = probe.getsockname()[1]
        path = os.path.join(str(folder), "gate.json")
        entry = GateEntry("m-1", hashlib.sha256(REPLICA_KEY.encode()).hexdigest(), "llama.cpp", engine.port, 1)
        files.write_atomic(path, wire.dumps(wire.GATE_TABLE, GateTable(
            "127.0.0.1", self.gate_port, (entry,), ca.both(GATE))))
        self.gate = subprocess.Popen([sys.executable, "-W", "error", "-m", "llmgw", "gate", "--table", path])
        wait_for(self._is_up, what="the gate")
        routed = router_process.replica(self.gate_port, tls_name=name)
        routes = replace(router_process.table(replace(router_process.model(), replicas=(routed,))), ca=ca.pem)
        certificate, key = ca.certificate("127.0.0.1")
        (folder / "router").mkdir()
        self.router = RouterProcess(folder / "router", routes, "--tls-certificate", certificate, "--tls-key", key,
                                    env={"SSL_CERT_FILE": ca.files[0]})
        self.trust = tls.client_context(ca.pem)

    def _is_up(self):
        try:
            socket.create_connection(("127.0.0.1", self.gate_port), 5).close()
            return True
        except OSError:
            return False

    def open(self, body=router_process.chat()):
        client = connect(self.router.port, self.trust)
        client.settimeout(SECONDS)
        client.sendall(request("POST", "/v1/chat/completions", body, router_process.KEY))
        return client

    def close(self):
        self.router.stop()
        self.gate.terminate()
        self.gate.wait(SECONDS)


@pytest.fixture
def chain(tmp_path, ca):
    started = []

    def start(engine, **more):
        started.append(Chain(tmp_path, ca, engine, **more))
        return started[-1]
    yield start
    for one in started:
        one.close()


def test_a_stand_in_engines_stream_comes_through_byte_for_byte(chain):
    events = [delta(f"{number} " + "ü" * (number % 300)) for number in range(400)]

    def answer(exchange):
        exchange.begin_stream()
        for event in events:
            exchange.chunk(event)
        exchange.chunk(DONE)
        exchange.end_stream()
    with Upstream(answer) as engine:
        client = chain(engine).open()
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            data += client.recv(1 << 16)
        client.close()
    body, text = data.split(b"\r\n\r\n", 1)[1], b""
    while body and not body.startswith(b"0\r\n"):
        size, _, rest = body.partition(b"\r\n")
        text, body = text + rest[:int(size, 16)], rest[int(size, 16) + 2:]
    assert text == b"".join(events) + DONE


def test_a_client_that_hangs_up_ends_the_stand_in_engines_work(chain):
    ended = []

    def answer(exchange):
        exchange.begin_stream()
        exchange.chunk(delta("a"))
        ended.append(exchange.wait_gone(SECONDS))
    with Upstream(answer) as engine:
        client = chain(engine).open()
        while b"data:" not in client.recv(1 << 16):
            pass
        client.close()
        wait_for(lambda: ended == [True], SECONDS, "the engine's seeing it")


def test_a_client_that_reads_nothing_holds_the_stand_in_engine_back(chain):
    sent = []

    def answer(exchange):
        exchange.begin_stream()
        exchange.sock.settimeout(2.0)
        try:
            while sum(sent) < 200 << 20:
                exchange.chunk(delta("x" * 60000))
                sent.append(60000)
        except OSError:
            sent.append(0)
    with Upstream(answer) as engine:
        client = chain(engine).open()
        wait_for(lambda: sent and sent[-1] == 0, SECONDS, "the engine's being held back")
        assert sum(sent) < 100 << 20
        client.close()


def test_a_gate_with_another_name_is_sent_nothing(chain):
    with Upstream() as engine:
        client = chain(engine, name="ffff.gate.llmgw.internal").open()
        assert b" 50" in client.recv(1 << 16)[:20] and not engine.requests
        client.close()
