"""Nodes of one job over a real store: how they agree on the end, also when one is away for a while."""

import io
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import inside
from effort import HANG_S
from ports import reserved
from unisono.commands.launch import nodes as module
from unisono.commands.launch.job import Job
from unisono.commands.launch.nodes import NodeExit, NodeRendezvous, SupervisorMessages
from unisono.engine.base.authentication import JobToken
from unisono.engine.store import StoreServer, TCPStore
from unisono.errors import StoreTimeout


class Together:
    """The nodes of a job that have met; `watched` ends when all that watch know of the end."""

    def __init__(self, count: int, server: StoreServer, grace_s: float = 30.0) -> None:
        options = {"command": ("true",), "world_size": 1, "shown": (3,), "logged": (0,), "grace_s": grace_s}
        self.stores = [TCPStore(server.host, server.port, timeout_s=HANG_S) for _ in range(count)]
        self.nodes = [
            NodeRendezvous(Job(**options, nnodes=count, node_rank=number), store)  # type: ignore[arg-type]
            for number, store in enumerate(self.stores)
        ]
        self.pool = ThreadPoolExecutor(count)
        list(self.pool.map(lambda node: node.meet(1), self.nodes))

    def settled(self) -> int:
        return self.stores[0].add("unisono/launch/settled", 0)

    def report_end(self, *numbers: int) -> list[list[NodeExit]]:
        return list(self.pool.map(lambda number: self.nodes[number].report_end(None, 0), numbers))

    def close(self) -> None:
        for node, store in zip(self.nodes, self.stores, strict=True):
            node.close()
            store.close()
        self.pool.shutdown()


@pytest.fixture
def three() -> Iterator[Together]:
    server = StoreServer("127.0.0.1")
    together = Together(3, server)
    yield together
    together.close()
    server.close()


def test_all_learn_how_it_ended_everywhere(three: Together) -> None:
    for finals in three.report_end(0, 1, 2):
        assert {final.node for final in finals} == {0, 1, 2}
        assert not any(final.given_up for final in finals)
    assert three.settled() == 3


def test_a_node_that_comes_back_is_not_counted_twice(
    three: Together, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node 0 ends the store when as many as there are have read: another one would not have by then."""
    monkeypatch.setattr(module, "SILENT_S", 1.0)
    monkeypatch.setattr(module, "BEAT_S", 0.05)
    told = [threading.Event(), threading.Event()]
    three.nodes[0].watch(told[0].set)
    three.nodes[2].watch(told[1].set)  # node 1 does not: it is stopped
    assert all(event.wait(HANG_S) for event in told)
    assert "node 1" in three.nodes[2].end.text  # type: ignore[union-attr]
    assert three.settled() == 1
    for number, finals in enumerate(three.report_end(0, 1, 2)):
        given_up = {final.node for final in finals if final.given_up}
        assert given_up == (set() if number == 1 else {1})
        assert {final.node for final in finals} == {0, 1, 2}
    assert three.settled() == 3


def test_who_did_well_and_is_given_up_afterwards_counts_once(three: Together) -> None:
    """Both words look alike but for one field."""
    pending = three.pool.submit(three.nodes[1].report_end, None, 0)
    three.stores[0].wait(["unisono/launch/final/1"])
    inside.give_up(three.nodes[0], 1)
    assert three.settled() == 0
    three.report_end(0, 2)
    pending.result(HANG_S)
    assert three.settled() == 3


def test_a_word_that_breaks_off_is_a_failure_for_all(three: Together) -> None:
    """Its supervisor was killed while it wrote."""
    news = SupervisorMessages(io.StringIO('{"failure": [2, "exit co'), three.nodes[1])
    news.thread.join(HANG_S)
    assert three.stores[0].check(["unisono/launch/end"])
    pending = three.pool.submit(three.nodes[1].report_end, news.failure, news.stopped)
    for finals in three.report_end(0, 2):
        assert [final.node for final in finals if final.failure is not None] == [1]
    pending.result(HANG_S)


def test_a_beat_that_is_not_answered_is_followed_by_the_next(
    three: Together, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BEAT_S", 0.02)
    beat, beats = getattr(three.nodes[1], inside.BEAT), []

    def unanswered_once(timeout_s: float) -> None:
        beats.append(timeout_s)
        if len(beats) == 1:
            raise StoreTimeout("no answer")
        beat(timeout_s)

    monkeypatch.setattr(three.nodes[1], inside.BEAT, unanswered_once)
    pending = three.pool.submit(inside.keep_beating, three.nodes[1])
    three.stores[0].wait(["unisono/launch/beat/1"])
    three.nodes[1].close()
    pending.result(HANG_S)


def test_the_last_node_may_come_in_the_last_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MEET_S", -1.0)  # the time was up before the plan was asked for
    server = StoreServer("127.0.0.1")
    with TCPStore(server.host, server.port, timeout_s=HANG_S) as store:
        job = Job(command=("true",), world_size=1, shown=(3,), logged=(0,))
        assert NodeRendezvous(job, store).meet(1).world_size == 1
    server.close()


def test_a_store_that_is_anothers_by_now_is_one_that_does_not_answer() -> None:
    with reserved() as port:
        server = StoreServer("127.0.0.1", port)
        two = Together(2, server, grace_s=0.0)
        node = two.nodes[0]
        server.close()
        other = StoreServer(server.host, port, token=JobToken(b"x" * 32))
        told = threading.Event()
        node.announce("nobody hears it", 1)
        node.watch(told.set)
        assert told.wait(HANG_S) and node.end is not None and "is gone" in node.end.text
        assert [final.node for final in node.report_end(None, 0)] == [0]
        two.close()
        other.close()
