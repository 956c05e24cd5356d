"""What has come: status, shorter messages, probing, waiting for several works, taking a receive back."""

import time

import numpy as np
import pytest

import ranks
import unisono as un
from effort import HANG_S
from loops import each, everywhere
from unisono.engine.diagnosis import fault_reader

CAPACITY = 200_000
SIZES = [0, 1, 5, 4096, 4097, 150_000]  # whole, staged and zero-copy ones


def facts(status: un.Status | None) -> tuple[int, int, int, int, str]:
    assert status is not None
    return status.source, status.tag, status.numel, status.nbytes, status.dtype


@each("numel", SIZES)
@pytest.mark.parametrize("way", ["recv", "irecv", "sendrecv", "batch", "late"])
@everywhere
def test_a_shorter_message_fills_the_beginning(numel: int, way: str) -> None:
    def work(group: un.Group) -> None:
        peer = 1 - group.rank
        x, mine = np.full(CAPACITY, -1.0), np.arange(numel) + peer
        if way == "sendrecv":
            status = group.sendrecv(np.arange(numel) + 0.0 + group.rank, peer, x, peer, 3)
        elif way == "batch":
            works = group.batch(
                [un.SendTo(np.arange(numel) + 0.0 + group.rank, peer, 3), un.RecvFrom(x, peer, 3)]
            )
            un.wait_all(works)
            assert works[0].status is None
            status = works[1].status
        else:
            outgoing = group.isend(np.arange(numel) + 0.0 + group.rank, peer, 3)
            if way == "irecv":
                incoming = group.irecv(x, tag=un.ANY_TAG)
                incoming.wait()
                status = incoming.status
            else:
                if way == "late":
                    group.probe(peer, 3)
                status = group.recv(x, None, un.ANY_TAG)
            outgoing.wait()
        assert facts(status) == (peer, 3, numel, 8 * numel, "float64")
        assert (x[:numel] == mine).all()
        assert (x[numel:] == -1).all()

    ranks.threads(2, work)


@everywhere
def test_a_message_of_unknown_size_and_dtype_in_one_call() -> None:
    sent = [np.arange(numel, dtype=dtype) for numel in SIZES for dtype in (np.float32, np.int16)]

    def work(group: un.Group) -> None:
        if group.rank == 0:
            group.send_object({"a": 1}, 1, 99)
            for number, x in enumerate(sent):
                group.send(x, 1, number)
            return
        for number, x in reversed(list(enumerate(sent))):
            data, status = group.recv_bytes(0 if number % 2 else None, number)
            assert facts(status) == (0, number, x.size, x.nbytes, x.dtype.name)
            assert data.dtype == np.uint8 and data.flags.writeable
            assert data.tobytes() == x.tobytes()
        obj, status = group.recv_object(tag=un.ANY_TAG, with_status=True)
        assert (obj, status.source, status.tag, status.dtype) == ({"a": 1}, 0, 99, "object")
        group.send(sent[3], 1, 5)
        assert group.recv_bytes(1, un.ANY_TAG)[0].tobytes() == sent[3].tobytes()
        with pytest.raises(ValueError, match="recv_bytes: rank 2"):
            group.recv_bytes(2)

    ranks.threads(2, work)


@everywhere
def test_many_lengths_into_one_buffer_stay_in_order() -> None:
    lengths = [7, 0, 4096, 1, 150_000, 3, 20_000, 2]

    def work(group: un.Group) -> None:
        if group.rank == 0:
            for number, numel in enumerate(lengths):
                group.send(np.full(numel, number, np.int32), 1, number)
            return
        x = np.empty(CAPACITY, np.int32)
        for number, numel in enumerate(lengths):
            status = group.recv(x, 0, un.ANY_TAG)
            assert facts(status) == (0, number, numel, 4 * numel, "int32")
            assert (x[:numel] == number).all()

    ranks.threads(2, work)


@each("dtype", [np.float64, np.float32])
@everywhere
def test_a_longer_message_or_another_dtype_stays_a_mismatch(
    dtype: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fault_reader, "SOURCE_LINE_PATIENCE_S", 20)

    def work(group: un.Group) -> None:
        with pytest.raises(un.Mismatch, match=r"Send an array that has the dtype .* and fits into it"):
            if group.rank == 0:
                group.send(np.zeros(3, dtype), 1)
                group.recv(np.zeros(1), 1)
            else:
                group.recv(np.zeros(2 if dtype is np.float64 else 3), 0)

    ranks.threads(2, work)


@everywhere
def test_a_status_stands_for_its_source() -> None:
    def work(group: un.Group) -> None:
        if group.rank == 1:
            group.send(np.zeros(2), 0, 4)
            group.recv(np.zeros(2), 0, 5)
            return
        status = group.recv(np.zeros(2), 1, 4)
        assert status == 1
        assert status != 0
        assert status != "1"
        assert {1: "one"}[status] == "one"
        assert [10, 11][status] == 11
        assert repr(status) == "Status(source=1, tag=4, numel=2, nbytes=16, dtype='float64')"
        with pytest.raises(AttributeError):
            status.source = 2  # type: ignore[misc]
        group.send(np.zeros(2), status, 5)

    ranks.threads(2, work)


@everywhere
def test_probe_tells_what_to_make_room_for() -> None:
    def work(group: un.Group) -> None:
        if group.rank > 0:
            group.send(np.arange(group.rank * 1000, dtype=np.int16), 0, group.rank)
            group.barrier()
            return
        seen = set()
        for _ in range(group.size - 1):
            status = group.probe(tag=un.ANY_TAG)
            assert group.iprobe(status, status.tag) == status
            assert group.iprobe(status, 99) is None
            x = np.empty(status.numel, status.dtype)
            assert group.recv(x, status, status.tag) == status
            assert (x == np.arange(status.source * 1000)).all()
            assert status.tag == status.source
            seen.add(status.source)
        assert seen == set(range(1, group.size))
        assert group.iprobe(tag=un.ANY_TAG) is None
        group.barrier()

    ranks.threads(4, work)


@everywhere
def test_probe_sees_objects_messages_to_oneself_and_large_ones() -> None:
    def work(group: un.Group) -> None:
        peer = 1 - group.rank
        group.send(np.zeros(3), group.rank, 8)
        assert facts(group.probe(group.rank, 8)) == (group.rank, 8, 3, 24, "float64")
        group.recv(np.zeros(3), group.rank, 8)
        big = group.isend(np.full(1_000_000, 2.0), peer, 1)
        assert group.probe(peer, 1).numel == 1_000_000
        group.recv(x := np.zeros(1_000_000), peer, 1)
        big.wait()
        assert (x == 2).all()
        group.send_object({"a": 1}, peer, 2)
        group.send(np.ones(1), peer, 3)
        status = group.probe(tag=2)
        assert status.dtype == "object"
        assert group.recv_object(status.source, status.tag) == {"a": 1}
        assert group.recv(np.zeros(1), peer, 3).numel == 1

    ranks.threads(2, work)


@everywhere
def test_recv_object_of_any_tag_stays_with_one_message() -> None:
    def work(group: un.Group) -> None:
        if group.rank == 0:
            for tag in (5, 3):
                group.send_object(["tag", tag], 1, tag)
        else:
            assert group.recv_object(tag=un.ANY_TAG) == ["tag", 5]
            assert group.recv_object(tag=un.ANY_TAG) == ["tag", 3]

    ranks.threads(2, work)


@everywhere
def test_a_probe_leaves_out_what_an_earlier_receive_gets() -> None:
    def work(group: un.Group) -> None:
        if group.rank == 0:
            group.barrier()
            group.send(np.ones(1), 1)
            group.send(np.full(2, 2.0), 1)
            return
        first = group.irecv(x := np.zeros(1), 0)
        group.barrier()
        assert group.probe(0).numel == 2
        first.wait()
        group.recv(y := np.zeros(2), 0)
        assert (x[0], y[0]) == (1, 2)

    ranks.threads(2, work)


@everywhere
def test_a_probe_that_times_out_ends_nothing() -> None:
    def work(group: un.Group) -> None:
        with pytest.raises(un.Timeout, match="probe: no such message arrived within 0.050 s"):
            group.probe(1 - group.rank, 7, timeout=0.05)
        group.all_reduce(x := np.ones(3))
        assert (x == 2).all()

    ranks.threads(2, work)


@each("call", ["probe", "iprobe"])
@everywhere
def test_a_probe_finds_out_that_nobody_is_left(call: str) -> None:
    def work(group: un.Group) -> None:
        if group.rank == 0:
            group.send(np.ones(1), 1)
            group.close()
            return
        assert group.probe(0).numel == 1
        group.recv(np.zeros(1), 0)
        with pytest.raises(un.PeerLost, match="rank 0"):
            while True:
                getattr(group, call)(0)

    ranks.threads(2, work)


@each("end", ["close", "abort"])
@everywhere
def test_a_probe_after_the_end_says_so(end: str) -> None:
    def work(group: un.Group) -> None:
        getattr(group, end)()
        for call in (group.probe, group.iprobe):
            with pytest.raises((un.GroupClosed, un.GroupError)):
                call()

    ranks.threads(1, work)


@each(
    ("call", "error", "text"),
    [
        (lambda g: g.probe(5), ValueError, "probe: rank 5 is not in group"),
        (lambda g: g.iprobe(0, -2), ValueError, "iprobe: tag is -2"),
        (lambda g: g.iprobe("0"), TypeError, "iprobe: the rank is '0'"),
        (lambda g: g.probe(timeout=0), ValueError, "timeout is 0"),
        (lambda _: un.wait_any([]), ValueError, "there are no works"),
        (lambda _: un.wait_all([1]), TypeError, r"wait_all: works\[0\] is a int, expected Work"),
        (lambda _: un.wait_any(None), TypeError, "wait_any: works is a NoneType"),
    ],
)
@everywhere
def test_wrong_arguments(call, error: type, text: str) -> None:
    def work(group: un.Group) -> None:
        with pytest.raises(error, match=text):
            call(group)

    ranks.threads(1, work)


@everywhere
def test_wait_all_and_any_take_works_of_collectives_and_messages() -> None:
    def work(group: un.Group) -> None:
        peer = 1 - group.rank
        x, y, z = np.ones(1000), np.zeros(10), np.zeros(10)
        works = [
            group.irecv(z, peer, 2),
            group.all_reduce(x, async_op=True),
            group.irecv(y, peer, 1),
            group.isend(np.full(10, group.rank + 1.0), peer, 1),
        ]
        assert works[1] is not None
        left = dict(enumerate(works))
        while len(left) > 1:
            places = list(left)
            ended = places[un.wait_any(left.values())]
            assert left.pop(ended).done()
        assert list(left) == [0]  # nobody has sent that one yet
        with pytest.raises(un.Timeout, match="none of 1 works is done"):
            un.wait_any(left.values(), timeout=0.02)
        with pytest.raises(un.Timeout, match="it continues"):
            un.wait_all(works, timeout=0.02)
        group.barrier()
        group.send(np.full(10, 7.0), peer, 2)
        un.wait_all(works)
        un.wait_all([])
        assert (x == 2).all()
        assert (y == peer + 1).all()
        assert (z == 7).all()
        assert works[1].status is None
        assert works[1].cancel() is False

    ranks.threads(2, work)


@everywhere
def test_wait_any_raises_what_went_wrong() -> None:
    def work(group: un.Group) -> None:
        if group.rank == 0:
            group.abort()
            return
        with pytest.raises(un.Aborted):
            un.wait_any([group.irecv(np.zeros(1), 0)])

    ranks.threads(2, work)


@everywhere
def test_a_receive_that_nobody_has_answered_can_be_taken_back() -> None:
    def work(group: un.Group) -> None:
        peer = 1 - group.rank
        x = np.zeros(4)
        taken_back = group.irecv(x, peer, 5)
        assert taken_back.cancel() is True
        assert taken_back.cancel() is False
        assert taken_back.done()
        assert taken_back.cancelled
        assert taken_back.status is None
        assert taken_back.exception() is None
        assert "cancelled" in repr(taken_back)
        taken_back.wait()
        group.barrier()
        group.send(np.ones(4), peer, 5)  # what the cancelled one would have got goes to the next
        y = np.zeros(4)
        later = group.irecv(y, peer, 5)
        later.wait()
        assert later.cancel() is False
        assert not later.cancelled
        assert (x == 0).all()
        assert (y == 1).all()
        outgoing = group.isend(np.ones(1_000_000), peer, 6)
        assert outgoing.cancel() is False
        group.recv(np.zeros(1_000_000), peer, 6)
        outgoing.wait()

    ranks.threads(2, work)


@everywhere
def test_who_waits_for_a_receive_hears_that_it_was_taken_back() -> None:
    def work(group: un.Group) -> None:
        import threading

        waiting = group.irecv(np.zeros(1), 1 - group.rank, 5)
        thread = threading.Thread(target=waiting.wait)
        thread.start()
        assert waiting.cancel()
        thread.join(HANG_S)
        assert not thread.is_alive()
        group.barrier()

    ranks.threads(2, work)


@everywhere
def test_a_message_and_a_cancel_at_once_lose_nothing() -> None:
    """Either the receive has it, or the next one gets it."""

    def work(group: un.Group) -> None:
        for number in range(200):
            if group.rank == 0:
                group.send(np.full(3, number), 1)
                continue
            x, y = np.full(3, -1), np.full(3, -1)
            incoming = group.irecv(x, 0)
            if number % 3:
                time.sleep(number % 3 * 1e-5)
            if incoming.cancel():
                group.recv(y, 0)
                assert (y == number).all()
                assert (x == -1).all()
            else:
                incoming.wait()
                assert (x == number).all()

    ranks.threads(2, work)
