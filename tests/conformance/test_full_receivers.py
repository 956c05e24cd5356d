"""A receiver that stores no more of a rank's messages and says so, and says that it has room again."""

import itertools
import threading

import numpy as np

import ranks
import unisono as un
from effort import HANG_S
from loops import everywhere


def nearly_full(group: un.Group, stored: threading.Event) -> tuple[np.ndarray, np.ndarray]:
    """Two messages of rank 0, which rank 1 stores. After the next one rank 0 offers what it sends."""
    first, second = np.ones(20 << 20, np.uint8), np.ones((12 << 20) - 8192, np.uint8)
    if group.rank == 0:
        un.wait_all([group.isend(first, 1, 1), group.isend(second, 1, 2)])
        stored.set()
    while not stored.is_set():
        group.iprobe(0)
    return first, second


def test_a_receiver_is_full_when_a_message_without_copy_has_begun() -> None:
    """Its header found no room in the ring, and it was offered then: neither it nor the next one ended."""
    full, asks, told, sent = (threading.Event() for _ in range(4))

    def work(group: un.Group) -> None:
        stored = nearly_full(group, full)
        small = [np.full(16384 - 16, number, np.uint8) for number in range(8)]
        large = [np.full(1 << 20, number, np.uint8) for number in range(4)]
        if group.rank == 0:
            group.isend(small[0], 1, 3).wait()
            asks.set()
            assert told.wait(HANG_S)
            for number, x in enumerate(small):  # they fill the ring
                group.send(x, 1, 10 + number)
            works = [group.isend(x, 1, 20 + number) for number, x in enumerate(large)]
            sent.set()
            un.wait_all(works)
            return
        assert asks.wait(HANG_S)
        group.probe(0, 3)
        told.set()
        sent.wait(2)
        while not sent.is_set():  # rank 0 waits where another of its threads had the lock
            group.iprobe(0)
        messages = [*stored, small[0]], small, large
        tags = [1, 2, 3, *range(10, 18), *range(20, 24)]
        for tag, x in reversed(list(zip(tags, itertools.chain(*messages), strict=True))):
            got = np.zeros_like(x)
            group.recv(got, 0, tag)
            assert (got == x).all(), tag

    ranks.threads(2, work)


def test_a_receiver_that_has_room_again_says_so_last() -> None:
    full, asks, sends, told, answered, received = (threading.Event() for _ in range(6))

    def work(group: un.Group) -> None:
        first, second = nearly_full(group, full)
        small, back = np.ones(16384, np.uint8), np.ones(400_000, np.uint8)
        if group.rank == 0:
            assert asks.wait(HANG_S)
            group.send(small, 1, 3)
            sends.set()
            assert told.wait(HANG_S)
            group.recv(back, 1)
            assert answered.wait(HANG_S)
            assert not group.iprobe(1)
            assert group.isend(small, 1, 4).done(), "it is not offered: rank 1 has room"
            received.set()
            return
        answer = group.isend(back, 0)  # fills the ring
        asks.set()
        assert sends.wait(HANG_S)
        group.probe(0, 3)
        group.recv(first, 0, 1)
        told.set()
        answer.wait()
        group.iprobe(0)
        answered.set()
        assert received.wait(HANG_S)
        for x, tag in ((second, 2), (small, 3), (small, 4)):
            group.recv(x, 0, tag)

    ranks.threads(2, work)


@everywhere
def test_a_cancelled_receive_leaves_its_message_to_the_next() -> None:
    """The first waits until the send of its memory is done, and would get the message then."""

    def work(group: un.Group) -> None:
        x, y = np.zeros(10_000_000), np.zeros(1)
        if group.rank == 0:
            group.send(np.ones(1), 1, 1)
            group.send(y, 1, 2)
            group.recv(y, 1, 3)
            group.recv(x, 1, 4)
            return
        sent = group.isend(x, 0, 4)  # too much to be stored
        first, second = group.irecv(x[:1], 0, 1), group.irecv(y, 0, 1)
        group.recv(np.zeros(1), 0, 2)
        assert first.cancel()
        second.wait()
        group.send(y, 0, 3)
        sent.wait()
        assert (x[0], y[0]) == (0, 1)

    ranks.threads(2, work)
