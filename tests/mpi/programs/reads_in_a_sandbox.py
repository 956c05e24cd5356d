"""An object with __cuda_array_interface__ is sent where the system refuses copies between processes, too, and
memory that is not the host's is refused.
"""

from typing import Any

import numpy as np

from sandbox import refuse
from unisono import MPI


class Seen:
    """An array of four floats at an address."""

    def __init__(self, address: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (4,), "typestr": "<f4", "data": (address, False), "version": 3
        }  # fmt: skip


refuse("read")
x = np.arange(4, dtype=np.float32)
MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, Seen(x.ctypes.data))
assert (x == np.arange(4)).all()
try:
    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, Seen(4096))  # where nothing is
    raise SystemExit("read what nobody may read")
except BufferError as error:
    assert "not in the memory of the host" in str(error)
print("all is well")
