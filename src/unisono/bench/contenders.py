"""The libraries that are measured, each behind the same three methods.

A contender lives in a worker process. `bind` does everything that a user does once (arguments,
wrapping of arrays), so that the callable it returns is one call of the library and nothing else.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np

from unisono.bench.cases import Buffers, Case

__all__ = ["Contender", "MemcpyContender", "UnisonoContender", "join", "partner_of"]

Call = Callable[[], object]


class Contender(Protocol):
    """What the worker needs of a library."""

    def bind(self, case: Case, buffers: Buffers) -> Call:
        """Return a callable that runs the case's operation once."""

    def barrier(self) -> object:
        """Line the ranks up, outside the measured time."""

    def close(self) -> None:
        """Leave the group."""


def join(name: str, rank: int, size: int, port: int) -> Contender:
    """Make this process rank `rank` of the side called `name` (see peers.SIDES)."""
    if name == "memcpy":
        return MemcpyContender()
    if name == "unisono":
        return UnisonoContender(rank, size, port)
    from unisono.bench.torch_contender import TorchContender

    backend = "unisono" if name == "unisono-torch" else name
    return TorchContender(backend, rank, size, port)


def partner_of(rank: int, size: int) -> int | None:
    """Ranks 2k and 2k+1 play ping-pong; with an odd size the last rank looks on.

    Example: size 5 -> 1, 0, 3, 2, None.
    """
    partner = rank ^ 1
    return partner if partner < size else None


def idle() -> None:
    """The call of a rank that has no part in a case."""


class MemcpyContender:
    """What the memory can do: every rank copies the case's size, at the same time as the others."""

    def bind(self, case: Case, buffers: Buffers) -> Call:
        """Make the buffers of a case, and the call to be timed."""
        source, destination = (np.zeros(case.nbytes, np.uint8) for _ in range(2))
        source.fill(1)
        destination.fill(0)
        buffers.inp, buffers.out = source, destination
        return partial(ctypes.memmove, destination.ctypes.data, source.ctypes.data, case.nbytes)

    def barrier(self) -> None:
        """Nothing to line up: each rank copies on its own."""

    def close(self) -> None:
        """Nothing was joined."""


class UnisonoContender:
    """Unisono through its NumPy API."""

    def __init__(self, rank: int, size: int, port: int) -> None:
        import unisono as un

        self.rank, self.size = rank, size
        self.group = un.init_process_group(init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
        self.ops = {
            "sum": un.SUM,
            "avg": un.AVG,
            "product": un.PRODUCT,
            "min": un.MIN,
            "max": un.MAX,
            "band": un.BAND,
            "bor": un.BOR,
            "bxor": un.BXOR,
        }
        self.barrier = self.group.barrier

    def bind(self, case: Case, buffers: Buffers) -> Call:
        """Make the buffers of a case, and the call to be timed."""
        group, inp, out, op = self.group, buffers.inp, buffers.out, self.ops[case.op]
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
            "send_recv": lambda: self._pingpong(inp, out),
        }
        return binders[case.operation]()

    def _rows(self, array: Any) -> Any:
        """The API takes one array with a leading axis of p."""
        return None if array is None else array.reshape(self.size, -1)

    def _pingpong(self, inp: Any, out: Any) -> Call:
        partner = partner_of(self.rank, self.size)
        if partner is None:
            return idle
        send, recv = self.group.send, self.group.recv

        def serve() -> None:
            send(inp, partner)
            recv(out, partner)

        def answer() -> None:
            recv(out, partner)
            send(out, partner)

        return serve if self.rank < partner else answer

    def close(self) -> None:
        """Leave the group."""
        self.group.close()
