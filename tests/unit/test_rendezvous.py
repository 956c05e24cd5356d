"""Ranks as threads: URLs, missing pieces, disagreements, worlds one after the other."""

import contextlib
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from effort import HANG_S, cases, judge_time, times
from launching import wait_until
from loops import each
from meeting import closed_together, env_of, meet, together
from unisono.engine.bootstrap.rendezvous import Rendezvous
from unisono.engine.environment import env
from unisono.engine.store import HashStore, NotOurServer, Store, StoreServer
from unisono.errors import RendezvousError, StoreError, StoreTimeout

# Coming together.


@pytest.mark.parametrize("scheme", ["tcp", "tcp6", "name", "file", "env", "store"])
@pytest.mark.parametrize("world_size", cases([1, 5], long=[2]))
def test_all_ranks_know_each_other(scheme: str, world_size: int, port: int, tmp_path: Path) -> None:
    shared = HashStore()
    method = {"tcp": f"tcp://127.0.0.1:{port}", "tcp6": f"tcp://[::1]:{port}", "name": f"tcp://localhost:{port}",
              "file": f"file://{tmp_path}/meet"}.get(scheme)  # fmt: skip

    def rank(number: int) -> Rendezvous:
        if scheme == "env":
            return meet("env://", settings=env_of(port, number, world_size))
        store = shared if scheme == "store" else None
        return meet(method, store=store, rank=number, world_size=world_size)

    worlds = together(*[lambda number=number: rank(number) for number in range(world_size)])
    for number, world in enumerate(worlds):
        assert (world.rank, world.world_size) == (number, world_size)
        assert [member.rank for member in world.members] == list(range(world_size))
        assert world.members == worlds[0].members
        assert {member.host for member in world.members} == {socket.gethostname()}
        world.store.set(f"from {number}", "x")
    worlds[0].store.wait([f"from {number}" for number in range(world_size)])
    closed_together(worlds)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("scheme", ["tcp", "file", "store"])
def test_worlds_one_after_the_other_in_one_store(scheme: str, port: int, tmp_path: Path) -> None:
    shared = HashStore()
    method = {"tcp": f"tcp://127.0.0.1:{port}", "file": f"file://{tmp_path}/meet"}.get(scheme)
    late = threading.Event()

    def rank(number: int) -> list[int]:
        came = []
        for turn in range(4):
            store = shared if scheme == "store" else None
            world = meet(method, store=store, rank=number, world_size=3, timeout_s=HANG_S)
            came.append(world.store.add("came", 1))
            world.store.set(f"{turn} {number}", "")
            world.store.wait([f"{turn} {other}" for other in range(3)])
            if number == turn % 3:
                late.wait(0.15)  # everybody is the last to close once
            world.close()
        return came

    results = together(*[lambda number=number: rank(number) for number in range(3)])
    assert [sorted(turn) for turn in zip(*results, strict=True)] == [[1, 2, 3]] * 4


def test_two_worlds_at_once_in_one_process(port: int) -> None:
    def rank(number: int) -> list[Rendezvous]:
        return [meet(f"tcp://127.0.0.1:{port}", rank=number, world_size=2) for _ in range(2)]

    first, second = zip(*together(lambda: rank(0), lambda: rank(1)), strict=True)
    first[0].store.set("k", "first")
    assert not second[0].store.check(["k"])
    closed_together(list(second))
    closed_together(list(first))


def test_a_hosted_store_makes_every_rank_a_client() -> None:
    with StoreServer() as server:
        ranks = [
            env_of(server.port, number, 2, UNISONO_STORE=f"127.0.0.1:{server.port}") for number in range(2)
        ]
        worlds = together(*[lambda mine=mine: meet(settings=mine) for mine in ranks])
        assert worlds[0].members == worlds[1].members
        closed_together(worlds)


def test_rank_and_size_come_from_arguments_then_url_then_environment(port: int) -> None:
    url = f"tcp://127.0.0.1:{port}?rank=0&world_size=1"
    for method, more in [(url, {}), (f"tcp://127.0.0.1:{port}", {"settings": env_of(1, 0, 1)})]:
        world = meet(method, **more)
        assert (world.rank, world.world_size) == (0, 1)
        world.close()
    world = meet(settings=env_of(port, 5, 9), rank=0, world_size=1)
    assert (world.rank, world.world_size) == (0, 1)
    world.close()


def test_close_twice_and_after_the_store_is_gone() -> None:
    with StoreServer() as server:
        world = meet(settings=env_of(server.port, 0, 1, UNISONO_STORE=f"127.0.0.1:{server.port}"))
    world.close()
    world.close()


# What is missing or wrong.


def test_each_missing_variable_is_named() -> None:
    with pytest.raises(RendezvousError, match="RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.*unisono run -n 2"):
        meet()
    with pytest.raises(RendezvousError, match="the environment variable MASTER_PORT, not set"):
        meet(settings=env.read({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}))
    with pytest.raises(RendezvousError, match=r"rank and world_size not given.*RANK, WORLD_SIZE"):
        meet("tcp://localhost:29500")
    with pytest.raises(RendezvousError, match="world_size not given"):
        meet(store=HashStore(), rank=0)


@each(
    ("method", "told"),
    [
        ("file://relative", "file:///relative"),
        ("file://some/where", "file:///some/where"),
        ("file:relative", "file:///relative"),
        ("file://", "file:///"),
        ("file:///", "file:///"),
        ("tcp://localhost", "host and a port"),
        ("tcp://:29500", "host and a port"),
        ("tcp://localhost:port", "port"),
        ("tcp://localhost:70000", "ort"),
        ("tcp://localhost:1/path", "host and a port"),
        ("tcp://[::1:29500", "IPv6"),
        ("udp://localhost:1", "env://, tcp://host:port or file:///path"),
        ("localhost:29500", "env://, tcp://host:port or file:///path"),
        ("", "env://, tcp://host:port or file:///path"),
        ("env://somewhere", "env://"),
        ("tcp://localhost:1?rank=one", "rank is a whole number, got 'one'"),
        ("tcp://localhost:1?rang=1", "unknown parameter 'rang'"),
    ],
)
def test_a_malformed_url_says_what_to_write(method: str, told: str) -> None:
    with pytest.raises(ValueError, match="init_method") as caught:
        meet(method, rank=0, world_size=1)
    assert told in str(caught.value)
    assert repr(method) in str(caught.value)


@each(("rank", "world_size"), [(2, 2), (-2, 2), (0, 0), (0, -3), (7, 2)])
def test_a_rank_out_of_range(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match=r"rank is from 0 to|world_size is at least 1"):
        meet("tcp://localhost:29500", rank=rank, world_size=world_size)


def test_a_rank_out_of_range_in_the_environment_names_the_variable() -> None:
    with pytest.raises(ValueError, match=r"rank \(RANK\) is from 0 to world_size - 1 = 1, got 5"):
        meet(settings=env_of(29500, 5, 2))


def test_arguments_that_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="exclude each other"):
        meet("env://", store=HashStore(), rank=0, world_size=1)
    with pytest.raises(ValueError, match=r"rank=1 and the init_method's rank=0 disagree"):
        meet("tcp://localhost:29500?rank=0", rank=1, world_size=2)


def test_a_foreign_program_on_the_master_port_is_told_by_all() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        done = threading.Event()

        def serve() -> None:
            listener.settimeout(0.05)
            while not done.is_set():
                with contextlib.suppress(TimeoutError), listener.accept()[0] as sock:
                    sock.sendall(b"220 mail.example.org ESMTP\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        errors = together(
            *[lambda r=r: meet(f"tcp://127.0.0.1:{port}", rank=r, world_size=2) for r in (0, 1)]
        )
        done.set()
        thread.join()
    for error in errors:
        assert isinstance(error, NotOurServer)
        assert f"127.0.0.1:{port}" in str(error)
        assert "220 mail" in str(error)


# Ranks that do not fit together.


def fast(ranks: list[Callable[[], Any]]) -> list[Any]:
    start = time.monotonic()
    results = together(*ranks)
    judge_time(time.monotonic() - start, 20)  # a second, and a busy machine; the limits are 60
    return results


@pytest.fixture(params=["tcp", "file", "store"])
def ways(request: pytest.FixtureRequest, port: int, tmp_path: Path) -> dict[str, Any]:
    """Arguments of `meet` for one way to come together."""
    if request.param == "store":
        return {"store": HashStore()}
    return {"method": f"tcp://127.0.0.1:{port}" if request.param == "tcp" else f"file://{tmp_path}/meet"}


@each("twice", [0, 1])
def test_a_rank_taken_twice_is_named_by_all(ways: dict[str, Any], twice: int) -> None:
    errors = fast([lambda r=r: meet(**ways, rank=r, world_size=3, timeout_s=HANG_S) for r in (0, 1, twice)])
    for error in errors:
        assert isinstance(error, RendezvousError)
        assert f"rank {twice} was taken twice" in str(error)
        assert "pid" in str(error)


def test_a_world_size_that_differs_is_named_by_all(ways: dict[str, Any]) -> None:
    errors = fast(
        [
            lambda r=r, n=n: meet(**ways, rank=r, world_size=n, timeout_s=HANG_S)
            for r, n in ((0, 3), (1, 4), (2, 3))
        ]
    )
    for error in errors:
        assert isinstance(error, RendezvousError)
        assert "disagree on the world size" in str(error)
        assert "says 3" in str(error) or "says 4" in str(error)
        assert "rank 1 (host" in str(error)


def test_those_who_did_not_come_are_named(ways: dict[str, Any]) -> None:
    start = time.monotonic()
    errors = together(*[lambda r=r: meet(**ways, rank=r, world_size=5, timeout_s=1.5) for r in (0, 2, 3)])
    judge_time(time.monotonic() - start, 20)
    for error in errors:
        assert isinstance(error, RendezvousError)
        assert "3 of 5 ranks joined within 1.5 s" in str(error)
        assert "missing ranks 1, 4" in str(error)


def test_after_a_failure_the_ranks_can_try_again(ways: dict[str, Any]) -> None:
    def rank(number: int, wrong: int) -> Rendezvous:
        with pytest.raises(RendezvousError):
            meet(**ways, rank=number, world_size=wrong)
        return meet(**ways, rank=number, world_size=2)

    for _ in range(
        times(usual=6, long=60)
    ):  # rank 1 may come back just when rank 0 closes the store of the failed world
        worlds = together(lambda: rank(0, 2), lambda: rank(1, 3))
        assert worlds[0].members == worlds[1].members
        closed_together(worlds)


def test_who_gave_up_does_not_count_as_having_come() -> None:
    store = HashStore()
    with pytest.raises(RendezvousError, match="1 of 2 ranks joined within 0.3 s.*missing rank 1"):
        meet(store=store, rank=0, world_size=2, timeout_s=0.3)
    [late] = fast([lambda: meet(store=store, rank=1, world_size=2, timeout_s=HANG_S)])
    assert isinstance(late, RendezvousError)
    assert "seen by rank 0 (host " in str(late)
    assert "missing rank 1" in str(late)
    worlds = together(*[lambda r=r: meet(store=store, rank=r, world_size=2) for r in (0, 1)])
    assert worlds[0].members == worlds[1].members
    closed_together(worlds)


def test_an_interrupted_rank_is_told_of_and_can_try_again() -> None:
    """Ctrl-C comes while the main thread waits for rank 2, which never comes."""
    store, ours = HashStore(), threading.main_thread().ident
    assert ours == threading.get_ident()

    def waits_for_a_key() -> bool:
        calls = [call.name for call in traceback.extract_stack(sys._current_frames()[ours])]
        return "get" in calls and calls[-1] == "wait"

    def ctrl_c() -> None:
        wait_until(waits_for_a_key)
        signal.pthread_kill(ours, signal.SIGINT)

    with ThreadPoolExecutor(2) as pool:
        heard = pool.submit(meet, store=store, rank=0, world_size=3, timeout_s=HANG_S)
        told = pool.submit(ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            meet(store=store, rank=1, world_size=3, timeout_s=HANG_S)
        told.result()
        with pytest.raises(RendezvousError, match=r"rank 1 \(host .* gave up .*KeyboardInterrupt"):
            heard.result(HANG_S)
    worlds = together(*[lambda r=r: meet(store=store, rank=r, world_size=2) for r in (0, 1)])
    assert worlds[0].members == worlds[1].members
    closed_together(worlds)


@each("scheme", ["tcp", "file", "store"])
def test_worlds_of_one_name_meet_whatever_the_order(scheme: str, port: int, tmp_path: Path) -> None:
    shared = HashStore()
    method = {"tcp": f"tcp://127.0.0.1:{port}", "file": f"file://{tmp_path}/meet"}.get(scheme)
    names = ["actor", "critic", "critic/0", "%2F", "a b", ""]
    tokens: dict[str, set[object]] = {name: set() for name in names}

    def rank(number: int, name: str) -> Rendezvous:
        time.sleep(0.1 * (names.index(name) if number else len(names) - names.index(name)))
        store = shared if scheme == "store" else None
        world = meet(method, store=store, rank=number, world_size=2, name=name)
        tokens[name].add(tuple(member.token for member in world.members))
        world.store.add("x", 1)
        assert world.store.check(["x"])
        return world

    worlds = together(*[lambda r=r, n=n: rank(r, n) for r in (0, 1) for n in names])
    assert not [world for world in worlds if isinstance(world, Exception)]
    assert len(set.union(*tokens.values())) == len(names)
    assert [worlds[names.index(name)].store.get("x") for name in names] == [b"2"] * len(names)
    together(*[world.close for world in worlds])


def test_names_that_waited_are_told_at_the_deadline() -> None:
    store = HashStore()
    coming = {0: "actor", 1: "critic", 2: "world"}
    ranks = [
        lambda r=r, n=n: meet(store=store, rank=r, world_size=3, name=n, timeout_s=1.5 + 0.2 * r)
        for r, n in coming.items()
    ]
    for number, error in enumerate(together(*ranks)):
        assert isinstance(error, RendezvousError)
        assert f"group={coming[number]} " in str(error)
        for other in coming.keys() - {number}:
            assert f"rank {other} waited for the group {coming[other]!r}" in str(error)


def test_names_of_earlier_worlds_are_not_told() -> None:
    store = HashStore()
    worlds = together(*[lambda r=r: meet(store=store, rank=r, world_size=2, name="actor") for r in (0, 1)])
    closed_together(worlds)
    with pytest.raises(RendezvousError, match="missing rank 1") as told:
        meet(store=store, rank=0, world_size=2, name="critic", timeout_s=0.6)
    assert "actor" not in str(told.value)


def test_a_latecomer_with_a_taken_rank_hurts_only_itself(port: int) -> None:
    worlds = together(*[lambda r=r: meet(f"tcp://127.0.0.1:{port}", rank=r, world_size=2) for r in (0, 1)])
    worlds[0].store.underlying.set(
        "unisono/meet/world/0/rank/1", b"\x94\x01\xa5other\x07\xa1t"
    )  # as if of another process
    with pytest.raises(RendezvousError, match="rank 1 was taken twice: by host other, pid 7"):
        meet(f"tcp://127.0.0.1:{port}", rank=1, world_size=2)
    worlds[0].store.set("k", "v")
    assert worlds[1].store.get("k") == b"v"
    closed_together(worlds)


def test_rank_0_missing_is_a_timeout_that_names_the_address(port: int) -> None:
    with pytest.raises(StoreTimeout, match=rf"127\.0\.0\.1:{port} within [0-2]\.?\d* s.*rank 0"):
        meet(f"tcp://127.0.0.1:{port}", rank=1, world_size=2, timeout_s=0.7)


def test_an_unknown_master_is_told_at_once() -> None:
    settings = env.read(
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "no-such.invalid", "MASTER_PORT": "1"}
    )
    with pytest.raises(StoreError, match="no-such.invalid:1"):
        meet(settings=settings, timeout_s=HANG_S)


def test_a_closing_rank_0_is_not_kept_by_a_dead_rank(port: int) -> None:
    def vanish(number: int) -> Rendezvous:
        world = meet(f"tcp://127.0.0.1:{port}", rank=number, world_size=2)
        if number == 1:
            underlying: Store = world.store.underlying
            underlying.close()  # what the kernel does for a killed process
        return world

    worlds = together(lambda: vanish(0), lambda: vanish(1))
    start = time.monotonic()
    worlds[0].close()
    judge_time(time.monotonic() - start, 3)
    worlds[1].close()


def test_a_world_of_one_needs_neither_store_nor_environment() -> None:
    world = meet(world_size=1)
    assert (world.rank, world.world_size, len(world.members)) == (0, 1, 1)
    world.close()
