"""Point-to-point messages: matching, order, deadlocks that must not be, and overlap with collectives."""

import threading

import numpy as np
import pytest

import ranks
import unisono as un
from effort import cases
from loops import each, everywhere
from unisono.engine.diagnosis import fault_reader

SIZES = [0, 1, 5, 1000, 32 * 1024, 32 * 1024 + 1, 400_000]


@each("size", [2, 3, 5])
@everywhere
def test_ring_of_messages_of_many_sizes(size: int) -> None:
    def work(group: un.Group) -> None:
        right, left = (group.rank + 1) % size, (group.rank - 1) % size
        for numel in SIZES:
            mine, got = np.full(numel, group.rank, np.float64), np.empty(numel)
            assert group.sendrecv(mine, right, got, left) == left
            assert (got == left).all()

    ranks.threads(size, work)


@each("numel", SIZES)
@everywhere
def test_two_ranks_that_both_send_first_do_not_deadlock(numel: int) -> None:
    def work(group: un.Group) -> None:
        peer = 1 - group.rank
        got = np.empty(numel)
        group.send(np.full(numel, group.rank + 5.0), peer)
        assert group.recv(got, peer) == peer
        assert (got == peer + 5).all()

    ranks.threads(2, work)


@everywhere
def test_tags_pick_messages_out_of_order() -> None:
    def work(group: un.Group) -> None:
        if group.rank == 0:
            for tag in (3, 1, 2, 1):
                group.send(np.array([tag * 10, tag]), 1, tag)
            return
        x = np.zeros(2, np.int64)
        seen = []
        for tag in (1, 2, 3, un.ANY_TAG):
            group.recv(x, 0, tag)
            seen.append(tuple(x))
        assert seen == [(10, 1), (20, 2), (30, 3), (10, 1)]

    ranks.threads(2, work)


@everywhere
def test_large_message_asked_for_while_it_arrives() -> None:
    """The first chunk is kept before anybody asks for this tag; the asker gets all of it."""

    def work(group: un.Group) -> None:
        big = np.arange(300_000.0)
        if group.rank == 0:
            group.send(big, 1, 7)
            group.send(np.array([1.0]), 1, 8)
        else:
            first = group.irecv(x := np.zeros(1), 0, 8)
            second = group.irecv(y := np.empty_like(big), 0, 7)
            second.wait()
            first.wait()
            assert x[0] == 1
            assert (y == big).all()

    ranks.threads(2, work)


@everywhere
def test_receive_from_anybody() -> None:
    def work(group: un.Group) -> None:
        if group.rank:
            group.send(np.array([group.rank]), 0)
            return
        x = np.zeros(1, np.int64)
        sources = set()
        for _ in range(group.size - 1):
            source = group.recv(x)
            assert x[0] == source
            sources.add(source)
        assert sources == set(range(1, group.size))

    ranks.threads(5, work)


@everywhere
def test_message_to_oneself() -> None:
    def work(group: un.Group) -> None:
        group.send(np.array([4.0]), group.rank)
        x = np.zeros(1)
        assert group.recv(x, group.rank) == group.rank
        later = group.irecv(y := np.zeros(1), group.rank)
        group.send(np.array([5.0]), group.rank)
        later.wait()
        assert (x[0], y[0]) == (4, 5)

    ranks.threads(1, work)
    ranks.threads(2, work)


@each("size", [2, 4])
@everywhere
def test_messages_overlap_collectives(size: int) -> None:
    def work(group: un.Group) -> None:
        works, inboxes = [], []
        for number in range(20):
            for peer in range(size):
                if peer != group.rank:
                    inboxes.append((np.empty(1000 * number), peer, number))
                    works.append(group.irecv(inboxes[-1][0], peer, number))
                    works.append(
                        group.isend(np.full(1000 * number, group.rank * 100.0 + number), peer, number)
                    )
            x = np.ones(10_000)
            works.append(group.all_reduce(x, async_op=True))
        for one in works:
            assert one is not None
            one.wait()
        for inbox, peer, number in inboxes:
            assert (inbox == peer * 100 + number).all()

    ranks.threads(size, work)


@everywhere
def test_works_keep_their_buffers_alive() -> None:
    def work(group: un.Group) -> None:
        peer = 1 - group.rank
        for number in range(50):
            group.isend(np.full(100_000, number), peer)
        got = np.empty(100_000, np.int64)
        for number in range(50):
            group.recv(got, peer)
            assert (got == number).all()
        group.barrier()

    ranks.threads(2, work)


@everywhere
def test_wrong_size_or_dtype_is_a_mismatch_on_both_ranks() -> None:
    def work(group: un.Group) -> None:
        if group.rank == 0:
            group.send(np.zeros(3), 1)
        with pytest.raises(un.Mismatch):
            if group.rank == 1:
                group.recv(np.zeros(2), 0)
            else:
                group.barrier()

    ranks.threads(2, work)


@each(
    ("call", "text"),
    [
        (lambda g: g.send(np.zeros(1), 5), "rank 5 is not in group"),
        (lambda g: g.send(np.zeros(1), None), "rank None is not in group"),
        (lambda g: g.recv(np.zeros(1), 0, -2), "tag is -2"),
        (lambda g: g.send(np.zeros(1), 0, un.ANY_TAG), "tag is -1"),
        (lambda g: g.recv(np.frombuffer(b"12345678"), 0), "read-only"),
    ],
)
@everywhere
def test_wrong_arguments(call, text: str) -> None:
    def work(group: un.Group) -> None:
        with pytest.raises(ValueError, match=text):
            call(group)

    ranks.threads(1, work)


@each("numel", [1, 400_000])
@everywhere
def test_batch_of_messages_completes_in_any_order_it_is_listed_in(numel: int) -> None:
    def work(group: un.Group) -> None:
        inboxes = {peer: np.empty(numel) for peer in range(group.size) if peer != group.rank}
        messages: list[un.SendTo | un.RecvFrom] = []
        for peer, inbox in inboxes.items():
            messages += [
                un.SendTo(np.full(numel, group.rank + 0.5), peer, 3),
                un.RecvFrom(inbox, peer, tag=3),
            ]
        messages = messages[group.rank :] + messages[: group.rank]
        works = group.batch(messages)
        for message, one in zip(messages, works, strict=True):
            one.wait()
            assert one.source == (message.dst if isinstance(message, un.SendTo) else message.src)
        assert all((inbox == peer + 0.5).all() for peer, inbox in inboxes.items())
        assert group.batch([]) == []

    ranks.threads(4, work)


@everywhere
def test_wrong_batch_posts_nothing() -> None:
    def work(group: un.Group) -> None:
        peer, x = 1 - group.rank, np.zeros(1)
        with pytest.raises(ValueError, match="batch: rank 7 is not in group"):
            group.batch([un.SendTo(np.ones(1), peer), un.RecvFrom(x, 7)])
        with pytest.raises(TypeError, match="batch: message 1 is a tuple, expected SendTo or RecvFrom"):
            group.batch([un.SendTo(np.ones(1), peer), (x, peer)])  # type: ignore[list-item]
        with pytest.raises(ValueError, match="batch: x is read-only"):
            group.batch([un.SendTo(np.ones(1), peer), un.RecvFrom(np.frombuffer(b"12345678"), peer)])
        group.send(np.full(1, 7.0), peer)
        group.recv(x, peer)
        assert x[0] == 7

    ranks.threads(2, work)


@each("asked_first", [True, False])
@everywhere
def test_message_that_does_not_fit_shows_both_sides(
    asked_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fault_reader, "SOURCE_LINE_PATIENCE_S", 20)  # a rank may get no turn for a while

    def work(group: un.Group) -> None:
        with pytest.raises(un.Mismatch) as caught:
            if group.rank == 0:
                if asked_first:
                    group.recv(np.zeros(2, np.int64), 1, 4)
                group.recv(np.zeros(1), 1, 9)
                group.recv(np.zeros(2, np.int64), 1, 4)
            else:
                if not asked_first:
                    group.send(np.zeros(3, np.float32), 0, 4)
                    group.send(np.zeros(1), 0, 9)
                group.send(np.zeros(3, np.float32), 0, 4)
                group.recv(np.zeros(1), 0)
        text = str(caught.value)
        assert "message from rank 1 with tag 4" in text
        assert "rank 0 expected in recv at " in text
        assert "test_messages.py:" in text
        assert "got float32[3], expected int64[2]" in text

    ranks.threads(2, work)


@everywhere
def test_objects() -> None:
    def work(group: un.Group) -> None:
        mine = {"rank": group.rank, "list": [1, 2.5, None, "ä"]}
        everybody = [{"rank": rank, "list": [1, 2.5, None, "ä"]} for rank in range(group.size)]
        assert group.all_gather_object(mine) == everybody
        assert group.gather_object(mine, 1) == (everybody if group.rank == 1 else None)
        assert group.broadcast_object(mine if group.rank == 2 else None, 2) == everybody[2]
        assert group.scatter_object(everybody if group.rank == 0 else None) == mine
        right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        group.send_object(mine, right)
        assert group.recv_object(left) == everybody[left]

    ranks.threads(3, work)


@everywhere
def test_a_flood_of_messages_that_nobody_asks_for_does_not_hold_up_a_timeout() -> None:
    def work(group: un.Group) -> None:
        if group.rank == 0:
            with pytest.raises(un.Timeout):
                group.recv(np.zeros(1), 1, tag=1, timeout=0.3)
            return
        with pytest.raises(un.GroupError):
            while True:
                group.send(np.zeros(1), 0)

    ranks.threads(2, work)


@each("numel, count", cases([(1_000_000, 12), (4096, 2300)], long=[(6_000_000, 3)]))
@everywhere
def test_tags_are_taken_in_any_order_beyond_the_limit_of_unexpected_messages(numel: int, count: int) -> None:
    """72 to 144 MB; 64 MiB are stored."""

    def work(group: un.Group) -> None:
        if group.rank == 0:
            un.wait_all([group.isend(np.full(numel, tag, np.float64), 1, tag) for tag in range(count)])
            return
        x = np.empty(numel)
        for tag in reversed(range(count)):
            status = group.probe(tag=tag)
            assert (status.source, status.numel) == (0, numel)
            group.recv(x, None, tag)
            assert (x == tag).all()

    ranks.threads(2, work)


@everywhere
def test_a_sender_waits_while_nobody_takes_what_it_has_sent() -> None:
    sent = []
    sending = threading.Event()

    def work(group: un.Group) -> None:
        x = np.empty(1_000_000)
        if group.rank == 0:
            for number in range(30):
                group.send(np.full(1_000_000, number, np.float64), 1)
                sent.append(number)
                sending.set()
            group.send(x, 1, 1)
            return
        last = group.irecv(np.empty(1_000_000), 0, 1)  # a receive for what comes last fills no memory
        assert sending.wait(30)
        with pytest.raises(un.Timeout):
            last.wait(1)
        assert len(sent) < 12, "8 MB each; 64 MiB are stored"
        for number in range(30):
            group.recv(x, 0)
            assert (x == number).all()
        last.wait()

    ranks.threads(2, work)


@each("numel", [3, 1000, 5000, 100_000, 5_000_000])
@everywhere
def test_exchange_in_place(numel: int) -> None:
    def work(group: un.Group) -> None:
        peer, n = 1 - group.rank, numel
        for way in ("sendrecv", "shifted", "batch", "batch reversed", "isend", "isend, recv"):
            x = np.arange(n + 1.0) + group.rank * n
            sent, got = x[:n], x[1:] if way == "shifted" else x[:n]
            expected = np.arange(float(n)) + peer * n
            pair = [un.RecvFrom(got, peer), un.SendTo(sent, peer)]
            if way in ("sendrecv", "shifted"):
                group.sendrecv(sent, peer, got, peer)
            elif way.startswith("batch"):
                un.wait_all(group.batch(pair[:: -1 if way == "batch" else 1]))
            else:
                works = [group.isend(sent, peer)]
                if way == "isend":
                    works.append(group.irecv(got, peer))
                else:
                    group.recv(got, peer)
                un.wait_all(works)
            assert (got == expected).all(), way

    ranks.threads(2, work)


@each("seen", [False, True])
@everywhere
def test_memory_of_a_receive_is_its_own_until_the_caller_knows_its_end(seen: bool) -> None:
    calls = {
        "isend": lambda group, x: group.isend(x, 0),
        "send": lambda group, x: group.send(x[3:4], 0),
        "irecv": lambda group, x: group.irecv(x[3:], 0),
        "recv": lambda group, x: group.recv(x[:1], 0),
        "sendrecv": lambda group, x: group.sendrecv(x[:2], 0, np.empty(2), 0),
        "batch": lambda group, x: group.batch([un.SendTo(np.ones(1), 0), un.SendTo(x[1:2], 0)]),
    }

    def work(group: un.Group) -> None:
        if group.rank == 0:
            group.send(np.arange(4.0), 1)
            return
        x = np.zeros(4)
        receive = group.irecv(x, 0)
        if seen:
            receive.wait()
            group.isend(x[3:], 1, 5).wait()
            group.recv(x[:1], 1, 5)
            assert x.tolist() == [3, 1, 2, 3]
            return
        for _ in range(2):
            for name, call in calls.items():
                with pytest.raises(ValueError, match=f"{name}: the buffer shares memory"):
                    call(group, x)
            group.probe(0, 1) if group.iprobe(0, 1) else None  # the receive may end meanwhile: it is the same
        receive.wait()
        assert x.tolist() == [0, 1, 2, 3]

    ranks.threads(2, work)


@everywhere
def test_two_receives_of_a_batch_that_share_memory() -> None:
    def work(group: un.Group) -> None:
        x = np.zeros(4)
        with pytest.raises(ValueError, match="batch: two receives share memory"):
            group.batch([un.SendTo(x, 0), un.RecvFrom(x[:3], 0, 1), un.RecvFrom(x[2:], 0, 2)])
        assert group.iprobe(0) is None

    ranks.threads(1, work)
