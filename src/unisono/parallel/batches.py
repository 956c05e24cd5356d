"""Batches: which rows are a rank's own, and how they are cut into micro-batches.

A batch is (inputs, targets). Inputs: a tensor, a tuple of arguments, a mapping of keyword arguments, or a
dataclass, the one argument. Dimension 0 of every tensor counts the rows.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from unisono.parallel.graph.containers import mapped, strange_in, tensors_in
from unisono.torch.control_data import on_rank_0

from .generators import drawing, seed_of


def sizes(rows: int, parts: int) -> list[int]:
    """Cut `rows` into `parts` that differ by one at most, larger ones first. Example: 7, 3 -> [3, 2, 2]."""
    return [rows // parts + (part < rows % parts) for part in range(parts)]


def rows_of(batch: Any) -> int:
    """Return the rows of a batch.

    Raises:
        ValueError: it has no tensor, its tensors disagree, or it has tensors in objects of other kinds.
    """
    if any(tensor.dim() == 0 for tensor in tensors_in(batch)):
        raise ValueError("a tensor of a batch has no dimension; dimension 0 counts the rows")
    for thing in strange_in(batch):
        held = next(tensors_in(getattr(thing, "__dict__", {})), None)
        if held is not None or isinstance(thing, np.ndarray):
            raise ValueError(
                f"a batch has a {type(thing).__name__}, whose data cannot be cut into rows: give tensors, in "
                "tuples, lists, mappings or dataclasses"
            )
    counts = {len(tensor) for tensor in tensors_in(batch)}
    if not counts:
        raise ValueError(f"a batch has no tensor: it is a {type(batch).__name__}")
    if len(counts) != 1:
        raise ValueError(
            f"the tensors of a batch must have one number of rows in dimension 0, not {sorted(counts)}"
        )
    return counts.pop()


def fingerprint(batch: Any) -> float:
    """A number that differs for batches with other shapes, types or values, but for one in four billion."""
    found = 0
    for tensor in tensors_in(batch):
        plain = tensor.detach().cpu().contiguous()
        found = zlib.crc32(f"{plain.dtype}, {[*plain.shape]}".encode(), found)
        found = zlib.crc32(plain.view(torch.uint8).numpy().data, found)
    return float(found)


def cut_rows(batch: Any, first: int, stop: int) -> Any:
    """Take rows [first, stop) of every tensor in `batch`; other objects do not change."""
    return mapped(batch, lambda tensor: tensor[first:stop])


def stand_in(batch: Any) -> Any:
    """One row of ones like those of a batch without rows: valid as tokens, as masks and as labels."""
    return mapped(batch, lambda tensor: tensor.new_ones((1, *tensor.shape[1:])))


def micro_batches(batch: Any, parts: int) -> list[Any]:
    """Cut `batch` into `parts`; if the rows do not divide evenly, the first parts have one row more."""
    cut, first = [], 0
    for size in sizes(rows_of(batch), parts):
        cut.append(cut_rows(batch, first, first + size))
        first += size
    return cut


class RankBatches(Iterable[Any]):
    """One data rank's part of a loader of whole batches: it yields that rank's rows of each batch.

    A DataLoader over a map-style dataset loads these rows only. Rank 0 draws the order for all, once an
    epoch: the order of one process whose generator has the state of rank 0's. What a dataset draws from
    PyTorch's generators is the same on all ranks of a part, and other numbers for each part. Any other
    iterable must yield the same batches on every rank. Where a batch has fewer rows than there are data
    ranks, the last ones get none: `evaluate` and `predict` take that.

    Raises:
        ValueError: the loader's sampler leaves each rank a part of the data already.
    """

    def __init__(self, loader: Iterable[Any], part: int, parts: int) -> None:
        _check_sampler(loader)
        self._loader, self._part, self._parts = loader, part, parts
        self._generator, self._taken, self._skipped = "", 0, 0
        self._after = ""  # the state of the sampler's generator after it drew this epoch
        self._again = False  # the next epoch is that from which a state was loaded
        self._order: list[Any] = []  # what the sampler drew for this epoch
        self._pass = _EpochPass()

    def state_dict(self) -> dict[str, Any]:
        """The place in this epoch: how many batches were taken, and what drew their order.

        Between epochs: what the next one is drawn from, if nothing else draws from that generator.
        """
        return {"taken": self._taken, "generator": self._generator}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin the next epoch at this place: after the batches that were taken, in the same order."""
        if state.get("resized"):
            raise ValueError(
                "this place in the data is that of a run under Plan(elastic=True), where set_batch_size made "
                "other batches; load it under such a plan"
            )
        self._taken, self._generator = int(state["taken"]), str(state["generator"])
        self._skipped = self._taken
        self._again = self._skipped > 0 or bool(self._generator)

    def __iter__(self) -> Iterator[Any]:
        self._taken, self._skipped = self._skipped, 0
        again, self._again = self._again, False
        if self._indexed:
            self._draw(again=again)
        this = self._pass = _EpochPass(self._rows(self._taken))
        while (batch := next(this.rows, END)) is not END:
            self._taken += 1
            yield batch
        self._taken, self._generator = 0, self._after

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def _own(self, rows: int) -> tuple[int, int]:
        counts = sizes(rows, self._parts)
        first = sum(counts[: self._part])
        return first, first + counts[self._part]

    def _drawn(self, *, again: bool) -> list[Any]:
        """The order of an epoch, and its generator's states before and after.

        again: the epoch from which a state was loaded.
        """
        generator, loader = self._sampler_generator, self._loader
        if again and self._generator:
            generator.set_state(torch.tensor(list(bytes.fromhex(self._generator)), dtype=torch.uint8))
        before = _digits(generator)
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)  # type: ignore[attr-defined]
        order = list(self._sampler)  # after a DataLoader's first draw, which seeds its workers
        return [order, before, _digits(generator)]

    @property
    def _indexed(self) -> bool:
        """Whether a sampler draws what the ranks load."""
        loader = self._loader
        return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)

    @property
    def _sampler(self) -> Any:
        loader: Any = self._loader
        return loader.sampler if loader.batch_sampler is None else loader.batch_sampler

    @property
    def _sampler_generator(self) -> torch.Generator:
        inner = getattr(self._sampler, "sampler", self._sampler)
        return getattr(inner, "generator", None) or torch.default_generator

    def _draw(self, *, again: bool) -> None:
        """Take the order that rank 0 draws. `again`: that of the epoch from which a state was loaded."""
        self._order, self._generator, self._after = on_rank_0(lambda: self._drawn(again=again))

    def _rows(self, first: int) -> Iterator[Any]:
        """This rank's rows of each batch of this epoch, from number `first` on."""
        if not self._indexed:
            return self._cut(itertools.islice(self._loader, first, None))
        loaded = self._seeded(self._loaded(self._order[first:]), first)
        return self._without(loaded, self._order[first:]) if self._by_rows else self._cut(loaded)

    @property
    def _by_rows(self) -> bool:
        """Whether a sampler draws the rows of each batch; otherwise a batch is loaded whole."""
        return self._indexed and self._loader.batch_sampler is not None  # type: ignore[attr-defined]

    def _loaded(self, drawn: Sequence[Any]) -> DataLoader[Any]:
        """This rank's rows of the batches that a sampler drew; the batches where it draws whole ones."""
        loader: Any = self._loader
        order: dict[str, Any] = {"sampler": drawn, "batch_size": None}
        if self._by_rows:
            order = {"batch_sampler": [batch[slice(*self._own(len(batch)))] or batch[:1] for batch in drawn]}
        workers = torch.Generator().manual_seed(seed_of(self._generator, self._part))
        return DataLoader(
            loader.dataset,
            **order,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            generator=workers,
        )

    def _seeded(self, loaded: Iterable[Any], first: int) -> Iterator[Any]:
        """Load each batch, the first of number `first`, with numbers that belong to it and this part."""
        batches, number = iter(loaded), first
        while True:
            with drawing(seed_of(self._generator, self._part, number), "cpu"):
                batch = next(batches, END)
            if batch is END:
                return
            yield batch
            number += 1

    def _without(self, loaded: Iterable[Any], drawn: Iterable[Any]) -> Iterator[Any]:
        """This rank's rows, as they were loaded; where it has none, one was loaded for its shape."""
        for batch, rows in zip(loaded, drawn, strict=True):
            first, stop = self._own(len(rows))
            yield batch if first < stop else cut_rows(batch, 0, 0)

    def _cut(self, batches: Iterable[Any]) -> Iterator[Any]:
        for batch in batches:
            self._pass.whole = batch
            yield cut_rows(batch, *self._own(rows_of(batch)))


END = object()


def _digits(generator: torch.Generator) -> str:
    """The state of a generator in hexadecimal digits."""
    return bytes(generator.get_state().tolist()).hex()


@dataclass
class _EpochPass:
    """One iteration: the rows that are still to come, and the newest batch where it was loaded whole."""

    rows: Iterator[Any] = field(default_factory=lambda: iter(()))
    whole: Any = None


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
