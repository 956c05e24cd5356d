"""NCCL refuses two ranks of a group on one GPU. On virtual GPUs the same mistake gets NCCL's error text.

Each rank writes its device into the group's store before its first call.
"""

from __future__ import annotations

import socket

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

TEXT = (
    "NCCL error: invalid usage (run with NCCL_DEBUG=WARN for details)\n"
    "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\n"
    "Last error:\n"
    "Duplicate GPU detected : rank {0} and rank {1} both on CUDA device {2:x}\n"
    "Each rank needs a device of its own: torch.cuda.set_device(int(os.environ['LOCAL_RANK']))."
)


class DeviceOwners:
    """The device of each rank of one group."""

    def __init__(self, store: c10d.Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self.agreed = size == 1

    def agree(self, device: torch.device) -> None:
        """Report this rank's device before its first call, and look at those that others have reported.

        Of two ranks, the one that reports later sees the other. Nobody asks later: a rank may end by then,
        and with it the store.

        Raises:
            DistBackendError: one of them uses the device of this rank.
        """
        self.agreed = True
        bus = torch.cuda.get_device_properties(device).pci_bus_id << 12  # type: ignore[attr-defined]
        mine = f"{bus} {socket.gethostname()}"
        self._store.set(f"device of {self._rank}", mine)
        for rank in range(self._size):
            if rank == self._rank or not self._store.check([f"device of {rank}"]):
                continue
            if self._store.get(f"device of {rank}").decode() == mine:
                raise dist.DistBackendError(TEXT.format(*sorted((rank, self._rank)), bus))
