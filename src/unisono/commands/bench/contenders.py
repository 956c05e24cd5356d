"""The libraries that are measured, each behind the same three methods.

A contender lives in a worker process. `bind` does everything that a user does once (arguments,
wrapping of arrays), so that the callable it returns is one call of the library and nothing else.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from unisono.commands.bench.cases import OPERATIONS, REDUCE_OPS, Array, BenchCase, CaseBuffers, numpy_dtype

__all__ = [
    "ASIDE",
    "LIMITS",
    "UNJOINED",
    "Contender",
    "MemcpyContender",
    "SharedContender",
    "UnisonoContender",
    "choice_record",
    "cut",
    "partner_of",
    "pingpong",
    "required_passes",
]

Call = Callable[[], object]

LIMITS = ("memcpy", "limit")
"""Sides that communicate nothing: what the machine can do."""
ASIDE = (*LIMITS, "shared")
"""Sides that are not another library, and so never the best peer."""


class Contender(ABC):
    """The interface of a library for the worker."""

    @abstractmethod
    def bind(self, case: BenchCase, buffers: CaseBuffers) -> Call:
        """Return a callable that runs the case's operation once.

        Raises:
            ValueError: the library has no such operation.
        """

    def choice(self, case: BenchCase) -> dict[str, Any]:  # noqa: ARG002
        """The algorithm that the library takes for a case, and the microseconds that it predicts."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Leave the group."""


def partner_of(rank: int, size: int) -> int | None:
    """Ranks 2k and 2k+1 play ping-pong; with an odd size the last rank is idle.

    Example: size 5 -> 1, 0, 3, 2, None.
    """
    partner = rank ^ 1
    return partner if partner < size else None


def cut(array: Any, case: BenchCase) -> Any:
    """The parts of a whole buffer, as views; None where there is no buffer."""
    return None if array is None else [array[case.part_of(rank)] for rank in range(case.ranks)]


def pingpong(
    rank: int, size: int, send: Callable[..., object], recv: Callable[..., object], *ball: Any
) -> Call:
    """A rank's call of the case send_recv. `send` and `recv` take one of the two buffers, and the partner."""
    partner, (inp, out) = partner_of(rank, size), ball
    if partner is None:
        return lambda: None

    def serve() -> None:
        send(inp, partner)
        recv(out, partner)

    def answer() -> None:
        recv(out, partner)
        send(out, partner)

    return serve if rank < partner else answer


def choice_record(choice: Any, case: BenchCase) -> dict[str, Any]:
    """The `choice` of Unisono: `Group.choice` for the case's collective."""
    collective = OPERATIONS[case.operation].even
    if collective == "send_recv":
        return {}
    chosen = choice(collective, case.nbytes, case.algorithm or None)
    return {
        "algorithm": chosen.algorithm,
        "predicted_us": chosen.seconds * 1e6,
        "calibrated": chosen.calibrated,
    }


class MemcpyContender(Contender):
    """The memory's limit: every rank copies the case's size, at the same time as the others."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def bind(self, case: BenchCase, buffers: CaseBuffers) -> Call:
        """Make the buffers of a case, and the call to be timed."""
        source, destination = (np.full(case.nbytes, value, np.uint8) for value in (1, 0))
        buffers.inp, buffers.out = source, destination
        return partial(ctypes.memmove, destination.ctypes.data, source.ctypes.data, case.nbytes)

    def close(self) -> None:
        """Do nothing: there is no group."""


class LimitContender(MemcpyContender):
    """The machine's limit: every rank only reads and writes the bytes that the operation requires, once each,
    at the same time as the others. See docs/bench.md.
    """

    def bind(self, case: BenchCase, buffers: CaseBuffers) -> Call:
        """Make the buffers of a case, and the call to be timed.

        Raises:
            ValueError: the operation moves nothing.
        """
        from unisono._native import touch

        if not case.count:
            raise ValueError(f"{case.operation} moves no bytes")
        for array in (buffers.inp, buffers.out):
            if array is not None:
                array.fill(0)
        out, inp = (_address(buffers, which) for which in ("out", "inp"))
        passes = [
            partial(touch, TOUCHES.index(kind), out, inp, nbytes)
            for kind, nbytes in required_passes(case, self.rank)
        ]
        return passes[0] if len(passes) == 1 else lambda: [each() for each in passes]


TOUCHES = ("read", "write", "update", "copy")
UNJOINED: dict[str, type[MemcpyContender]] = {"memcpy": MemcpyContender, "limit": LimitContender}
"""Contenders whose ranks do not communicate."""


def required_passes(case: BenchCase, rank: int) -> list[tuple[str, int]]:
    """The passes over memory, (kind, bytes), that no implementation of the case can do without on this rank.

    Example: all_reduce of 4096 bytes -> [("update", 4096)]: read a value, write the result to its place.
    """
    item = numpy_dtype(case.dtype).itemsize
    operation, whole, part = OPERATIONS[case.operation].even, case.nbytes, case.parts[rank] * item
    root = rank == case.root
    both = [("read", part), ("write", whole)]
    return {
        "all_reduce": [("update", whole)],
        "scan": [("read", whole) if rank == 0 else ("update", whole)],
        "exclusive_scan": [("read", whole) if rank == 0 else ("update", whole)],
        "broadcast": [("read" if root else "write", whole)],
        "reduce": [("update" if root else "read", whole)],
        "all_gather": both,
        "gather": both if root else [("read", part)],
        "reduce_scatter": [("read", whole), ("write", part)],
        "scatter": [("read", whole), ("write", part)] if root else [("write", part)],
        "all_to_all": [("read", whole), ("write", case.ranks * part)],
        "send_recv": [("copy", whole)] * 2 if rank % 2 == 0 and rank + 1 < case.ranks else [],
        "barrier": [],
    }[operation]


def _address(buffers: CaseBuffers, which: str) -> int:
    """Of the buffer that is written ("out") or read ("inp"); operations in place have but one."""
    found = buffers.result if which == "out" or buffers.inp is None else buffers.inp
    return 0 if found is None else int(found.ctypes.data)


class UnisonoContender(Contender):
    """Unisono through its NumPy API."""

    def __init__(self, rank: int, size: int, address: str) -> None:
        import unisono as un

        self.rank, self.size = rank, size
        self.group = un.init_process_group(init_method=f"tcp://{address}", rank=rank, world_size=size)
        self.op_of = {name: getattr(un, name.upper()) for name in REDUCE_OPS}

    def choice(self, case: BenchCase) -> dict[str, Any]:
        """The algorithm, and the predicted time."""
        return choice_record(self.group.choice, case)

    def bind(self, case: BenchCase, buffers: CaseBuffers) -> Call:
        """Make the buffers of a case, and the call to be timed."""
        group, inp, out, op = self.group, buffers.inp, buffers.out, self.op_of[case.op]
        binders: dict[str, Callable[[], Call]] = {
            "all_reduce": lambda: partial(group.all_reduce, inp, op),
            "broadcast": lambda: partial(group.broadcast, inp, src=case.root),
            "reduce": lambda: partial(group.reduce, inp, dst=case.root, op=op),
            "all_gather": lambda: partial(group.all_gather, self._rows(out), inp),
            "reduce_scatter": lambda: partial(group.reduce_scatter, out, self._rows(inp), op),
            "all_to_all": lambda: partial(group.all_to_all, self._rows(out), self._rows(inp)),
            "gather": lambda: partial(group.gather, inp, self._rows(out), dst=case.root),
            "scatter": lambda: partial(group.scatter, out, self._rows(inp), src=case.root),
            "barrier": lambda: group.barrier,
            "send_recv": lambda: pingpong(self.rank, self.size, group.send, group.recv, inp, out),
            "scan": lambda: partial(group.scan, inp, op),
            "exclusive_scan": lambda: partial(group.exclusive_scan, inp, op),
            "all_gather_v": lambda: partial(group.all_gather_v, cut(out, case), inp),
            "all_to_all_v": lambda: partial(group.all_to_all, list(self._rows(out)), cut(inp, case)),
            "gather_v": lambda: partial(group.gather, inp, cut(out, case), dst=case.root),
            "scatter_v": lambda: partial(group.scatter, out, cut(inp, case), src=case.root),
        }
        call: Callable[..., object] = binders[case.operation]()
        return partial(call, algorithm=case.algorithm) if case.algorithm else call

    def _rows(self, array: Any) -> Any:
        """The API takes one array with a leading axis of p."""
        return None if array is None else array.reshape(self.size, -1)

    def close(self) -> None:
        """Leave the group."""
        self.group.close()


class SharedContender(UnisonoContender):
    """The same, with arrays that other ranks read in place."""

    @staticmethod
    def empty(numel: int, dtype: Any) -> Array:
        """An array of this contender's kind."""
        from unisono import empty

        return empty(numel, dtype)
