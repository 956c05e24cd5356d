"""Batches: which rows are a rank's own, and how they are cut into micro-batches.

A batch is (inputs, targets). Inputs: a tensor, a tuple of arguments, a mapping of keyword arguments, or a
dataclass, the one argument. Dimension 0 of every tensor counts the rows.

In the first batches the data of ranks are compared: rows that should be the same, and loaders that give each
rank a part already, of which `run.shard` would give it a part again. Tensors are compared at some places:
rows that differ do so nearly everywhere. What a dataset draws by itself may differ between ranks. So loaders
count as different where no tensor of their batches is alike.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from unisono.torch.control_data import on_every_rank, on_rank_0
from unisono.torch_internals import c10d

from .generators import drawing, generators_kept, pythons_generators_kept, seed_of
from .graph.containers import mapped, strange_in, tensors_in
from .mesh import PlanMesh


def sizes(rows: int, parts: int) -> list[int]:
    """Cut `rows` into `parts` that differ by one at most, larger ones first. Example: 7, 3 -> [3, 2, 2]."""
    return [rows // parts + (part < rows % parts) for part in range(parts)]


def rows_of(batch: Any) -> int:
    """Return the rows of a batch.

    Raises:
        ValueError: it has no tensor, its tensors disagree, or it has tensors in objects of other kinds.
    """
    check_layouts(batch)
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


def check_layouts(batch: Any) -> None:
    """Raise ValueError for a tensor whose rows are no part of its memory: a sparse or nested one."""
    for tensor in tensors_in(batch):
        if tensor.is_nested or tensor.layout is not torch.strided:
            kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            raise ValueError(
                f"a batch has a {kind} tensor, which is not cut into rows: give x.to_dense(), or padded rows "
                "with a mask, and make it sparse or nested in the forward"
            )


def fingerprint(batch: Any) -> float:
    """A number that differs for batches with other shapes, types or values, but for one in four billion."""
    found = 0
    for tensor in tensors_in(batch):
        plain = tensor.detach().cpu().contiguous()
        found = zlib.crc32(f"{plain.dtype}, {[*plain.shape]}".encode(), found)
        found = zlib.crc32(plain.view(torch.uint8).numpy().data, found)
    return float(found)


def cut_rows(batch: Any, first: int, stop: int) -> Any:
    """Take rows [first, stop) of every tensor in `batch`; other objects do not change.

    A tensor that stands twice in it stays one: a loss may differentiate by what the model got.
    """
    cut: dict[int, Tensor] = {}

    def rows(tensor: Tensor) -> Tensor:
        if id(tensor) not in cut:
            # as a recorded program takes it
            cut[id(tensor)] = tensor[first:stop].resolve_conj().resolve_neg()
        return cut[id(tensor)]

    return mapped(batch, rows)


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

    Args:
        data: compares, in the first epoch, what ranks have; None: nothing does.
    Raises:
        ValueError: the loader leaves each rank a part of the data already.
    """

    def __init__(
        self, loader: Iterable[Any], part: int, parts: int, data: DataComparison | None = None
    ) -> None:
        _check_sampler(loader)
        self._data, self._compared = data, data is None
        self._number = 0 if data is None else data.number()
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
        if not self._compared:
            self._compared = True
            self._compare()

    def _compare(self) -> None:
        """Compare the samplers and the datasets of ranks."""
        loader: Any = self._loader
        mine: Sequence[Any] = self._order
        if dist.get_rank():
            with drawing_alike(self._sampler_generator, *filter(None, [loader.generator])):
                try:
                    mine = self._drawn(again=False)[0]
                except Exception:  # noqa: BLE001  only rank 0 has to draw
                    mine = []
        total = len(loader.dataset) if hasattr(loader.dataset, "__len__") else None
        check_orders(mine, total, type(self._sampler).__name__)
        check_items(self._loading, self._order, by_rows=self._by_rows)

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
        if self._by_rows:
            drawn = [batch[slice(*self._own(len(batch)))] or batch[:1] for batch in drawn]
        return self._loading(drawn, seed_of(self._generator, self._part), self._loader.num_workers)  # type: ignore[attr-defined]

    def _loading(self, drawn: Sequence[Any], seed: int = 0, workers: int = 1) -> DataLoader[Any]:
        """The batches of what a sampler drew."""
        loader: Any = self._loader
        order = {"batch_sampler": drawn} if self._by_rows else {"sampler": drawn, "batch_size": None}
        return DataLoader(
            loader.dataset,
            **order,
            num_workers=min(workers, loader.num_workers),
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            generator=torch.Generator().manual_seed(seed),
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
            if self._data is not None and not self._compared:
                self._compared = True
                self._data.check_loader(self._number, batch, self._loader)
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


# ---- the data of ranks, compared ----


BATCHES = 3  # of a run that are compared
TENSORS, PLACES = 4, 32  # of a batch, and of each tensor
CLOSE = 1e-2  # as a share of a value: ranks may have computed the same rows in low precision
WIDTH = 1 + TENSORS * PLACES
BY_CHANCE = 14.0  # numbers that two draws are expected to share, of which none is shared by chance
ITEMS = 8  # of a dataset
WAIT_S, PAUSE_S = 30.0, 0.01  # for the first batch of other ranks
REMEDY = "run.shard cuts each batch for the data ranks: give it the whole data on every rank, or no run.shard"


def probe(batch: Any) -> list[float]:
    """Rows, and values of the first tensors at some places; NaN where there are none."""
    tensors = [t for t in tensors_in(batch) if t.layout == torch.strided and not t.is_quantized][:TENSORS]
    found = [float(len(tensors[0]) if tensors and tensors[0].dim() else 0)]
    for tensor in tensors:
        flat = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
        flat = flat.reshape(-1)
        count = min(len(flat), PLACES)
        places = torch.linspace(0, max(len(flat) - 1, 0), count, device=flat.device).long()
        found += [*flat[places].double().tolist(), *[math.nan] * (PLACES - count)]
    return found + [math.nan] * (WIDTH - len(found))


def identical(one: Tensor, other: Tensor) -> bool:
    """Whether two ranks have the same rows."""
    return bool(torch.isclose(one, other, rtol=CLOSE, atol=1e-6, equal_nan=True).all())


def alike(one: Tensor, other: Tensor) -> bool:
    """Whether two ranks may have the same batch: a tensor has more equal values than chance gives, or none
    says anything.
    """
    if one[0] != other[0]:
        return False
    said = False
    for first in range(1, WIDTH, PLACES):
        here, there = one[first : first + PLACES], other[first : first + PLACES]
        known = ~(here.isnan() | there.isnan())
        equal = torch.isclose(here[known, None], there[known], rtol=CLOSE, atol=1e-6).double()
        if not len(equal) or (chance := float(equal.mean())) == 1.0:
            continue
        if float(equal.diagonal().mean()) - chance > 0.5 * (1 - chance):
            return True
        said = True
    return not said


class DataComparison:
    """Compares the first batches of a run."""

    def __init__(self, world: dist.ProcessGroup) -> None:
        self._left, self._loaders = BATCHES, 0
        self._rank, self._ranks = world.rank(), world.size()
        _, store = c10d.world()
        self._store: Any = c10d.PrefixStore(f"unisono.parallel/{world.group_name}/data", store)

    def number(self) -> int:
        """The number of a new loader. Ranks make them in the same order."""
        self._loaders += 1
        return self._loaders

    def check_loader(self, number: int, batch: Any, loader: Iterable[Any]) -> None:
        """Compare the first batch that a loader gives, whole, with that of the other ranks.

        Ranks meet in the store, for WAIT_S at most: one that is alone here goes on.

        Raises:
            ValueError: a loader gave each rank a part.
        """
        if self._ranks == 1:
            return
        try:
            length: float = len(loader)  # type: ignore[arg-type]
        except TypeError:
            length = -1
        self._store.set(f"{number}/{self._rank}", json.dumps([length, *probe(batch)]))
        if self._store.add(f"{number}/count", 1) == self._ranks:
            told = [json.loads(self._store.get(f"{number}/{rank}")) for rank in range(self._ranks)]
            self._store.set(f"{number}/verdict", _other_batches(told))
        until = time.monotonic() + WAIT_S
        while not self._store.check([f"{number}/verdict"]):
            if time.monotonic() > until:
                return
            time.sleep(PAUSE_S)
        if verdict := self._store.get(f"{number}/verdict").decode():
            raise ValueError(verdict)

    def numbers(self, batch: Any) -> list[float]:
        """What this rank tells of its rows in a step; []: they are not compared any more."""
        return probe(batch) if self._left and self._ranks > 1 else []

    def check(self, table: Tensor, mesh: PlanMesh) -> None:
        """Compare what ranks told, f64 [pipeline, data, context x tensor, numbers].

        Raises:
            ValueError: ranks that share rows have different ones.
        """
        self._left -= 1
        for row, ranks in enumerate(table.transpose(0, 1)):
            each = ranks.flatten(0, 1)
            if any(not identical(each[0], other) for other in each):
                raise ValueError(
                    f"ranks of one pipeline, context or tensor group give different rows: those of data rank "
                    f"{row} under {mesh.plan}. Give them the same part of each batch; run.shard(loader) does"
                )


def _other_batches(told: Sequence[Sequence[float]]) -> str:
    """What is wrong with whole batches that ranks got: (length of the loader, *probe); "": nothing."""
    for rank, (length, *rows) in enumerate(told):
        if length != told[0][0]:
            return (
                f"run.shard: the loader has {told[0][0]} batches on rank 0, and {length} on rank {rank} "
                f"(-1: it does not say). {REMEDY}"
            )
        if not _compared(alike, told[0][1:], rows):
            return (
                f"run.shard: the loader gives other batches on rank {rank} than on rank 0, as one that is "
                f"cut by rank, or that each rank shuffles by itself. {REMEDY}"
            )
    return ""


def _compared(how: Callable[[Tensor, Tensor], bool], one: Sequence[float], other: Sequence[float]) -> bool:
    return how(torch.tensor(one, dtype=torch.float64), torch.tensor(other, dtype=torch.float64))


# ---- datasets and samplers ----


def check_items(load: Any, drawn: Sequence[Any], *, by_rows: bool) -> None:
    """Compare items of a dataset. All ranks call this, with the same order.

    Args:
        load: entries of the order -> the batch, or batches, that they are.
        drawn: rows of each batch, or without `by_rows` keys of batches.
    Raises:
        ValueError: ranks have other items, or some cannot load theirs.
    """
    keys = [key for rows in drawn for key in rows] if by_rows else list(drawn)
    keys = [keys[at * (len(keys) - 1) // max(1, ITEMS - 1)] for at in range(ITEMS)] if keys else []

    def mine() -> Any:
        with drawing_alike():
            try:
                return probe(list(load([keys] if by_rows else keys[:1])))
            except Exception as error:  # noqa: BLE001  if all ranks have it, the loop raises it
                return f"{type(error).__name__}: {error}"

    each = on_every_rank(mine) if keys else []
    failed = [rank for rank, mine in enumerate(each) if isinstance(mine, str)]
    if len(failed) == len(each):
        return
    if failed:
        raise ValueError(
            f"run.shard: rank {failed[0]} cannot load items that rank 0's sampler drew "
            f"({each[failed[0]]}): its dataset is another one. {REMEDY}"
        )
    other = next((rank for rank in range(len(each)) if not _compared(alike, each[0], each[rank])), None)
    if other is None:
        return
    again = on_every_rank(mine)  # a dataset that draws by itself says something else now
    if all(
        not isinstance(new, str) and _compared(identical, old, new)
        for old, new in zip(each, again, strict=True)
    ):
        raise ValueError(
            f"run.shard: the dataset has other items on rank {other} than on rank 0, at the same indices, as "
            f"one that is cut by rank. {REMEDY}"
        )


def check_orders(mine: Sequence[Any], total: int | None, name: str) -> None:
    """Compare what the samplers of ranks draw. All ranks call this.

    Args:
        mine: what this rank's drew.    total: items of the dataset, if it says so.
    Raises:
        ValueError: each rank's draws a part of the items, and no two the same.
    """
    if len(set(on_every_rank(lambda: zlib.crc32(repr(mine).encode())))) == 1:
        return
    flat = [key for entry in mine for key in (entry if isinstance(entry, (list, tuple)) else [entry])]
    sets = [set(keys) for keys in on_every_rank(lambda: [*map(repr, flat)])]
    apart = sum(map(len, sets)) == len(set().union(*sets)) and all(sets)
    expected = len(sets[0]) * len(sets[1]) / total if total else BY_CHANCE + 1
    if apart and (expected > BY_CHANCE or sum(map(len, sets)) == total):
        raise ValueError(
            f"run.shard: the loader's {name} draws {len(sets[0])} items on rank 0, and none of them on "
            f"another rank: it is cut by rank. {REMEDY}"
        )


@contextmanager
def drawing_alike(*generators: torch.Generator) -> Iterator[None]:
    """Draw the same numbers on all ranks; afterwards all generators are as they were."""
    every = (torch.default_generator, *generators)
    with generators_kept(every), pythons_generators_kept():
        for each in every:
            each.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        yield
