"""Nodes of one job over a real store: how they agree on the end, also when one is away for a while."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from unisono.launch import nodes as module
from unisono.launch.job import Job
from unisono.launch.nodes import Final, Nodes
from unisono.store import StoreServer, TCPStore


class Together:
    """The nodes of a job that have met; `watched` ends when all that watch know of the end."""

    def __init__(self, count: int, server: StoreServer) -> None:
        options = {"command": ("true",), "world_size": 1, "shown": (3,), "logged": (0,), "grace_s": 30.0}
        self.stores = [TCPStore(server.host, server.port, timeout_s=30.0) for _ in range(count)]
        self.nodes = [
            Nodes(Job(**options, nnodes=count, node_rank=number), store)  # type: ignore[arg-type]
            for number, store in enumerate(self.stores)
        ]
        self.pool = ThreadPoolExecutor(count)
        list(self.pool.map(lambda node: node.meet(1), self.nodes))

    def settled(self) -> int:
        return self.stores[0].add("unisono/launch/settled", 0)

    def settle(self, *numbers: int) -> list[list[Final]]:
        return list(self.pool.map(lambda number: self.nodes[number].settle(None, 0), numbers))

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
    for finals in three.settle(0, 1, 2):
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
    assert all(event.wait(30) for event in told)
    assert "node 1" in three.nodes[2].end.text  # type: ignore[union-attr]
    assert three.settled() == 1
    for number, finals in enumerate(three.settle(0, 1, 2)):
        given_up = {final.node for final in finals if final.given_up}
        assert given_up == (set() if number == 1 else {1})
        assert {final.node for final in finals} == {0, 1, 2}
    assert three.settled() == 3


def test_who_did_well_and_is_given_up_afterwards_counts_once(three: Together) -> None:
    """Both words look alike but for one field."""
    pending = three.pool.submit(three.nodes[1].settle, None, 0)
    three.stores[0].wait(["unisono/launch/final/1"])
    three.nodes[0]._give_up(1)
    assert three.settled() == 0
    three.settle(0, 2)
    pending.result(30)
    assert three.settled() == 3
