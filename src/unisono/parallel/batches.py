"""Batches: which rows are a rank's own, and how they are cut into micro-batches.

A batch is (inputs, targets). Inputs: a tensor, a tuple of arguments, or a dict of keyword arguments.
Dimension 0 of every tensor counts the rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

__all__ = ["RankBatches", "cut_rows", "micro_batches", "rows_of", "sizes"]


def sizes(rows: int, parts: int) -> list[int]:
    """Cut `rows` into `parts` that differ by one at most, larger ones first. Example: 7, 3 -> [3, 2, 2]."""
    return [rows // parts + (part < rows % parts) for part in range(parts)]


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """Yield every tensor in nested tuples, lists and dicts."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, dict):
        yield from tensors_of(list(batch.values()))
    elif isinstance(batch, (tuple, list)):
        for part in batch:
            yield from tensors_of(part)


def rows_of(batch: Any) -> int:
    """Return the rows of a batch.

    Raises:
        ValueError: it has no tensor, or its tensors disagree.
    """
    if any(tensor.dim() == 0 for tensor in tensors_of(batch)):
        raise ValueError("a tensor of a batch has no dimension; dimension 0 counts the rows")
    counts = {len(tensor) for tensor in tensors_of(batch)}
    if len(counts) != 1:
        raise ValueError(
            f"the tensors of a batch must have one number of rows in dimension 0, not {sorted(counts)}"
        )
    return counts.pop()


def cut_rows(batch: Any, first: int, stop: int) -> Any:
    """Take rows [first, stop) of every tensor in `batch`; other objects do not change."""
    if isinstance(batch, Tensor):
        return batch[first:stop]
    if isinstance(batch, dict):
        return {key: cut_rows(value, first, stop) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return type(batch)(cut_rows(value, first, stop) for value in batch)
    return batch


def micro_batches(batch: Any, parts: int) -> list[Any]:
    """Cut `batch` into `parts`; if the rows do not divide evenly, the first parts have one row more."""
    cut, first = [], 0
    for size in sizes(rows_of(batch), parts):
        cut.append(cut_rows(batch, first, first + size))
        first += size
    return cut


class RankBatches(Iterable[Any]):
    """One data rank's part of a loader of whole batches: it yields that rank's rows of each batch.

    A DataLoader over a map-style dataset loads these rows only; rank 0 draws the order for all, once an
    epoch. Any other iterable must yield the same batches on every rank.

    Raises:
        ValueError: the loader's sampler leaves each rank a part of the data already.
    """

    def __init__(self, loader: Iterable[Any], part: int, parts: int) -> None:
        _check_sampler(loader)
        self._loader, self._part, self._parts = loader, part, parts

    def __iter__(self) -> Iterator[Any]:
        loader = self._loader
        if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
            yield from self._indexed(loader)
            return
        for batch in loader:
            yield cut_rows(batch, *self._own(rows_of(batch)))

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def _own(self, rows: int) -> tuple[int, int]:
        if rows < self._parts:
            raise ValueError(
                f"a batch of {rows} rows is too small for {self._parts} data ranks; use drop_last=True"
            )
        counts = sizes(rows, self._parts)
        first = sum(counts[: self._part])
        return first, first + counts[self._part]

    def _indexed(self, loader: DataLoader[Any]) -> Iterator[Any]:
        batched = loader.batch_sampler is not None  # else an item of the dataset is a whole batch
        sampler: Any = loader.batch_sampler if batched else loader.sampler
        drawn: list[Any] = [list(sampler)] if dist.get_rank() == 0 else [None]
        dist.broadcast_object_list(drawn, src=0, device=torch.device("cpu"))
        own = []
        for batch in drawn[0] if batched else ():
            first, stop = self._own(len(batch))
            own.append(batch[first:stop])
        order: dict[str, Any] = (
            {"batch_sampler": own} if batched else {"sampler": drawn[0], "batch_size": None}
        )
        again: DataLoader[Any] = DataLoader(
            loader.dataset,
            **order,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
        )
        for batch in again:
            yield batch if batched else cut_rows(batch, *self._own(rows_of(batch)))


def _check_sampler(loader: Iterable[Any]) -> None:
    """Refuse a sampler that cuts the data for the ranks of a job, as DistributedSampler does."""
    batches = getattr(loader, "batch_sampler", None)
    for sampler in (getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)):
        parts = getattr(sampler, "num_replicas", 1)
        if isinstance(parts, int) and parts > 1:
            raise ValueError(
                f"run.shard cuts each batch for the data ranks; the loader's {type(sampler).__name__} leaves "
                f"1 of {parts} parts of the data, and loses the rest. Make the loader without it, with "
                "shuffle=True and the batch size of all ranks together"
            )
