"""Groups that cannot be made: one rank fails, and all hear of it at once. Ranks as threads."""

import contextlib
import errno
import os
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import unisono as un
from effort import HANG_S, judge_time
from unisono import _native
from unisono.engine.bootstrap import engine, host_connections, peer_info, shared_memory
from unisono.engine.bootstrap.engine import EngineSettings, open_engine
from unisono.engine.bootstrap.liveness import LivenessMonitor
from unisono.engine.bootstrap.peer_info import Membership, PeerInfo, process_start_time
from unisono.engine.costs.machine import DEFAULTS
from unisono.engine.group import Group
from unisono.engine.group.native import NativeGroup
from unisono.engine.store import HashStore

AT_ONCE_S = 20.0  # less than the minute for which nobody is waited for, on a busy machine, too


def made(ranks: int | list[int], *, per_host: int = 0, timeout_s: float = HANG_S, size: int = 0) -> list[Any]:
    """What each rank, a thread named by its number, got: a group, or an error. At once, in any case."""
    numbers = list(range(ranks)) if isinstance(ranks, int) else ranks
    size = size or len(numbers)
    store = HashStore(HANG_S)
    settings = EngineSettings(1 << 16, -1.0, -1, per_host)

    def opened(rank: int) -> Any:
        threading.current_thread().name = str(rank)
        try:
            engine, hosts, *_ = open_engine(store, rank, size, timeout_s=timeout_s, settings=settings)
        except BaseException as error:
            return error
        return NativeGroup(engine, rank, size, "test", HANG_S, store, hosts=hosts)

    started = time.monotonic()
    with ThreadPoolExecutor(len(numbers)) as pool:
        results = list(pool.map(opened, numbers))
    judge_time(time.monotonic() - started, AT_ONCE_S)
    return results


def failing(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, rank: int, error: BaseException) -> None:
    """Let a function raise on one rank."""
    real = getattr(where, name)

    def instead(*arguments: Any, **options: Any) -> Any:
        if threading.current_thread().name == str(rank):
            if name == "Region":
                os.close(arguments[0])  # as it does
            raise error
        return real(*arguments, **options)

    monkeypatch.setattr(where, name, instead)


@pytest.mark.parametrize(
    ("where", "name", "error", "told"),
    [
        (host_connections, "listen", un.RendezvousError("no port is free"), "cannot listen: no port is free"),
        (
            host_connections,
            "listen",
            OSError(errno.EMFILE, "Too many open files"),
            "too many open files (the limit RLIMIT_NOFILE is",
        ),
        (engine, "share_memory", OSError("cannot allocate"), "OSError: cannot allocate"),
        (host_connections, "connect_hosts", KeyboardInterrupt(), "KeyboardInterrupt"),
    ],
)
@pytest.mark.parametrize("rank", [0, 2])
def test_between_hosts_a_failure_is_told_to_all(
    where: Any, name: str, error: BaseException, told: str, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, where, name, rank, error)
    results = made(3, per_host=1)
    own = results.pop(rank)
    assert type(own) is type(error)
    for heard in results:
        assert isinstance(heard, un.RendezvousError)
        assert f"rank {rank} (host " in str(heard)
        assert told in str(heard)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(("where", "name"), [(engine, "LivenessMonitor"), (_native, "Region")])
def test_on_one_host_a_failure_is_told_to_all(
    rank: int, where: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, where, name, rank, OSError("out of luck"))
    results = made(3)
    assert isinstance(results.pop(rank), OSError)
    for heard in results:
        assert isinstance(heard, un.RendezvousError)
        assert f"rank {rank} (host " in str(heard)
        assert "OSError: out of luck" in str(heard)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may stop the one who knows for longer than the others usually give it."""
    monkeypatch.setattr(peer_info, "GRACE_S", 60.0)
    monkeypatch.setattr(shared_memory, "GRACE_S", 60.0)


@pytest.mark.parametrize("per_host", [0, 1])
def test_all_name_the_rank_that_does_not_come(per_host: int, patient: None) -> None:
    results = made([0, 1, 3], size=4, per_host=per_host, timeout_s=1.5)
    for heard in results:
        assert isinstance(heard, un.RendezvousError)
        assert "rank 2 did not join the group" in str(heard)


def test_all_name_the_rank_that_does_not_come_to_the_memory(
    monkeypatch: pytest.MonkeyPatch, patient: None
) -> None:
    real = engine.share_memory

    def late(store: Any, rank: int, *arguments: Any, **options: Any) -> Any:
        if rank == 2:
            time.sleep(3.5)
        return real(store, rank, *arguments, **options)

    monkeypatch.setattr(engine, "share_memory", late)
    for heard in made(3, timeout_s=1.5)[:2]:
        assert isinstance(heard, un.RendezvousError)
        assert "rank 2 did not open the group's shared memory" in str(heard)


def test_without_rank_0_those_who_did_not_come_either_are_named() -> None:
    for heard in made([1, 3], size=4, timeout_s=0.5):
        assert isinstance(heard, un.RendezvousError)
        assert "rank 0 did not publish who is in the group" in str(heard)
        assert "no peer info of rank 2 either" in str(heard)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_after_memory_was_handed_out_is_lost_to_the_others(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, _native, "Engine", rank, OSError("no descriptors: \N{SNOWMAN}" + 200 * "x"))
    results = made(2)
    assert isinstance(results.pop(rank), OSError)
    [group] = results
    assert isinstance(group, Group)
    started = time.monotonic()
    with group, pytest.raises(un.PeerLost, match=f"rank {rank} .*OSError: no descriptors") as caught:
        group.barrier()
    judge_time(time.monotonic() - started, AT_ONCE_S)
    assert caught.value.pid == os.getpid()


def test_a_process_that_cannot_be_watched_is_not_said_to_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = [PeerInfo(1, rank, "a", os.getppid(), 1, "k", "n", "h", 0, "1") for rank in range(2)]
    membership = Membership(peers, b"", 0, DEFAULTS)
    with pytest.raises(un.RendezvousError, match="ended while"):  # another one has that number now
        LivenessMonitor(membership, [0, 1], 1)

    def refuses(pid: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", refuses)
    with pytest.raises(OSError, match=rf"cannot watch .* rank 0 \(pid {os.getppid()}\): Too many") as caught:
        LivenessMonitor(membership, [0, 1], 1)
    assert caught.value.errno == errno.EMFILE


def test_a_process_finds_the_start_time_that_others_find() -> None:
    """An emulator may show a process another one than the kernel shows the others."""
    seen = subprocess.run(["cat", f"/proc/{os.getpid()}/stat"], capture_output=True, check=True).stdout
    assert process_start_time(os.getpid()) == int(seen.rpartition(b")")[2].split()[19])


def test_a_rank_that_waits_for_the_first_one_does_not_end_with_another() -> None:
    """The other may have the memory already, and be in the group."""
    child = subprocess.Popen(["sleep", "60"])
    try:
        processes = [os.getppid(), os.getpid(), child.pid]
        peers = [
            PeerInfo(1, rank, "a", pid, process_start_time(pid), "k", "n", "h", 0, "1")
            for rank, pid in enumerate(processes)
        ]
        liveness = LivenessMonitor(Membership(peers, b"", 0, DEFAULTS), [0, 1, 2], 1)
    finally:
        child.kill()
        child.wait()
    mine, other = socket.socketpair()
    with mine, other, contextlib.closing(liveness):
        with pytest.raises(un.RendezvousError, match="rank 2 .* ended while"):
            liveness.wait_for(mine, time.monotonic() + 1.0)
        with pytest.raises(TimeoutError):
            liveness.wait_for(mine, time.monotonic() + 0.1, only=0)
        other.send(b"\1")
        liveness.wait_for(mine, time.monotonic() + 1.0, only=0)
