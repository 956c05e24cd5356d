"""The fast path of blocking collectives: calls of plain arrays go to the engine at once."""

from __future__ import annotations

from typing import Any

import numpy as np

from unisono.mpi.buffers import IN_PLACE
from unisono.mpi.collectives import SUM, Collectives
from unisono.mpi.op import Op

_PLAIN = "bBhilqfd"
"""NumPy's characters of types that need no reading."""


class FastCollectives(Collectives):
    """The same, but a call of plain arrays goes to the engine at once."""

    def Barrier(self) -> None:
        """Wait until every rank has called it."""
        group = None if self._state is None else self._state.fast_group()
        if group is None:
            super().Barrier()
        else:
            group.barrier()

    def Bcast(self, buf: Any, root: int = 0) -> None:
        """Copy the items of the root to every rank."""
        state = self._state
        plain = type(buf) is np.ndarray and buf.flags.c_contiguous and buf.size and state is not None
        if plain and 0 <= root < state.size and (buf.flags.writeable or root == state.rank):
            group = state.fast_group() if buf.dtype.char in _PLAIN else None
            if group is not None:
                group.broadcast(buf.reshape(-1).view(np.uint8), root)
                return
        super().Bcast(buf, root)

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> None:
        """Reduce to every rank."""
        state = self._state
        if (
            type(recvbuf) is np.ndarray
            and (type(sendbuf) is np.ndarray or sendbuf is IN_PLACE)
            and state is not None
            and type(op) is Op
            and op._state is not None
            and op._state.engine is not None
            and recvbuf.dtype.char in _PLAIN
            and recvbuf.flags.carray
            and recvbuf.size
        ):
            alike = sendbuf is IN_PLACE or (
                sendbuf.dtype == recvbuf.dtype
                and sendbuf.size == recvbuf.size
                and sendbuf.flags.c_contiguous
                and recvbuf.dtype.kind in op._state.kinds
            )
            group = state.fast_group() if alike and recvbuf.dtype.kind in op._state.kinds else None
            if group is not None:
                if sendbuf is IN_PLACE:
                    group.all_reduce(recvbuf, op._state.engine)
                elif np.may_share_memory(sendbuf, recvbuf):
                    recvbuf.reshape(-1)[:] = sendbuf.reshape(-1)
                    group.all_reduce(recvbuf, op._state.engine)
                else:
                    group.all_reduce(sendbuf, op._state.engine, out=recvbuf)
                return
        super().Allreduce(sendbuf, recvbuf, op)
