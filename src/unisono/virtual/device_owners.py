"""NCCL refuses two ranks of a group on one GPU. On virtual GPUs the same mistake gets NCCL's error text.

Each rank writes its device into the group's store at its first call. After that call it reads the devices of
the others. A rank that has not called yet finds the mistake itself.
"""

from __future__ import annotations

import socket
from typing import Any

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
        self._unseen = set(range(size)) - {rank}
        self._mine = ""

    @property
    def agreed(self) -> bool:
        """Whether all ranks have reported, each with a device of its own."""
        return not self._unseen

    def note(self, device: torch.device) -> None:
        """Report this rank's device, at the first call."""
        if not self._mine:
            properties: Any = torch.cuda.get_device_properties(device)
            self._mine = f"{properties.pci_bus_id << 12} {socket.gethostname()}"
            self._store.set(self._key(self._rank), self._mine)

    def compare(self) -> None:
        """Check the ranks that have reported since the last time.

        Raises:
            DistBackendError: one of them uses the device of this rank.
        """
        for rank in sorted(self._unseen):
            theirs = self._noted(rank)
            if theirs == self._mine:
                bus = int(self._mine.partition(" ")[0])
                raise dist.DistBackendError(TEXT.format(*sorted((rank, self._rank)), bus))

    def _noted(self, rank: int) -> str:
        """Return the device of another rank; "" if it has not reported."""
        try:
            if not self._store.check([self._key(rank)]):
                return ""
            theirs: str = self._store.get(self._key(rank)).decode()
        except RuntimeError:  # the rank that serves the store has ended: so does the job
            theirs = ""
        self._unseen.remove(rank)
        return theirs

    @staticmethod
    def _key(rank: int) -> str:
        return f"device of {rank}"
