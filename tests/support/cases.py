"""The checks for every transport: each takes a group, makes every rank's input, and compares."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np

import oracle
import unisono as un
from unisono.engine.costs.machine import DEFAULTS
from unisono.engine.group import Group
from unisono.plans import ALGORITHMS

SEGMENT_BYTES = DEFAULTS.segment_bytes


# Numbers of elements for every dtype and op: fewer than ranks, and less than a vector; many vectors and a
# remainder. The kind of a message depends on its bytes alone, see `sizes`.
FEW = (3, 1000)


def sizes(itemsize: int, size: int) -> list[int]:
    """Numbers of elements at boundaries: none, one, odd, inline or staged, segment ends."""
    segment = SEGMENT_BYTES // itemsize
    small = [0, 1, 3, 40 // itemsize, 40 // itemsize + 1, 1000]
    return [*small, segment - 1, segment, segment + 1, segment // size + 1, 3 * segment + 7]


_make: ContextVar[Callable[..., np.ndarray]] = ContextVar("make", default=np.empty)


@contextmanager
def arrays_from(make: Callable[..., np.ndarray]) -> Iterator[None]:
    """Checks of this thread make their arrays with this function of a shape and a dtype."""
    before = _make.set(make)
    yield
    _make.reset(before)


def _empty(shape: int | tuple[int, ...], dtype: object) -> np.ndarray:
    return _make.get()(shape, dtype)


def _zeros(shape: int | tuple[int, ...], dtype: object) -> np.ndarray:
    made = _empty(shape, dtype)
    made.fill(0)
    return made


def _copy(array: np.ndarray) -> np.ndarray:
    made = _empty(array.shape, array.dtype)
    made[...] = array
    return made


def all_reduce(group: Group, dtype: str, op: un.ReduceOp, algorithm: str | None, numel: int) -> None:
    x = _copy(oracle.data(group.rank, numel, dtype, op))
    group.all_reduce(x, op, algorithm=algorithm)
    exact = algorithm in ("one_shot", "two_shot") or group.size <= 2
    what = (algorithm, dtype, op.name, numel, group.size)
    oracle.check(x, oracle.total(group.size, numel, dtype, op), exact, dtype, group.size, what)


def reduce(group: Group, dtype: str, op: un.ReduceOp, algorithm: str | None, numel: int) -> None:
    for dst in {0, group.size - 1}:
        mine = oracle.data(group.rank, numel, dtype, op)
        x = _copy(mine)
        group.reduce(x, dst, op, algorithm=algorithm)
        what = (algorithm, dtype, op.name, numel, group.size)
        if group.rank == dst:
            exact = algorithm == "direct" or group.size <= 2
            oracle.check(x, oracle.total(group.size, numel, dtype, op), exact, dtype, group.size, what)
        else:
            assert x.tobytes() == mine.tobytes(), ("clobbered", what)


def reduce_scatter(
    group: Group, dtype: str, op: un.ReduceOp, algorithm: str | None, numel: int, in_place: bool
) -> None:
    shape = (group.size, numel)
    mine = oracle.data(group.rank, numel * group.size, dtype, op).reshape(shape)
    expected = oracle.total(group.size, numel * group.size, dtype, op).reshape(shape)[group.rank]
    inputs = _copy(mine)
    out = inputs[group.rank] if in_place else _empty(expected.shape, expected.dtype)
    group.reduce_scatter(out, inputs, op, algorithm=algorithm)
    exact = algorithm == "direct" or group.size <= 2
    what = (algorithm, dtype, op.name, numel, group.size)
    oracle.check(out, expected, exact, dtype, group.size, what)
    for block in range(group.size):
        if not (in_place and block == group.rank):
            assert inputs[block].tobytes() == mine[block].tobytes(), ("clobbered", what)


def scans(group: Group, dtype: str, op: un.ReduceOp, algorithm: str | None, numel: int) -> None:
    if op is un.AVG:
        return
    mine = oracle.data(group.rank, numel, dtype, op)
    x = _copy(mine)
    group.scan(x, op, algorithm=algorithm)
    exact = algorithm == "direct"
    expected = oracle.total(group.rank + 1, numel, dtype, op)
    oracle.check(x, expected, exact, dtype, group.size, ("scan", dtype, op.name, numel))
    x = _copy(mine)
    group.exclusive_scan(x, op)
    expected = oracle.total(group.rank, numel, dtype, op) if group.rank else mine
    in_order = algorithm is not None or group.size <= 3
    oracle.check(x, expected, in_order, dtype, group.size, ("exclusive_scan", dtype, op.name, numel))


def moves(group: Group, dtype: str, numel: int) -> None:
    """All collectives without reductions, with every algorithm."""
    size, rank = group.size, group.rank
    parts = [oracle.data(peer, numel, dtype) for peer in range(size)]
    for algorithm in ALGORITHMS["broadcast"]:
        for src in {0, size - 1}:
            x = _copy(parts[rank])
            group.broadcast(x, src, algorithm=algorithm)
            assert x.tobytes() == parts[src].tobytes(), ("broadcast", algorithm, dtype, numel, size)
    for algorithm in ALGORITHMS["all_gather"]:
        _all_gather(group, parts, algorithm)
    for algorithm in ALGORITHMS["gather"]:
        _gather_scatter(group, parts, algorithm)
    rows = [oracle.data(peer, numel * size, dtype, seed=1).reshape(size, numel) for peer in range(size)]
    for algorithm in ALGORITHMS["all_to_all"]:
        out = _empty(rows[0].shape, rows[0].dtype)
        group.all_to_all(out, _copy(rows[rank]), algorithm=algorithm)
        for peer in range(size):
            assert out[peer].tobytes() == rows[peer][rank].tobytes(), ("all_to_all", algorithm, dtype, numel)
    for algorithm in ALGORITHMS["barrier"]:
        group.barrier(algorithm=algorithm)


def _all_gather(group: Group, parts: list[np.ndarray], algorithm: str) -> None:
    whole = np.stack(parts).tobytes()
    mine = _copy(parts[group.rank])
    out = _zeros((group.size, parts[0].size), parts[0].dtype)
    group.all_gather(out, mine, algorithm=algorithm)
    assert out.tobytes() == whole, ("all_gather", algorithm)
    listed = [_zeros(part.shape, part.dtype) for part in parts]
    group.all_gather(listed, mine, algorithm=algorithm)
    assert np.stack(listed).tobytes() == whole, ("all_gather into a list", algorithm)
    in_place = _zeros(out.shape, out.dtype)
    in_place[group.rank] = parts[group.rank]
    group.all_gather(in_place, in_place[group.rank], algorithm=algorithm)
    assert in_place.tobytes() == whole, ("all_gather in place", algorithm)


def _gather_scatter(group: Group, parts: list[np.ndarray], algorithm: str) -> None:
    size, rank = group.size, group.rank
    dst = size - 1
    out = _zeros((size, parts[0].size), parts[0].dtype) if rank == dst else None
    group.gather(_copy(parts[rank]), out, dst, algorithm=algorithm)
    if out is not None:
        assert out.tobytes() == np.stack(parts).tobytes(), ("gather", algorithm)
    mine = _zeros(parts[rank].shape, parts[rank].dtype)
    given = [_copy(part) for part in parts] if rank == dst else None
    group.scatter(mine, given, dst, algorithm=algorithm)
    assert mine.tobytes() == parts[rank].tobytes(), ("scatter", algorithm)


def uneven(group: Group, dtype: str = "float32") -> None:
    """The variants whose blocks differ in size."""
    size, rank = group.size, group.rank
    for scale in (1, 70_000):
        lengths = [peer * scale % (3 * scale) for peer in range(size)]
        parts = [oracle.data(peer, lengths[peer], dtype) for peer in range(size)]
        for algorithm in (None, *ALGORITHMS["all_gather"]):
            out = [_zeros(part.shape, part.dtype) for part in parts]
            group.all_gather_v(out, _copy(parts[rank]), algorithm=algorithm)
            assert all(a.tobytes() == b.tobytes() for a, b in zip(out, parts, strict=True)), algorithm
        sent = [
            _copy(oracle.data(peer, (rank + 2 * peer) * scale % (4 * scale), dtype, seed=rank))
            for peer in range(size)
        ]
        got = [_zeros((peer + 2 * rank) * scale % (4 * scale), dtype) for peer in range(size)]
        group.all_to_all(got, sent)
        for peer in range(size):
            expected = oracle.data(rank, got[peer].size, dtype, seed=peer)
            assert got[peer].tobytes() == expected.tobytes(), "all_to_all uneven"
        out = [_zeros(part.shape, part.dtype) for part in parts] if rank == 0 else None
        group.gather(_copy(parts[rank]), out, 0)
        assert out is None or all(a.tobytes() == b.tobytes() for a, b in zip(out, parts, strict=True))


def in_flight(group: Group, rounds: int = 6, exact: bool = True, algorithm: str | None = "two_shot") -> None:
    """Several sets of operations under way at once, waited for in another order than started."""
    works, results = [], []
    for number in range(rounds):
        numel = [1, 1000, 300_000][number % 3]
        parts = [oracle.data(rank, numel, "float64", seed=number) for rank in range(group.size)]
        x = _copy(parts[group.rank])
        works.append(group.all_reduce(x, algorithm=algorithm, async_op=True))
        gathered = _zeros((group.size, 5), np.int64)
        mine = np.full(5, group.rank * 100 + number)
        works.append(group.all_gather(gathered, mine, async_op=True))
        results.append((x, oracle.reduced(parts, un.SUM), gathered, number))
    blocking = np.array([1.0])
    group.all_reduce(blocking)  # behind everything that was queued
    assert blocking[0] == group.size
    for work in reversed(works):
        work.wait()
        assert work.done()
        assert work.exception() is None
    for x, expected, gathered, number in results:
        oracle.check(x, expected, exact, "float64", group.size, "in flight")
        assert (gathered == np.arange(group.size)[:, None] * 100 + number).all()
