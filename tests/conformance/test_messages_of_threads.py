"""Messages of several Python threads: none mixes with another, and none stops the other threads."""

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

import ranks
import unisono as un
from effort import HANG_S

SIZES = (
    0,
    3,
    900,
    5_000,
    70_000,
    1_300_000,
)  # below and above what the engine sends at once, copies, sends with zero copy
THREADS = 4


def of(thread: int, index: int) -> dict[str, Any]:
    return {"thread": thread, "index": index, "bytes": bytes([thread]) * SIZES[(thread + index) % len(SIZES)]}


@pytest.mark.parametrize("per_host", [None, 1])
def test_objects_of_threads_to_one_rank_and_tag(per_host: int | None) -> None:
    count = 40
    got: list[dict[str, Any]] = []

    def work(group: un.Group) -> None:
        def send(thread: int) -> None:
            for index in range(count):
                group.send_object(of(thread, index), 1)

        def receive(_: int) -> None:
            for _ in range(count):
                got.append(group.recv_object(0))

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(send if group.rank == 0 else receive, range(THREADS)))

    ranks.threads(2, work, per_host=per_host)
    got.sort(key=lambda one: (one["thread"], one["index"]))
    assert got == [of(thread, index) for thread in range(THREADS) for index in range(count)]


@pytest.mark.parametrize("per_host", [None, 1])
def test_objects_from_any_rank_with_any_tag(per_host: int | None) -> None:
    def work(group: un.Group) -> None:
        if group.rank > 0:
            group.send_object(of(group.rank, 1), 0, tag=group.rank)
        else:
            came = [group.recv_object(None, un.ANY_TAG) for _ in range(group.size - 1)]
            assert sorted(came, key=lambda one: int(one["thread"])) == [of(1, 1), of(2, 1), of(3, 1)]

    ranks.threads(4, work, per_host=per_host)


@pytest.mark.parametrize("per_host", [None, 1])
@pytest.mark.parametrize("nbytes", SIZES)
def test_object_of_every_size_to_itself_and_before_its_receive(per_host: int | None, nbytes: int) -> None:
    sent = bytes(range(256)) * (nbytes // 256) + bytes(nbytes % 256)

    def work(group: un.Group) -> None:
        sender = ThreadPoolExecutor(1)  # a zero-copy message has left when it was received
        for peer in (group.rank, 1 - group.rank):
            leaving = sender.submit(group.send_object, sent, peer, 7)
            group.probe(peer, 7)
            assert group.recv_object(peer, 7) == sent
            leaving.result()
        sender.shutdown()

    ranks.threads(2, work, per_host=per_host)


def test_array_for_a_receiver_of_objects_ends_in_a_mismatch() -> None:
    def work(group: un.Group) -> None:
        if group.rank == 0:
            group.send(np.arange(3), 1)
        else:
            group.recv_object(0)

    with pytest.raises(un.Mismatch, match="object"):
        ranks.threads(2, work)


def test_close_by_another_thread_is_group_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither way gets the bytes: another thread closes the group between them."""
    monkeypatch.setattr(un.Group, "_recv_object", lambda *_: None, raising=False)
    with pytest.raises(un.GroupClosed, match="closed by another thread"):
        ranks.threads(1, lambda group: group.recv_object(0))


def test_interrupt_leaves_whole_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes when the engine returns: what it was given has left as a whole."""
    pass_on = un.Group._send_object

    def interrupted(group: un.Group, *arguments: Any) -> Any:
        pass_on(group, *arguments)
        raise KeyboardInterrupt

    def work(group: un.Group) -> Any:
        if group.rank == 1:
            return [group.recv_object(0), group.recv_object(0)]
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(un.Group, "_send_object", interrupted, raising=False)
            group.send_object("first", 1)
        return group.send_object("second", 1)

    assert ranks.threads(2, work)[1] == ["first", "second"]


NUMEL = 64 << 20  # f32: 256 MiB, which two threads copy in 25 ms
LARGEST_PART = 0.5  # of the copy's time: it was all of it while the GIL was held, whatever else runs
GAP_S = 0.015
LONGEST_S = 400.0


def longest_gap(call: Any) -> tuple[float, float]:
    """Between two steps of another Python thread while `call` runs: in seconds, and of the call's time."""
    ticks: list[float] = []
    stop = threading.Event()
    started = threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks.append(time.perf_counter())
            started.set()
            time.sleep(0.0005)

    thread = threading.Thread(target=tick)
    thread.start()
    started.wait()
    began = time.perf_counter()
    call()
    ticks.append(ended := time.perf_counter())
    stop.set()
    thread.join()
    gap_s = max(later - sooner for sooner, later in itertools.pairwise(ticks))
    return gap_s, gap_s / (ended - began)


@pytest.mark.parametrize("first", ["isend", "irecv"])
def test_other_python_threads_go_on_while_a_large_message_is_copied(first: str) -> None:
    """In one of many tries: the machine may be busy."""
    sender, receiver = ranks.groups(2, cores=2)
    x, got = np.ones(NUMEL, np.float32), np.zeros(NUMEL, np.float32)

    def both() -> None:
        if first == "isend":
            works = [sender.isend(x, 1), receiver.irecv(got, 0)]
        else:
            works = [receiver.irecv(got, 0), sender.isend(x, 1)]
        for work in works:
            work.wait()

    try:
        parts, end = [longest_gap(both)[1]], time.monotonic() + LONGEST_S
        while min(parts) >= LARGEST_PART and time.monotonic() < end:
            parts.append(longest_gap(both)[1])
    finally:
        sender.close()
        receiver.close()
    assert got[0] == got[-1] == 1
    assert min(parts) < LARGEST_PART, parts


@pytest.mark.parametrize("per_host", [None, 1])
def test_small_call_keeps_no_large_message(per_host: int | None) -> None:
    """A large message of another tag is arriving: memory for it is not made while the GIL is held."""
    sender, receiver = ranks.groups(2, cores=2, zero_copy=False, per_host=per_host)
    large, small = np.ones(63 << 20, np.uint8), np.ones(1)
    got_large, got_small = np.zeros_like(large), np.zeros_like(small)  # TSan sees no order behind a socket
    gaps = []
    try:
        for _ in range(5):
            leaving = [sender.isend(large, 1, 1), sender.isend(small, 1, 2)]
            time.sleep(0.05)  # the header has arrived
            arriving: list[Any] = []
            gaps.append(
                longest_gap(lambda arriving=arriving: arriving.append(receiver.irecv(got_small, 0, 2)))[0]
            )
            receiver.recv(got_large, 0, 1)
            for work in leaving + arriving:
                work.wait()
    finally:
        sender.close()
        receiver.close()
    assert got_small == 1 and got_large.all()
    assert min(gaps) < GAP_S, gaps


def test_second_check_of_arguments_reads_what_the_first_cannot() -> None:
    def work(group: un.Group) -> Any:
        group.send_object([1], np.int64(group.rank))
        return group.recv_object(np.int64(group.rank), timeout=timedelta(seconds=600))

    assert ranks.threads(1, work, timeout_s=HANG_S) == [[1]]
