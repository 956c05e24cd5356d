"""Writes a checkpoint of PyTorch's DCP: its `save`, in which ranks would pickle what they tell each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint

from .control_data import gather_on_rank_0, on_every_rank, on_rank_0, scatter_from_rank_0

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

__all__ = ["CheckpointWork"]

dcp: Any = torch.distributed.checkpoint  # its names are there, but PyTorch does not declare them exported


class _CopyPlanner(dcp.DefaultSavePlanner):  # type: ignore[misc]
    """Which rank writes what; with copies of this rank's values once `copy` was called."""

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[Any, Tensor] = {}

    def copy(self, items: Sequence[Any]) -> None:
        self._copies = {item.index: self.resolve_data(item).to("cpu", copy=True) for item in items}

    def resolve_data(self, item: Any) -> Tensor:
        if item.index in self._copies:
            return self._copies.pop(item.index)
        found: Tensor = super().resolve_data(item).detach()
        return found


class CheckpointWork:
    """What this rank writes of one checkpoint. All ranks of the group make it, and call its methods.

    What is raised on one rank is raised on all.

    Args:
        tensors: of this rank, by name.
        folder: is there, and empty.
    """

    def __init__(self, tensors: Callable[[], Mapping[str, Tensor]], folder: Path, group: Any) -> None:
        self._folder, self._group = folder, group
        self._planner, self._writer = _CopyPlanner(), dcp.FileSystemWriter(folder)
        self._metadata: Any = None  # of rank 0
        real = torch.accelerator.is_available()
        self._device = torch.accelerator.current_device_index() if real else None
        plans = gather_on_rank_0(lambda: self._local_plan(tensors()), group)
        self._plan: Any = scatter_from_rank_0(lambda: self._plans_of_all(plans), group)

    def _local_plan(self, tensors: Mapping[str, Tensor]) -> Any:
        first = dist.get_rank(self._group) == 0
        self._planner.set_up_planner(tensors, self._writer.storage_meta(), first)
        self._writer.set_up_storage_writer(first)
        return self._writer.prepare_local_plan(self._planner.create_local_plan())

    def _plans_of_all(self, local: list[Any]) -> list[Any]:
        plans, self._metadata = self._planner.create_global_plan(local)
        found: list[Any] = self._writer.prepare_global_plan(plans)
        return found

    def copy(self) -> None:
        """Write the values that there are now, whatever becomes of them."""
        on_every_rank(lambda: self._planner.copy(self._plan.items), self._group)

    def write(self, publish: Callable[[], object]) -> None:
        """Write; also in another thread. publish: what rank 0 does when the checkpoint is whole."""
        with torch.accelerator.device_index(self._device):
            results = gather_on_rank_0(self._written, self._group)

            def finish() -> None:
                self._writer.finish(self._metadata, results)
                publish()

            on_rank_0(finish, self._group)

    def _written(self) -> Any:
        try:
            return self._writer.write_data(self._planner.finish_plan(self._plan), self._planner).wait()
        except Exception as error:
            where = f"{self._folder} cannot be written (rank {dist.get_rank()}: {error!r})"
            raise RuntimeError(where) from error
