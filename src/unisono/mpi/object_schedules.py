"""Collectives of pickled objects as schedules: the same as in schedules.py, of messages of any length.

known: the bytes of what this rank gives, where they have been made already.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from unisono.mpi.errors import check_root, of_size
from unisono.mpi.op import OPS, check_function
from unisono.mpi.pickling import pickle
from unisono.mpi.progress import Schedule
from unisono.mpi.transport import Lane

SUM = OPS["SUM"]
_NOTHING = object()


def broadcast(lane: Lane, obj: Any, root: int = 0, *, known: Any = None) -> Schedule:
    """Down the tree. Returns the object of the root."""
    parent, children = lane.tree(check_root(root, lane.size))
    if parent is not None:
        incoming = lane.receive_bytes(parent)
        yield [incoming]
        data = incoming.value
    else:
        data = pickle.dumps(obj) if known is None else known[0]
    yield [lane.send_bytes(rank, data) for rank in children]
    return pickle.loads(data)


def gather(lane: Lane, sendobj: Any, root: int = 0, *, known: Any = None) -> Schedule:
    """Every rank sends to the root, which gets the list."""
    at_root, peer = lane.role(root)
    data = pickle.dumps(sendobj) if known is None else known[0]
    gives = [] if peer is None else [(peer, data)]
    found = yield from _exchange(lane, gives, range(lane.size) if at_root else ())
    return found if at_root else None


def scatter(lane: Lane, sendobj: Sequence[Any] | None, root: int = 0, *, known: Any = None) -> Schedule:
    """The root sends to every rank."""
    at_root, peer = lane.role(root)
    data: list[Any] = []
    if at_root:
        data = [pickle.dumps(obj) for obj in one_for_each(sendobj, lane.size)] if known is None else known
    found = yield from _exchange(lane, enumerate(data), [] if peer is None else [peer])
    return found[0] if found else None


def all_to_all(lane: Lane, sendobj: Sequence[Any], *, known: Any = None) -> Schedule:
    """Object i goes to rank i."""
    data = [pickle.dumps(obj) for obj in one_for_each(sendobj, lane.size)] if known is None else known
    return _exchange(lane, enumerate(data), range(lane.size))


def all_gather(lane: Lane, sendobj: Any, *, known: Any = None) -> Schedule:
    """Every rank sends its object to all."""
    data = pickle.dumps(sendobj) if known is None else known[0]
    return _exchange(lane, [(rank, data) for rank in range(lane.size)], range(lane.size))


def exchange(lane: Lane, outgoing: list[tuple[int, Any]], sources: Sequence[int]) -> Schedule:
    """Send objects to ranks; returns those of other ranks, in the order of `sources`."""
    return _exchange(lane, [(rank, pickle.dumps(obj)) for rank, obj in outgoing], sources, keeps=False)


def _exchange(
    lane: Lane, data: Iterable[tuple[int, Any]], sources: Sequence[int], keeps: bool = True
) -> Schedule:
    """See `schedules.exchange`. keeps: what this rank has for itself is not sent."""
    own = lane.rank if keeps and not lane.inter else -1
    gives = sorted(data, key=lambda pair: (pair[0] - lane.rank) % lane.size)
    waits = [None if rank == own else lane.receive_bytes(rank) for rank in sources]
    yield [one for one in waits if one] + [lane.send_bytes(rank, one) for rank, one in gives if rank != own]
    kept = next((one for rank, one in gives if rank == own), None)
    return [pickle.loads(one.value if one else kept) for one in waits]


def reduce(lane: Lane, sendobj: Any, op: Any = SUM, root: int = 0, *, known: Any = None) -> Schedule:
    """Up the tree to rank 0, in the order of ranks; returns the result on the root."""
    check_function(op)
    own, found = pickle.dumps(sendobj) if known is None else known[0], _NOTHING
    check_root(root, lane.size)
    parent, children = lane.tree(0)
    for rank in reversed(children):
        incoming = lane.receive_bytes(rank)
        yield [incoming]
        found = op(pickle.loads(own) if found is _NOTHING else found, pickle.loads(incoming.value))
    if parent is not None:
        yield [lane.send_bytes(parent, own if found is _NOTHING else pickle.dumps(found))]
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
    found: list[Any] = of_size([None] * size if objs is None else list(objs), size)
    return found
