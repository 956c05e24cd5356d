"""Connections between hosts: strangers at the door, ranks that cannot be reached, forks, and who is lost."""

import contextlib
import gc
import itertools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import ranks
import unisono as un
from effort import HANG_S, judge_time
from launching import wait_until
from unisono.engine.base.authentication import make_token
from unisono.engine.bootstrap.engine import EngineSettings, open_engine
from unisono.engine.bootstrap.host_connections import _HostConnector, connect_hosts
from unisono.engine.bootstrap.peer_info import Membership, exchange_peer_info, local_peer_info, version
from unisono.engine.costs.machine import DEFAULTS
from unisono.engine.environment.env import Settings
from unisono.engine.group import Group
from unisono.engine.group.native import NativeGroup
from unisono.engine.store import HashStore
from unisono.plans import ALGORITHMS


class Meddler(HashStore):
    """A store that does something when a key is set, before anybody can read it."""

    def __init__(self, key: str, meddle: Any) -> None:
        super().__init__(20.0)
        self._key, self._meddle = key, meddle

    def set(self, key: str, value: Any, timeout_s: float | None = None) -> None:
        super().set(key, self._meddle(value) if key == self._key else value, timeout_s)


def open_two(store: HashStore, **options: Any) -> list[Any]:
    """Two ranks on two hosts: their groups, or the errors."""
    settings = EngineSettings(1 << 20, -1.0, -1, ranks_per_host=1, **options)

    def opened(rank: int) -> Any:
        try:
            engine, hosts, *_ = open_engine(store, rank, 2, timeout_s=HANG_S, settings=settings)
        except un.RendezvousError as error:
            return error
        return NativeGroup(engine, rank, 2, "test", HANG_S, store, hosts=hosts)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(opened, range(2)))


def reduce_and_close(groups: list[Group]) -> None:
    def work(group: Group) -> None:
        group.all_reduce(x := np.ones(1000))
        assert (x == 2).all()
        group.close()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, groups))


def test_strangers_at_the_door_are_turned_away() -> None:
    strangers: list[socket.socket] = []

    def harass(value: bytes) -> bytes:
        [[host, port]] = msgspec.msgpack.decode(value)
        for greeting in (b"", b"GET / HTTP/1.0\r\n\r\n", os.urandom(4000), b"UNISONO\x01" + bytes(96)):
            strangers.append(socket.create_connection((host, port), HANG_S))
            strangers[-1].sendall(greeting)
        return value

    groups = open_two(Meddler("endpoint/1", harass))
    reduce_and_close(groups)
    for stranger in strangers:
        with stranger, pytest.raises(OSError):  # nobody listens any more
            socket.create_connection(stranger.getpeername(), 1).close()


class EndingStore(HashStore):
    """A store that ends while ranks wait for a key."""

    def __init__(self, key: str) -> None:
        super().__init__(20.0)
        self._key = key

    def get(self, key: str, timeout_s: float | None = None) -> bytes:
        value = super().get(key, timeout_s)
        if key == self._key:
            raise un.StoreError("the store's server closed the connection")
        return value


def test_a_store_that_ends_when_all_are_connected_ends_no_group() -> None:
    reduce_and_close(open_two(EndingStore("all connected")))


def test_a_crowd_of_silent_strangers_delays_nobody_for_long() -> None:
    strangers: list[socket.socket] = []

    def crowd(value: bytes) -> bytes:
        [[host, port]] = msgspec.msgpack.decode(value)
        strangers.extend(socket.create_connection((host, port), HANG_S) for _ in range(300))
        return value

    started = time.monotonic()
    groups = open_two(Meddler("endpoint/1", crowd))
    judge_time(time.monotonic() - started, 18)  # one after the other they would take 40 s
    reduce_and_close(groups)
    for stranger in strangers:
        stranger.close()


def test_tls_without_a_token_is_refused() -> None:
    with pytest.raises(ValueError, match="TLS needs the job's token"):
        open_two(HashStore(HANG_S), network=Settings(tls=True))


def test_a_process_for_tls_that_does_not_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    told = open_two(HashStore(HANG_S), network=Settings(tls=True, token=make_token()))
    assert all(isinstance(one, un.RendezvousError) for one in told)
    assert str(told[0]) == str(told[1])
    assert "cannot encrypt connections" in str(told[0])


def test_rank_that_cannot_be_reached_is_named_on_every_rank() -> None:
    told = open_two(Meddler("endpoint/1", lambda value: msgspec.msgpack.encode([["127.0.0.1", 1]])))
    assert all(isinstance(one, un.RendezvousError) for one in told)
    assert str(told[0]) == str(told[1])
    assert "rank 0" in str(told[0])
    assert "cannot reach rank 1" in str(told[0])
    assert "127.0.0.1:1 through lo (127.0.0.1)" in str(told[0])


def test_loopback_between_hosts_is_refused() -> None:
    store = HashStore(HANG_S)

    def join(rank: int) -> str:
        deadline = time.monotonic() + 20
        membership = exchange_peer_info(store, local_peer_info(rank, 1), 2, deadline, 1 << 20)
        peers = [msgspec.structs.replace(info, network=f"network {info.rank}") for info in membership.peers]
        membership = msgspec.structs.replace(membership, peers=peers)
        with pytest.raises(un.RendezvousError) as caught:
            connect_hosts(store, membership, rank, deadline=deadline, master="127.0.0.1", peer_timeout_s=10)
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        told = list(pool.map(join, range(2)))
    assert told[0] == told[1]
    assert "can only be reached at 127.0.0.1, which no other host can use" in told[0]
    assert "MASTER_ADDR" in told[0]


def test_ranks_with_engines_of_different_versions_are_told_before_they_connect() -> None:
    def newer(info: bytes) -> bytes:
        layout, rank, _, *rest = msgspec.msgpack.decode(info)
        return msgspec.msgpack.encode(
            [layout + 1, rank, "far", *rest[:2]]
        )  # whose peer info goes on otherwise

    store = Meddler("peer_info/1", newer)
    told = open_two(store)
    assert all(isinstance(one, un.RendezvousError) for one in told)
    assert str(told[0]) == str(told[1])
    mine = version(ALGORITHMS)
    versions = f"got version {mine + 1} on rank 1, expected {mine}, as on rank 0"
    for words in (
        "rank 1 (host far) and rank 0 (host ",
        "different builds",
        versions,
        "same build on all hosts",
    ):
        assert words in str(told[0])
    assert not store.check(["endpoint/1"])
    told = open_two(Meddler("peer_info/1", lambda _: msgspec.msgpack.encode([1, 4711, 90210, "old"])))
    assert "got version unknown on rank 1" in str(told[1])


def join_strange(size: int, rank: int, place: tuple[str, int], timeout_s: float) -> None:
    """Connect as one rank of many on as many hosts; all others are said to be reached at `place`."""
    info = local_peer_info(0, 1)
    peers = [msgspec.structs.replace(info, rank=each, memory_domain=str(each)) for each in range(size)]
    store = HashStore(HANG_S)
    store.set("endpoint/1", msgspec.msgpack.encode([place]))
    store.set("endpoints", msgspec.msgpack.encode([[place]] * size))
    membership = Membership(peers, bytes(32), 1 << 20, DEFAULTS)
    deadline = time.monotonic() + timeout_s
    connect_hosts(store, membership, rank, deadline=deadline, master="127.0.0.1", peer_timeout_s=10)


def test_the_last_of_many_ranks_keeps_to_its_deadline() -> None:
    started = time.monotonic()
    with pytest.raises(un.RendezvousError, match="1022 did not connect to rank 1023"):
        join_strange(1024, 1023, ("127.0.0.1", 1), 0.5)
    judge_time(time.monotonic() - started, 8)


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """Listens, and never says a word; afterwards no thread may have been left behind."""
    before = threading.enumerate()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener
        wait_until(lambda: set(threading.enumerate()) <= set(before))  # they would have stayed for 20 s


def test_an_interrupt_ends_the_threads_that_connect(silent: socket.socket) -> None:
    guests: list[socket.socket] = []

    def interrupt() -> None:
        guests.append(silent.accept()[0])
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    started = time.monotonic()
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        join_strange(2, 0, silent.getsockname(), HANG_S)
    thread.join()
    guests[0].close()
    judge_time(time.monotonic() - started, 15)  # they would have waited for 20 s


def test_a_thread_that_cannot_be_started_is_told(
    silent: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, count = threading.Thread.start, itertools.count()

    def limited(thread: threading.Thread) -> None:
        if next(count) == 2:  # after that which accepts and one that connects
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        join_strange(2, 0, silent.getsockname(), HANG_S)


def connectors() -> list[_HostConnector]:
    return [each for each in gc.get_objects() if type(each) is _HostConnector]


def test_nothing_is_kept_of_an_attempt_that_failed() -> None:
    gc.collect()
    gc.disable()
    try:
        earlier = connectors()  # threads of other tests may still hold theirs
        with contextlib.suppress(un.RendezvousError):
            join_strange(2, 0, ("127.0.0.1", 1), 20)
        assert all(any(each is one for one in earlier) for each in connectors())
    finally:
        gc.enable()


def test_child_of_a_fork_does_not_hide_the_death_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_RANKS_PER_HOST", "1")
    told = ranks.processes(2, Path(__file__).resolve().parent / "programs" / "dies_with_a_child.py")
    assert told[0].startswith("told")
    assert "rank 1 (host " in told[0]
    assert "died" in told[0]
