"""Synchronous sends, strided arrays, and more receives and tags than a table begins with."""

import numpy as np

import ranks
import unisono as un
from loops import each, everywhere


@each("numel", [1, 6000, 400_000])
@everywhere
def test_a_synchronous_send_is_done_when_a_receive_has_matched(numel: int) -> None:
    def work(group: un.Group) -> None:
        me, peer = group.rank, 1 - group.rank
        x, y = np.full(numel, 1.0 + me), np.empty(numel)
        works = [group.isend(x, to, 4, synchronous=True) for to in (peer, me)]
        group.send(np.zeros(1), peer, 5)  # passes the other one
        group.recv(np.zeros(1), peer, 5)
        assert group.iprobe(peer, 4) is not None
        assert not any(work.done() for work in works)
        group.barrier()
        for source, sent in ((peer, works[0]), (me, works[1])):
            assert group.recv(y, source, 4) == source
            assert (y == 1.0 + source).all()
            sent.wait()

    ranks.threads(2, work)


@everywhere
def test_a_strided_array_is_packed_by_its_sender() -> None:
    def work(group: un.Group) -> None:
        peer, whole = 1 - group.rank, np.arange(24.0).reshape(4, 6)
        for x in (whole.T, whole[:, ::2], whole[::-1], whole[1:3, 2]):
            group.send(x, peer)
            got = np.empty(x.shape)
            group.recv(got, peer)
            assert (got == x).all()
            group.isend(x, peer).wait()
            group.recv(got, peer)
            assert (got == x).all()

    ranks.threads(2, work)


@everywhere
def test_many_receives_and_tags() -> None:
    """Enough for the tables of receives and of kept messages to grow."""
    count = 1000

    def work(group: un.Group) -> None:
        peer, got = 1 - group.rank, np.full(count, -1)
        works = [group.irecv(got[i : i + 1], peer if i % 2 else None, i) for i in range(count)]
        group.barrier()
        for i in reversed(range(count)):
            group.send(np.array([i]), peer, i)
        un.wait_all(works)
        assert (got == np.arange(count)).all()
        for i in reversed(range(count)):
            group.send(np.array([i]), peer, i)
        group.barrier()
        x = np.zeros(1, np.int64)
        for i in range(0, count, 2):
            assert group.recv(x, peer, i).tag == x[0] == i
        for i in range(count - 1, 0, -2):
            assert group.recv(x, None, un.ANY_TAG).tag == x[0] == i

    ranks.threads(2, work)
