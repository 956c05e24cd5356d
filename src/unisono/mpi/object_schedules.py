"""Collectives of pickled objects as schedules: the same as in schedules.py, of messages of any length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unisono.mpi.lane import Lane
from unisono.mpi.pickling import pickle
from unisono.mpi.progress import Schedule


def broadcast(lane: Lane, obj: Any, root: int) -> Schedule:
    """A binomial tree. Returns the object of the root."""
    below = (lane.rank - root) % lane.size
    step = 1
    while step < lane.size and not below & step:
        step *= 2
    if below:
        incoming = lane.receive_bytes((lane.rank - step) % lane.size)
        yield [incoming]
        data = incoming.value
    else:
        data = pickle.dumps(obj)
    sends = []
    while step > 1:
        step //= 2
        if below + step < lane.size:
            sends.append(lane.send_bytes((lane.rank + step) % lane.size, data))
    yield sends
    return pickle.loads(data) if below else obj


def gather(lane: Lane, obj: Any, root: int) -> Schedule:
    """Every rank sends to the root, which gets the list."""
    data = pickle.dumps(obj)
    if lane.rank != root:
        yield [lane.send_bytes(root, data)]
        return None
    waits = {rank: lane.receive_bytes(rank) for rank in range(lane.size) if rank != root}
    yield list(waits.values())
    return [pickle.loads(waits[rank].value if rank in waits else data) for rank in range(lane.size)]


def scatter(lane: Lane, objs: Sequence[Any] | None, root: int) -> Schedule:
    """The root sends to every rank."""
    if lane.rank != root:
        incoming = lane.receive_bytes(root)
        yield [incoming]
        return pickle.loads(incoming.value)
    data = [pickle.dumps(obj) for obj in _one_for_each(objs, lane.size)]
    yield [lane.send_bytes(rank, data[rank]) for rank in range(lane.size) if rank != root]
    return pickle.loads(data[root])


def all_to_all(lane: Lane, objs: Sequence[Any]) -> Schedule:
    """Object i goes to rank i."""
    return exchange(lane, list(enumerate(_one_for_each(objs, lane.size))), list(range(lane.size)))


def all_gather(lane: Lane, obj: Any) -> Schedule:
    """Every rank sends its object to all."""
    data = pickle.dumps(obj)
    others = [(lane.rank + shift) % lane.size for shift in range(1, lane.size)]
    waits = {rank: lane.receive_bytes(rank) for rank in others}
    yield [*waits.values(), *(lane.send_bytes(rank, data) for rank in others)]
    return [pickle.loads(waits[rank].value if rank in waits else data) for rank in range(lane.size)]


def exchange(lane: Lane, outgoing: list[tuple[int, Any]], sources: list[int]) -> Schedule:
    """Send objects to ranks; returns those of other ranks, in the order of `sources`."""
    data = [(rank, pickle.dumps(obj)) for rank, obj in outgoing]
    waits = [lane.receive_bytes(rank) for rank in sources]
    yield [*waits, *(lane.send_bytes(rank, one) for rank, one in data)]
    return [pickle.loads(one.value) for one in waits]


def reduce(lane: Lane, obj: Any, op: Any, root: int) -> Schedule:
    """A binomial tree to rank 0 in the order of ranks; returns the result on the root."""
    step = 1
    while step < lane.size:
        if lane.rank & step:
            yield [lane.send_bytes(lane.rank - step, pickle.dumps(obj))]
            break
        if lane.rank + step < lane.size:
            incoming = lane.receive_bytes(lane.rank + step)
            yield [incoming]
            obj = op(obj, pickle.loads(incoming.value))
        step *= 2
    if root != 0:
        if lane.rank == 0:
            yield [lane.send_bytes(root, pickle.dumps(obj))]
        elif lane.rank == root:
            incoming = lane.receive_bytes(0)
            yield [incoming]
            obj = pickle.loads(incoming.value)
    return obj if lane.rank == root else None


def all_reduce(lane: Lane, obj: Any, op: Any) -> Schedule:
    """A reduction to rank 0 and a broadcast."""
    found = yield from reduce(lane, obj, op, 0)
    return (yield from broadcast(lane, found, 0))


def scan(lane: Lane, obj: Any, op: Any, inclusive: bool) -> Schedule:
    """From rank to rank."""
    before = None
    if lane.rank > 0:
        incoming = lane.receive_bytes(lane.rank - 1)
        yield [incoming]
        before = pickle.loads(incoming.value)
    result = op(before, obj) if lane.rank > 0 else obj
    if lane.rank + 1 < lane.size:
        yield [lane.send_bytes(lane.rank + 1, pickle.dumps(result))]
    return result if inclusive else before


def _one_for_each(objs: Sequence[Any] | None, size: int) -> list[Any]:
    found = [None] * size if objs is None else list(objs)
    if len(found) != size:
        raise ValueError(f"expecting {size} items, got {len(found)}")
    return found
