"""A lease gives back what it holds exactly once, whatever happens in whatever order."""
from __future__ import annotations

import asyncio
import itertools

import pytest

from llmgw.relay.lease import Lease, Outcome, Owner
from llmgw.relay.upstream import Target
from tests.fakes.upstream import Upstream, whole_answer

WIRE = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}"


class Watcher(Owner):
    def __init__(self):
        self.ends, self.failures, self.bodies = [], [], []
        self.over = asyncio.Event()

    def head_arrived(self, lease, head):
        lease.collect(1 << 20)

    def collected(self, lease, body):
        self.bodies.append(body)
        self.over.set()

    def failed(self, lease, outcome, why):
        self.failures.append(outcome)
        self.over.set()

    def ended(self, lease, outcome):
        self.ends.append(outcome)


class StandInRequest:
    """Only that it exists makes the lease count."""
    answered = False


async def run(port, before=()):
    """Run one lease to its end and return (target, owner, lease); ``before`` are steps right after its start."""
    target, owner = Target("127.0.0.1", port), Watcher()
    lease = Lease(owner, target, StandInRequest(), 60.0)
    lease.start(WIRE)
    assert target.in_flight == 1
    for step in before:
        step(lease)
    if not before:
        await asyncio.wait_for(owner.over.wait(), 40)
    await asyncio.sleep(0)
    return target, owner, lease


def test_a_whole_answer_of_the_stand_in_counts_once_and_keeps_the_connection():
    async def scenario():
        target, owner, lease = await run(engine.port)
        for outcome in Outcome:
            lease.release(outcome)
        assert target.in_flight == 0 and owner.ends == [Outcome.WHOLE] and len(owner.bodies) == 1
        assert len(target.idle) == 1
        target.retire()
        assert not target.idle

    with Upstream(lambda exchange: exchange.answer()) as engine:
        asyncio.run(scenario())


@pytest.mark.parametrize("steps", list(itertools.permutations(["release", "broken", "fail_now", "end_now"], 3)))
def test_any_order_of_ends_gives_back_once(steps):
    calls = {"release": lambda lease: lease.release(Outcome.GIVEN_UP), "broken": lambda lease: lease.broken("x"),
             "fail_now": lambda lease: lease.fail_now("x"), "end_now": lambda lease: lease.end_now("x")}

    async def scenario():
        target, owner, _ = await run(engine.port, [calls[step] for step in steps])
        assert target.in_flight == 0 and len(owner.ends) == 1 and len(owner.failures) <= 1

    with Upstream(whole_answer) as engine:
        asyncio.run(scenario())


def test_a_refused_connection_is_a_failure_before_a_byte():
    async def scenario():
        target, owner, _ = await run(port)
        assert target.in_flight == 0 and owner.failures == [Outcome.REFUSED] == owner.ends

    with Upstream() as engine:
        port = engine.port
    asyncio.run(scenario())


class SlowToLook(Target):
    """Its connection is over before whoever waits for it runs again, as happens under load."""

    async def connect(self):
        connection = await super().connect()
        while not connection.lost:
            await asyncio.sleep(0.001)
        return connection


def test_a_connection_that_ends_before_anyone_writes_on_it_is_a_failure_before_a_byte():
    """A write on it would vanish, and the request with it until its deadline of minutes."""
    async def reset(reader, writer):
        writer.transport.abort()

    async def scenario():
        server = await asyncio.start_server(reset, "127.0.0.1", 0)
        target, owner = SlowToLook("127.0.0.1", server.sockets[0].getsockname()[1]), Watcher()
        Lease(owner, target, StandInRequest(), 60.0).start(WIRE)
        await asyncio.wait_for(owner.over.wait(), 40)
        assert target.in_flight == 0 and owner.failures == [Outcome.REFUSED] == owner.ends and not target.idle
        server.close()
        await server.wait_closed()

    asyncio.run(scenario())


def test_silence_ends_at_its_limit():
    async def scenario():
        target, owner = Target("127.0.0.1", engine.port), Watcher()
        lease = Lease(owner, target, StandInRequest(), 10.0)
        lease.start(WIRE)
        for now, ended in ((100.0, False), (109.0, False), (110.1, True), (120.0, True)):
            lease.sweep(now, False)
            assert bool(owner.ends) is ended
        assert owner.failures == [Outcome.LATE] and target.in_flight == 0

    with Upstream(lambda exchange: exchange.wait_gone(40)) as engine:
        asyncio.run(scenario())


def test_a_client_that_holds_back_is_not_the_engines_silence():
    async def scenario():
        target, owner = Target("127.0.0.1", engine.port), Watcher()
        lease = Lease(owner, target, StandInRequest(), 10.0)
        lease.start(WIRE)
        lease.sweep(100.0, False)
        lease.sweep(200.0, True)
        lease.sweep(205.0, False)
        assert not owner.ends
        lease.release(Outcome.GIVEN_UP)

    with Upstream(lambda exchange: exchange.wait_gone(40)) as engine:
        asyncio.run(scenario())
