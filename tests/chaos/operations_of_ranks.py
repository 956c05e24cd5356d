"""Calls with known results: every rank computes what each call of a group must give."""

import random
from collections.abc import Callable

import numpy as np

import unisono as un

SIZES = (1, 7, 100, 5000, 70_000, 300_000)


class WrongValue(AssertionError):
    """A call has returned something else than it must."""


def contribution(number: int, rank: int, numel: int) -> np.ndarray:
    """What a rank brings to call `number`: whole numbers, so that every order of additions gives the same."""
    return (np.arange(numel) % 97 + 1000 * rank + number).astype(np.float64)


def _equal(got: object, expected: object, what: str) -> None:
    if not np.array_equal(np.asarray(got), np.asarray(expected)):
        raise WrongValue(f"{what}: got {str(got)[:200]}, expected {str(expected)[:200]}")


def _all(group: un.Group, number: int, numel: int) -> np.ndarray:
    return np.stack([contribution(number, rank, numel) for rank in range(group.size)])


def all_reduce(group: un.Group, number: int, numel: int, root: int) -> None:
    x = contribution(number, group.rank, numel)
    group.all_reduce(x)
    _equal(x, _all(group, number, numel).sum(axis=0), "all_reduce")


def all_reduce_later(group: un.Group, number: int, numel: int, root: int) -> None:
    x = contribution(number, group.rank, numel)
    work = group.all_reduce(x, un.MAX, async_op=True)
    y = contribution(number + 1, group.rank, 10)
    other = group.all_reduce(y, async_op=True)
    other.wait()
    work.wait()
    _equal(x, _all(group, number, numel).max(axis=0), "all_reduce, asynchronous")
    _equal(y, _all(group, number + 1, 10).sum(axis=0), "the second all_reduce")


def broadcast(group: un.Group, number: int, numel: int, root: int) -> None:
    x = contribution(number, group.rank, numel)
    group.broadcast(x, root)
    _equal(x, contribution(number, root, numel), "broadcast")


def reduce(group: un.Group, number: int, numel: int, root: int) -> None:
    x = contribution(number, group.rank, numel)
    group.reduce(x, root)
    mine = contribution(number, group.rank, numel)
    _equal(x, _all(group, number, numel).sum(axis=0) if group.rank == root else mine, "reduce")


def scan(group: un.Group, number: int, numel: int, root: int) -> None:
    x = contribution(number, group.rank, numel)
    group.scan(x)
    _equal(x, _all(group, number, numel)[: group.rank + 1].sum(axis=0), "scan")


def all_gather(group: un.Group, number: int, numel: int, root: int) -> None:
    _equal(
        group.all_gather(x=contribution(number, group.rank, numel)), _all(group, number, numel), "all_gather"
    )


def gather(group: un.Group, number: int, numel: int, root: int) -> None:
    found = group.gather(contribution(number, group.rank, numel), dst=root)
    if group.rank == root:
        _equal(found, _all(group, number, numel), "gather")


def scatter(group: un.Group, number: int, numel: int, root: int) -> None:
    out = np.empty(numel)
    group.scatter(out, _all(group, number, numel) if group.rank == root else None, root)
    _equal(out, contribution(number, group.rank, numel), "scatter")


def reduce_scatter(group: un.Group, number: int, numel: int, root: int) -> None:
    out = np.empty(numel)
    group.reduce_scatter(out, _all(group, number + group.rank, numel))
    expected = sum(contribution(number + rank, group.rank, numel) for rank in range(group.size))
    _equal(out, expected, "reduce_scatter")


def all_to_all(group: un.Group, number: int, numel: int, root: int) -> None:
    out = np.empty((group.size, numel))
    group.all_to_all(out, _all(group, number + 3 * group.rank, numel))
    expected = [contribution(number + 3 * rank, group.rank, numel) for rank in range(group.size)]
    _equal(out, np.stack(expected), "all_to_all")


def barrier(group: un.Group, number: int, numel: int, root: int) -> None:
    group.barrier()


def messages(group: un.Group, number: int, numel: int, root: int) -> None:
    got = np.empty(numel)
    mine = contribution(number, group.rank, numel)
    before = (group.rank - 1) % group.size
    group.sendrecv(mine, (group.rank + 1) % group.size, got, before, tag=number % 5)
    _equal(got, contribution(number, before, numel), "sendrecv")


def objects(group: un.Group, number: int, numel: int, root: int) -> None:
    found = group.all_gather_object((group.rank, "x" * (numel % 5000)))
    expected = [(rank, "x" * (numel % 5000)) for rank in range(group.size)]
    if found != expected:
        raise WrongValue(f"all_gather_object: got {str(found)[:200]}")


def coalesced(group: un.Group, number: int, numel: int, root: int) -> None:
    sizes = [numel, 3, max(1, numel // 7)]
    xs = [contribution(number + i, group.rank, size) for i, size in enumerate(sizes)]
    group.all_reduce_coalesced(xs)
    for i, size in enumerate(sizes):
        _equal(xs[i], _all(group, number + i, size).sum(axis=0), "all_reduce_coalesced")


Call = Callable[[un.Group, int, int, int], None]
CALLS: tuple[Call, ...] = (
    all_reduce, all_reduce_later, broadcast, reduce, scan, all_gather, gather, scatter, reduce_scatter,
    all_to_all, barrier, messages, objects, coalesced,
)  # fmt: skip


def call(group: un.Group, seed: str, number: int, most: int = SIZES[-1]) -> None:
    """Call `number` of a program that `seed` describes: the same on every rank."""
    chance = random.Random(f"{seed} {number}")
    chosen = chance.choice(CALLS)
    numel = min(chance.choice(SIZES), most)
    chosen(group, number, numel, chance.randrange(group.size))
