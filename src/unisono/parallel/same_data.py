"""Compares the data of ranks, in the first batches only: rows that should be the same, and loaders that give
each rank a part already, of which `run.shard` would give it a part again.

Tensors are compared at some places: rows that differ do so nearly everywhere. What a dataset draws by itself
may differ between ranks. So loaders count as different where no tensor of their batches is alike.
"""

from __future__ import annotations

import json
import math
import random
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from unisono.torch.control_data import on_every_rank
from unisono.torch_internals import c10d

from .graph.containers import tensors_in

if TYPE_CHECKING:
    from .mesh import PlanMesh

__all__ = ["DataComparison", "check_items", "check_orders", "drawing_alike"]

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
    """Compares the first batches of a run.

    Args:
        world: a group of all ranks of the run.
    """

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
    kept = [each.get_state() for each in every], random.getstate(), np.random.get_state()
    try:
        for each in every:
            each.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        yield
    finally:
        for each, state in zip(every, kept[0], strict=True):
            each.set_state(state)
        random.setstate(kept[1])
        np.random.set_state(kept[2])
