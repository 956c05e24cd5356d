"""What a communicator says of failed ranks: a fault of the engine ends the whole job, so there are none."""

from __future__ import annotations

from typing import Any

import numpy as np

from unisono.mpi.buffers import bytes_of
from unisono.mpi.group import GROUP_EMPTY, Group
from unisono.mpi.op import OPS
from unisono.mpi.progress import Schedule, ScheduleRun, complete
from unisono.mpi.request import Request


class Recovery:
    """The methods of `Comm` about failures."""

    _alive: Any
    _allreduce: Any
    Dup: Any
    Idup: Any

    def Get_failed(self) -> Group:
        """The ranks that have failed: none."""
        self._alive()
        return Group(GROUP_EMPTY)

    def Ack_failed(self, num_to_ack: int | None = None) -> int:  # noqa: ARG002
        """How many failed ranks the program knows of: 0."""
        self._alive()
        return 0

    def Agree(self, flag: int) -> int:
        """The bits that all ranks have set."""
        bits = np.array([flag], np.int32)
        complete(self._agreement(bits))
        return int(bits[0])

    def Iagree(self, flag: Any) -> Request:
        """See `Agree`; the result is left in the buffer."""
        raw = bytes_of(flag, writable=True)[0]
        if raw.size != np.dtype(np.int32).itemsize:
            raise ValueError(f"flag: {raw.size} bytes, expected those of one int")
        return Request._for(ScheduleRun(self._agreement(raw.view(np.int32))))

    def _agreement(self, bits: Any) -> Schedule:
        found: Schedule = self._allreduce(
            self._alive().lane_of_agreement(), bits.copy(), bits, OPS["BAND"]
        ).schedule
        return found

    def Shrink(self) -> Any:
        """A communicator of the ranks that have not failed: all."""
        return self.Dup()

    def Ishrink(self) -> tuple[Any, Request]:
        """See `Shrink`."""
        return self.Idup()

    def Revoke(self) -> None:
        """Not there."""
        raise NotImplementedError("Revoke: a fault ends every operation of the job; see unisono.Group.shrink")

    def Is_revoked(self) -> bool:
        """False: see `Revoke`."""
        self._alive()
        return False
