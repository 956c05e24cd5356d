"""Collectives of pickled objects as schedules: the same as in schedules.py, of messages of any length.

known: the bytes of what this rank gives, where they have been made already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unisono.mpi.errors import check_root
from unisono.mpi.op import OPS, check_function
from unisono.mpi.pickling import pickle
from unisono.mpi.progress import Schedule
from unisono.mpi.transport import Lane

SUM = OPS["SUM"]
_NOTHING = object()


def broadcast(lane: Lane, obj: Any, root: int = 0, *, known: Any = None) -> Schedule:
    """A binomial tree. Returns the object of the root."""
    below = (lane.rank - check_root(root, lane.size)) % lane.size
    step = 1
    while step < lane.size and not below & step:
        step *= 2
    if below:
        incoming = lane.receive_bytes((lane.rank - step) % lane.size)
        yield [incoming]
        data = incoming.value
    else:
        data = pickle.dumps(obj) if known is None else known[0]
    sends = []
    while step > 1:
        step //= 2
        if below + step < lane.size:
            sends.append(lane.send_bytes((lane.rank + step) % lane.size, data))
    yield sends
    return pickle.loads(data)


def gather(lane: Lane, sendobj: Any, root: int = 0, *, known: Any = None) -> Schedule:
    """Every rank sends to the root, which gets the list."""
    root, data = check_root(root, lane.size), pickle.dumps(sendobj) if known is None else known[0]
    if lane.rank != root:
        yield [lane.send_bytes(root, data)]
        return None
    waits = {rank: lane.receive_bytes(rank) for rank in range(lane.size) if rank != root}
    yield list(waits.values())
    return [pickle.loads(waits[rank].value if rank in waits else data) for rank in range(lane.size)]


def scatter(lane: Lane, sendobj: Sequence[Any] | None, root: int = 0, *, known: Any = None) -> Schedule:
    """The root sends to every rank."""
    if lane.rank != check_root(root, lane.size):
        incoming = lane.receive_bytes(root)
        yield [incoming]
        return pickle.loads(incoming.value)
    data = [pickle.dumps(obj) for obj in one_for_each(sendobj, lane.size)] if known is None else known
    yield [lane.send_bytes(rank, data[rank]) for rank in range(lane.size) if rank != root]
    return pickle.loads(data[root])


def all_to_all(lane: Lane, sendobj: Sequence[Any], *, known: Any = None) -> Schedule:
    """Object i goes to rank i."""
    data = [pickle.dumps(obj) for obj in one_for_each(sendobj, lane.size)] if known is None else known
    return _exchange(lane, list(enumerate(data)), list(range(lane.size)))


def all_gather(lane: Lane, sendobj: Any, *, known: Any = None) -> Schedule:
    """Every rank sends its object to all."""
    data = pickle.dumps(sendobj) if known is None else known[0]
    others = [(lane.rank + shift) % lane.size for shift in range(1, lane.size)]
    waits = {rank: lane.receive_bytes(rank) for rank in others}
    yield [*waits.values(), *(lane.send_bytes(rank, data) for rank in others)]
    return [pickle.loads(waits[rank].value if rank in waits else data) for rank in range(lane.size)]


def exchange(lane: Lane, outgoing: list[tuple[int, Any]], sources: list[int]) -> Schedule:
    """Send objects to ranks; returns those of other ranks, in the order of `sources`."""
    return _exchange(lane, [(rank, pickle.dumps(obj)) for rank, obj in outgoing], sources)


def _exchange(lane: Lane, data: list[tuple[int, Any]], sources: list[int]) -> Schedule:
    waits = [lane.receive_bytes(rank) for rank in sources]
    yield [*waits, *(lane.send_bytes(rank, one) for rank, one in data)]
    return [pickle.loads(one.value) for one in waits]


def reduce(lane: Lane, sendobj: Any, op: Any = SUM, root: int = 0, *, known: Any = None) -> Schedule:
    """A binomial tree to rank 0 in the order of ranks; returns the result on the root."""
    check_function(op)
    own, found = pickle.dumps(sendobj) if known is None else known[0], _NOTHING
    step = 1
    check_root(root, lane.size)
    while step < lane.size:
        if lane.rank & step:
            yield [lane.send_bytes(lane.rank - step, own if found is _NOTHING else pickle.dumps(found))]
            break
        if lane.rank + step < lane.size:
            incoming = lane.receive_bytes(lane.rank + step)
            yield [incoming]
            found = op(pickle.loads(own) if found is _NOTHING else found, pickle.loads(incoming.value))
        step *= 2
    if root != 0:
        if lane.rank == 0:
            yield [lane.send_bytes(root, pickle.dumps(found))]
        elif lane.rank == root:
            incoming = lane.receive_bytes(0)
            yield [incoming]
            found = pickle.loads(incoming.value)
    if lane.rank != root:
        return None
    return pickle.loads(own) if found is _NOTHING else found


def all_reduce(lane: Lane, sendobj: Any, op: Any = SUM, *, known: Any = None) -> Schedule:
    """A reduction to rank 0 and a broadcast."""
    found = yield from reduce(lane, sendobj, op, 0, known=known)
    return (yield from broadcast(lane, found, 0))


def scan(lane: Lane, sendobj: Any, op: Any = SUM, *, known: Any = None) -> Schedule:
    """From rank to rank. Returns the result up to this one."""
    return (yield from _prefixes(lane, sendobj, op, known))[1]


def exscan(lane: Lane, sendobj: Any, op: Any = SUM, *, known: Any = None) -> Schedule:
    """The same up to the rank before."""
    return (yield from _prefixes(lane, sendobj, op, known))[0]


def _prefixes(lane: Lane, obj: Any, op: Any, known: Any) -> Schedule:
    check_function(op)
    data = pickle.dumps(obj) if known is None else known[0]
    before, result = None, pickle.loads(data)
    if lane.rank > 0:
        incoming = lane.receive_bytes(lane.rank - 1)
        yield [incoming]
        before = pickle.loads(incoming.value)
        result = op(pickle.loads(incoming.value), result)
    if lane.rank + 1 < lane.size:
        yield [lane.send_bytes(lane.rank + 1, pickle.dumps(result) if lane.rank else data)]
    return before, result


def one_for_each(objs: Sequence[Any] | None, size: int) -> list[Any]:
    """The objects of a list, of which each rank gets one."""
    found = [None] * size if objs is None else list(objs)
    if len(found) != size:
        raise ValueError(f"expecting {size} items, got {len(found)}")
    return found
