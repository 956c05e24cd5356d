"""Unisono for torchft: training that continues when a replica dies.

    from unisono.torch.torchft import ProcessGroupUnisono

    manager = torchft.Manager(pg=ProcessGroupUnisono(timeout=timedelta(seconds=10)), ...)

torchft makes the group again, over a store of its own, whenever replicas leave or join. This module needs the
package torchft.
"""

from __future__ import annotations

from typing import Any

import torch.distributed.distributed_c10d as c10d
from torchft.process_group import ProcessGroupWrapper

from unisono.torch import process_group


class ProcessGroupUnisono(ProcessGroupWrapper):  # type: ignore[misc]  # torchft has no types here
    """A process group that torchft makes again whenever the replicas change.

    Args:
        timeout: of every operation, and of making the group.
    """

    def _create_pg(self, store: c10d.Store, rank: int, world_size: int) -> Any:
        return process_group.ProcessGroupUnisono(
            store, rank, world_size, self._timeout, f"torchft {self._uuid}"
        )

    def getBackendName(self) -> str:  # noqa: N802
        """Return the name that torchft shows."""
        return "torchft-unisono"
