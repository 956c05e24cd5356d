"""NumPy arrays that are not contiguous, in every call: NumPy is the oracle, and the gaps keep their bytes."""

from collections.abc import Callable
from functools import reduce as fold
from typing import Any

import numpy as np
import pytest

import ranks
import unisono as un

SHAPES = ((3, 4), (1, 1), (0, 4), (2, 3, 5), (7,), (150, 200))
GAP = 99


def f_ordered(base: Callable[[tuple[int, ...]], Any], shape: tuple[int, ...]) -> Any:
    return base(shape[::-1]).T


def strided(base: Callable[[tuple[int, ...]], Any], shape: tuple[int, ...]) -> Any:
    return base((*shape[:-1], 2 * shape[-1]))[..., 1::2]


def negative(base: Callable[[tuple[int, ...]], Any], shape: tuple[int, ...]) -> Any:
    return base(shape)[(slice(None, None, -1),) * len(shape)]


def swapped(base: Callable[[tuple[int, ...]], Any], shape: tuple[int, ...]) -> Any:
    return base((*shape[1:], 3 * shape[0]))[..., ::-3].transpose(len(shape) - 1, *range(len(shape) - 1))


def field(base: Callable[[tuple[int, ...]], Any], shape: tuple[int, ...]) -> Any:
    plain = base((*shape, 2))
    record = np.dtype([("gap", plain.dtype), ("x", plain.dtype)])
    return plain.view(record)[..., 0]["x"]


def plain(base: Callable[[tuple[int, ...]], Any], shape: tuple[int, ...]) -> Any:
    return base(shape)


LAYOUTS = (f_ordered, strided, negative, swapped, field)


class Memory:
    """Arrays of one layout, in memory that is full of GAP."""

    def __init__(self, layout: Any, dtype: str) -> None:
        self._layout, self._dtype = layout, dtype
        self._made: list[tuple[np.ndarray, np.ndarray]] = []

    def of(self, values: np.ndarray) -> np.ndarray:
        def base(shape: tuple[int, ...]) -> np.ndarray:
            memory = np.full(shape, GAP, self._dtype)
            self._made.append((memory, memory))
            return memory

        made = self._layout(base, values.shape)
        assert made.shape == values.shape
        self._made[-1] = (self._made[-1][0], made)
        made[...] = values
        return made

    def check(self) -> None:
        """All but the elements of the arrays is GAP."""
        for memory, made in self._made:
            made[...] = GAP
            assert (memory == GAP).all()


def mine(rank: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return np.random.default_rng(rank).integers(1, 9, shape).astype(dtype)


def end(work: Any, later: bool) -> None:
    if later:
        work.wait()


def in_place(group: un.Group, shape: tuple[int, ...], memory: Memory, dtype: str, later: bool) -> None:
    every = [mine(rank, shape, dtype) for rank in range(group.size)]
    own, last = every[group.rank], group.size - 1
    total = fold(np.add, every)
    up_to = fold(np.add, every[: group.rank + 1])
    below = fold(np.add, every[: group.rank]) if group.rank else own
    of_last = total if group.rank == last else own
    for name, options, expected in (
        ("all_reduce", {}, total),
        ("broadcast", {"src": last}, every[last]),
        ("reduce", {"dst": last}, of_last),
        ("scan", {}, up_to),
        ("exclusive_scan", {}, below),
    ):
        x = memory.of(own)
        end(getattr(group, name)(x, async_op=later, **options), later)
        np.testing.assert_array_equal(x, expected, name)
    for given, out in (
        (memory.of(own), memory.of(own * 0)),
        (own, memory.of(own * 0)),
        (memory.of(own), own * 0),
    ):
        end(group.all_reduce(given, out=out, async_op=later), later)
        np.testing.assert_array_equal(out, total)
        np.testing.assert_array_equal(given, own)
    x = memory.of(own)
    end(group.all_reduce(x, out=x, async_op=later), later)
    np.testing.assert_array_equal(x, total)
    xs = [memory.of(own), own.copy(), memory.of(own)]
    end(group.all_reduce_coalesced(xs, async_op=later), later)
    for x in xs:
        np.testing.assert_array_equal(x, total)
    xs = [own.copy(), memory.of(own)]
    end(group.broadcast_coalesced(xs, last, async_op=later), later)
    np.testing.assert_array_equal(xs, [every[last]] * 2)


def between(group: un.Group, shape: tuple[int, ...], memory: Memory, dtype: str, later: bool) -> None:
    p, rank = group.size, group.rank
    every = [mine(one, shape, dtype) for one in range(p)]
    blocks = [mine(one, (p, *shape), dtype) for one in range(p)]
    total = fold(np.add, blocks)[rank]
    exchanged = np.stack([one[rank] for one in blocks])

    def empty(at_root: bool = True, listed: bool = False) -> Any:
        if not at_root:
            return None
        return [memory.of(0 * each) for each in every] if listed else memory.of(0 * np.stack(every))

    for listed in (False, True):
        out = empty(listed=listed)
        end(group.all_gather(out, memory.of(every[rank]), async_op=later), later)
        np.testing.assert_array_equal(out, every)
        out = empty(rank == p - 1, listed)
        end(group.gather(memory.of(every[rank]), out, p - 1, async_op=later), later)
        if rank == p - 1:
            np.testing.assert_array_equal(out, every)
        parts = [memory.of(each) for each in blocks[rank]] if listed else memory.of(blocks[rank])
        out = empty(listed=listed)
        end(group.all_to_all(out, parts, async_op=later), later)
        np.testing.assert_array_equal(out, exchanged)
        out = memory.of(0 * every[0])
        end(group.reduce_scatter(out, parts, async_op=later), later)
        np.testing.assert_array_equal(out, total)
        out = memory.of(0 * every[0])
        end(group.scatter(out, parts if rank == 0 else None, async_op=later), later)
        np.testing.assert_array_equal(out, blocks[0][rank])
    out = [memory.of(0 * each) for each in every]
    end(group.all_gather_v(out, memory.of(every[rank]), async_op=later), later)
    np.testing.assert_array_equal(out, every)
    outs = [empty(), 0 * np.stack(every)]
    end(group.all_gather_coalesced(outs, [memory.of(every[rank]), every[rank]], async_op=later), later)
    np.testing.assert_array_equal(outs, [every, every])
    outs = [memory.of(0 * every[0])]
    end(group.reduce_scatter_coalesced(outs, [memory.of(blocks[rank])], async_op=later), later)
    np.testing.assert_array_equal(outs[0], total)
    x = memory.of(every[rank])
    np.testing.assert_array_equal(group.all_gather(x), every)
    np.testing.assert_array_equal(group.all_to_all(memory.of(blocks[rank])), exchanged)
    np.testing.assert_array_equal(group.reduce_scatter(memory.of(blocks[rank])), total)


def messages(group: un.Group, shape: tuple[int, ...], memory: Memory, dtype: str) -> None:
    p, rank = group.size, group.rank
    to, source = (rank + 1) % p, (rank - 1) % p
    every = [mine(one, shape, dtype) for one in range(p)]
    x = memory.of(every[rank])
    for begin in (True, False):
        out = memory.of(0 * x)
        work = group.isend(x, to)
        if begin:
            receive = group.irecv(out, source)
            receive.wait()
            status = receive.status
        else:
            status = group.recv(out, source)
        work.wait()
        assert status is not None and status.numel == x.size
        np.testing.assert_array_equal(out, every[source])
    out = memory.of(0 * x)
    group.sendrecv(x, to, out, source)
    np.testing.assert_array_equal(out, every[source])
    group.sendrecv(out, to, out, source)  # one array: a copy is sent
    np.testing.assert_array_equal(out, every[(rank - 2) % p])
    outs = [memory.of(0 * x), 0 * every[rank]]
    sends = [un.SendTo(x, to, 1), un.SendTo(x, to, 2)]
    works = group.batch([*sends, un.RecvFrom(outs[0], source, 1), un.RecvFrom(outs[1], source, 2)])
    while not all(work.done() for work in works):  # without a wait
        pass
    np.testing.assert_array_equal(outs, [every[source]] * 2)
    group.barrier()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_call(size: int) -> None:
    def work(group: un.Group) -> None:
        for number, layout in enumerate(LAYOUTS):
            for shape in SHAPES if number < 3 or group.size == 3 else SHAPES[:1]:
                memory = Memory(layout, "float64" if number % 2 else "int32")
                dtype = "float64" if number % 2 else "int32"
                for later in (False, True):
                    in_place(group, shape, memory, dtype, later)
                    between(group, shape, memory, dtype, later)
                messages(group, shape, memory, dtype)
                memory.check()

    ranks.threads(size, work)


def test_on_hosts() -> None:
    def work(group: un.Group) -> None:
        memory = Memory(swapped, "float32")
        for later in (False, True):
            in_place(group, (60, 70), memory, "float32", later)
            between(group, (60, 70), memory, "float32", later)
        messages(group, (300, 400), memory, "float32")

    ranks.threads(4, work, per_host=2)


def test_columns_of_one_array_are_apart() -> None:
    def work(group: un.Group) -> None:
        table = np.zeros((4, 3))
        group.all_gather(list(table.T), np.full(4, group.rank + 1.0))
        np.testing.assert_array_equal(table, [[1, 2, 3]] * 4)
        works = [group.irecv(table[:, one], one) for one in range(3)]
        for to in range(3):
            group.send(np.full(4, 10.0 * group.rank), to)
        un.wait_all(works)
        np.testing.assert_array_equal(table, [[0, 10, 20]] * 4)

    ranks.threads(3, work)


def test_a_short_message_fills_the_first_elements() -> None:
    def work(group: un.Group) -> None:
        out = np.full((3, 4), 9).T
        group.send(np.arange(5), group.rank)
        assert group.recv(out, group.rank).numel == 5
        np.testing.assert_array_equal(out.reshape(-1), [0, 1, 2, 3, 4, *[9] * 7])

    ranks.threads(1, work)


def test_a_work_that_nobody_waits_for() -> None:
    def work(group: un.Group) -> None:
        x, y = np.ones((4, 3)).T, np.ones((4, 3)).T
        group.all_reduce(x, async_op=True)
        last = group.all_reduce(y, async_op=True)
        while not last.done():
            pass
        np.testing.assert_array_equal(y, 2)
        assert last.exception() is None
        group.barrier()  # the next call lets the first go
        np.testing.assert_array_equal(x, 2)
        y[...] = 7
        last.wait()  # written back once
        np.testing.assert_array_equal(y, 7)

    ranks.threads(2, work)


def repeated() -> Any:
    return np.lib.stride_tricks.as_strided(np.zeros(9), (3, 4), (8, 16))


def read_only() -> Any:
    x = np.zeros((4, 4)).T
    x.flags.writeable = False
    return x


REFUSED: list[tuple[str, Callable[[un.Group], Any], str]] = [
    ("zero strides", lambda g: g.all_reduce(_broadcast()), "x has elements that share memory"),
    ("windows", lambda g: g.all_reduce(repeated()), "x has elements that share memory"),
    ("out", lambda g: g.all_reduce(np.zeros((3, 4)), out=repeated()), "out has elements that share"),
    ("receive", lambda g: g.recv(_broadcast(), g.rank), "recv: x has elements that share memory"),
    ("sendrecv", lambda g: g.sendrecv(np.zeros(4), 0, repeated(), 0), "out has elements that share"),
    ("read-only", lambda g: g.all_reduce(read_only()), "x is read-only"),
    ("read-only receive", lambda g: g.irecv(read_only(), 0), "irecv: x is read-only"),
    ("a list", lambda g: g.all_gather([repeated()] * g.size, np.zeros((3, 4))), r"out\[0\] has elements"),
    ("overlap", lambda g: g.all_gather([_rows()[::2]] * g.size, np.zeros(4)), "arrays of out overlap"),
    ("two receives", lambda g: _receive_twice(g), "two receives share memory"),
    ("low rank", lambda g: g.all_reduce(np.zeros((2, 2), "f4").T, codec=un.LowRank(1)), "un.LowRank"),
]  # fmt: skip


def _broadcast() -> Any:
    x = np.lib.stride_tricks.as_strided(np.zeros(4), (3, 4), (0, 8))
    assert x.flags.writeable
    return x


_ROWS = np.zeros(8)


def _rows() -> Any:
    return _ROWS


def _receive_twice(group: un.Group) -> None:
    group.batch([un.RecvFrom(_rows()[::2], 0, 1), un.RecvFrom(_rows()[:4], 0, 2)])


@pytest.mark.parametrize(("call", "text"), [one[1:] for one in REFUSED], ids=[one[0] for one in REFUSED])
def test_refused(call: Callable[[un.Group], Any], text: str) -> None:
    def work(group: un.Group) -> None:
        with pytest.raises((ValueError, TypeError), match=text):
            call(group)
        x = np.ones(3)  # the group can still be used
        group.all_reduce(x)
        assert x[0] == group.size

    ranks.threads(2, work)


def test_what_is_only_read_may_repeat() -> None:
    def work(group: un.Group) -> None:
        ones = np.broadcast_to(1.0, (3, 4))
        out = np.zeros((3, 4))
        group.all_reduce(ones, out=out)
        np.testing.assert_array_equal(out, 2)
        group.broadcast(ones if group.rank == 0 else out, 0)
        np.testing.assert_array_equal(out, 1 if group.rank else 2)
        out[...] = 1
        group.reduce(ones if group.rank else out, 0)
        np.testing.assert_array_equal(out, 2 if group.rank == 0 else 1)

    ranks.threads(2, work)


RECORD = np.dtype([("a", "i2"), ("b", "f8")])


@pytest.mark.parametrize(
    "dtype", ["uint16", "uint32", "uint64", "longdouble", "clongdouble", "M8[s]", RECORD]
)
@pytest.mark.parametrize("transposed", [False, True])
def test_types_that_are_moved(dtype: Any, transposed: bool) -> None:
    def of(rank: int) -> np.ndarray:
        x = np.zeros((3, 5), dtype)
        for name in x.dtype.names or ():
            x[name] = np.arange(15).reshape(3, 5) + rank
        if x.dtype.names is None:
            x[...] = (np.arange(15).reshape(3, 5) + rank).astype(x.dtype)
        return x.T if transposed else x

    def work(group: un.Group) -> None:
        other = 1 - group.rank
        out = of(9)
        work = group.isend(of(group.rank), other)
        group.recv(out, other)
        work.wait()
        assert (out == of(other)).all()
        group.broadcast(out := of(group.rank), 1)
        assert (out == of(1)).all()
        gathered = group.gather(of(group.rank))
        if group.rank == 0:
            assert gathered is not None and all((gathered[rank] == of(rank)).all() for rank in (0, 1))
            assert gathered.dtype == of(0).dtype

    ranks.threads(2, work)
