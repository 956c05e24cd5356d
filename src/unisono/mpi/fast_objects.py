"""Lowercase collectives in one call of the engine: its packets carry pickles of few bytes.

The engine compares what the ranks call. Where an object has no room all ranks learn it, and run the schedule.
"""

from __future__ import annotations

import builtins
import functools
from collections.abc import Sequence
from typing import Any

from unisono._native import encode_packets, exchange_packets
from unisono.engine.group import objects as packets
from unisono.engine.operations.reduction import ReduceOp
from unisono.mpi import constants
from unisono.mpi import object_schedules as schedules
from unisono.mpi.errors import Exception, check_root
from unisono.mpi.op import check_function
from unisono.mpi.pickling import pickle
from unisono.mpi.plan import finished
from unisono.mpi.progress import complete, under_way

SUM = schedules.SUM
_OF_ROOT = ("broadcast_object", "scatter_object")


class Follow(builtins.Exception):
    """An object has no room in a packet. known: the bytes that this rank gives."""

    def __init__(self, known: list[Any] | None) -> None:
        self.known = known


def broadcast(state: Any, group: Any, obj: Any, root: int = 0) -> Any:
    """See `schedules.broadcast`."""
    root = check_root(root, state.size)
    return _exchange(group, "broadcast_object", root, [obj] if state.rank == root else None)[0]


def gather(state: Any, group: Any, sendobj: Any, root: int = 0) -> Any:
    """See `schedules.gather`."""
    root = check_root(root, state.size)
    found = _exchange(group, "gather_object", root, [sendobj], state.rank == root)
    return found if state.rank == root else None


def scatter(state: Any, group: Any, sendobj: Sequence[Any] | None, root: int = 0) -> Any:
    """See `schedules.scatter`."""
    root = check_root(root, state.size)
    objs = schedules.one_for_each(sendobj, state.size) if state.rank == root else None
    return _exchange(group, "scatter_object", root, objs)[0]


def all_gather(_: Any, group: Any, sendobj: Any) -> Any:
    """See `schedules.all_gather`."""
    return _exchange(group, "all_gather_object", 0, [sendobj])


def all_to_all(state: Any, group: Any, sendobj: Sequence[Any]) -> Any:
    """See `schedules.all_to_all`."""
    return _exchange(group, "all_to_all_object", 0, schedules.one_for_each(sendobj, state.size))


def reduce(state: Any, group: Any, sendobj: Any, op: Any = SUM, root: int = 0) -> Any:
    """See `schedules.reduce`."""
    root = check_root(root, state.size)
    check_function(op)
    found = _exchange(group, "reduce_object", root, [sendobj], state.rank == root)
    return functools.reduce(op, found) if state.rank == root else None


def all_reduce(state: Any, group: Any, sendobj: Any, op: Any = SUM) -> Any:
    """The result of rank 0, on every rank."""
    check_function(op)
    parts = _exchange(group, "all_reduce_object", 0, [sendobj], False)
    found = failure = None
    if state.rank == 0:
        try:
            found = [functools.reduce(op, _loaded(parts))]
        except builtins.Exception as error:  # noqa: BLE001  (it is raised when the others know it)
            failure = error
    try:
        return _exchange(group, "broadcast_object", 0, found, failure=failure)[0]
    except Follow as follow:
        return complete(schedules.broadcast(state.lane(), None, 0, known=follow.known))


def scan(state: Any, group: Any, sendobj: Any, op: Any = SUM) -> Any:
    """See `schedules.scan`."""
    check_function(op)
    parts = _exchange(group, "scan_object", 0, [sendobj], False)
    return functools.reduce(op, _loaded(parts[: state.rank + 1]))


def exscan(state: Any, group: Any, sendobj: Any, op: Any = SUM) -> Any:
    """See `schedules.exscan`."""
    check_function(op)
    parts = _exchange(group, "exscan_object", 0, [sendobj], False)
    return functools.reduce(op, _loaded(parts[: state.rank])) if state.rank else None


def _loaded(parts: list[Any]) -> list[Any]:
    return list(map(pickle.decode, parts))


def _exchange(
    group: Any, kind: str, root: int, objs: list[Any] | None, loads: bool = True,
    failure: builtins.Exception | None = None,
) -> list[Any]:  # fmt: skip
    """The objects for this rank. loads: not their bytes.

    Args:
        objs: what this rank gives; None: nothing.  failure: why there are none.
    Raises:
        Follow: an object has no room, on all ranks.
        Exception: another rank could not encode its objects. That rank raises its own error.
    """
    known = sent = None
    if objs is not None:
        try:
            known, sent = encode_packets(objs, pickle.encode)
        except builtins.Exception as error:  # noqa: BLE001  (it is raised when the others know it)
            failure = error
    if failure is not None:
        sent = packets.refusal(len(objs or [None]), f"{type(failure).__name__}: {failure}")
    call = functools.partial(_beside_schedules, group) if under_way else group._call
    try:
        follow, parts = exchange_packets(
            call, kind, sent, group.size, packets.NotEncoded, pickle.decode if loads else None,
            ReduceOp.SUM, root, None, False, False, None,
        )  # fmt: skip
    except packets.NotEncoded as refused:
        if failure is None:
            rank = root if kind in _OF_ROOT else refused.place
            text = f"{kind.removesuffix('_object')}: rank {rank} had no object to send: {refused}"
            raise Exception(constants.ERR_OTHER, text) from None
    if failure is not None:
        raise failure
    if follow:
        raise Follow(known)
    return parts


def _beside_schedules(group: Any, kind: str, out: Any, sendbuf: Any, op: Any, root: int, *_: Any) -> None:
    finished(group._call(kind, out, sendbuf, op, root, None, False, True, None))
