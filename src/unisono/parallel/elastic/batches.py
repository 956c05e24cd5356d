"""The batches of an elastic run: cut anew after a change, and given to newcomers at their place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from unisono.parallel.batches import END, RankBatches, cut_rows, rows_of
from unisono.parallel.generators import generators_kept
from unisono.parallel.mesh import PlanMesh


@dataclass(frozen=True)
class DrawnOrder:
    """The order of an epoch, as one rank sends it to another.

    Attributes:
        entries: what the sampler drew: of all batches, one after the other.
        sizes: rows of each batch; none: an entry is a batch.
        drawn_by: the state of the sampler's generator before it drew, in hexadecimal digits.
        after: likewise, right after.
        generator: its state now, or right after the draw for a rank that is in it.
        at: the number of the newest batch.
        resized: what `set_batch_size` did to the order: (from which batch on, rows).
    """

    entries: np.ndarray | list[Any]
    sizes: list[int] | None
    drawn_by: str
    after: str
    generator: np.ndarray
    at: int
    resized: list[tuple[int, int]]


class ChangingRun(Protocol):
    """The run whose batches these are."""

    mesh: PlanMesh

    def enter(self) -> None:
        """Join the running job, if this process is a newcomer."""

    def begin(self, batches: ElasticBatches) -> DrawnOrder | None:
        """An epoch begins; return where, on a newcomer. None: at its beginning."""

    def tell(self) -> None:
        """Call `on_change`, if this rank has not been told of the newest change."""

    def draw(self, batches: ElasticBatches, work: Callable[[], None]) -> None:
        """Draw the order of an epoch, together."""


class ElasticBatches(RankBatches):
    """One data rank's part of a loader of whole batches, whatever becomes of the number of ranks.

    Every rank knows the order of the whole epoch. After a change each rank has other rows of the same batch.
    The random generator of the sampler is the same on all ranks once an epoch has begun, so any rank may
    draw the next order.

    Attributes:
        given: what the program got last.
        current: the same batch, as it is cut now.
        active: whether an epoch has begun and has not ended.
    """

    def __init__(self, loader: Iterable[Any], run: ChangingRun) -> None:
        super().__init__(loader, run.mesh.row, run.mesh.plan.data)
        self._run = run
        self.given: Any = None
        self.current: Any = None
        self.active = False
        self._this: object = None  # the iteration that has begun last
        self._at = 0  # the number of the newest batch in the epoch
        self._resized: list[tuple[int, int]] = []
        self._resumed = False  # the order came from another rank
        self._has_order = False  # of the present epoch
        self._next = 0  # the number of the first batch that may still get another size
        self._after_draw = torch.empty(0, dtype=torch.uint8)  # the state of the sampler's generator

    def follow(self, *, used: bool) -> None:
        """Be for the ranks that there are now. used: the newest batch is needed at once."""
        self._part, self._parts = self._run.mesh.row, self._run.mesh.plan.data
        self.current = None
        if used:
            self.cut()

    def _own(self, rows: int) -> tuple[int, int]:
        if rows < self._parts:
            raise ValueError(
                f"a batch of {rows} rows is too small for {self._parts} data ranks; use drop_last=True"
            )
        return super()._own(rows)

    def cut(self) -> None:
        """Cut the newest batch for the ranks that there are now."""
        if self.given is None:
            return
        if not self._by_rows:
            self.current = cut_rows(self._pass.whole, *self._own(rows_of(self._pass.whole)))
            return
        with generators_kept([torch.default_generator]):  # a batch that is loaded again changes no order
            rows = self._rows(self._at)
            self.current = next(rows)
        if self.active:
            self._pass.rows = rows

    def set_batch_size(self, rows: int) -> None:
        """Make batches of so many rows, of all ranks together, after the newest one. All ranks call this.

        Raises:
            ValueError: it is no positive number, or no sampler draws the rows of a batch.
        """
        if type(rows) is not int or rows < 1:
            raise ValueError(f"set_batch_size: {rows!r} rows; expected a positive number")
        if not self._by_rows:
            raise ValueError("set_batch_size: this loader gives whole batches; a DataLoader draws rows")
        first = self._next
        self._resized = [one for one in self._resized if one[0] < first] + [(first, rows)]
        if self._has_order:
            self._regroup(first, rows)
            self.cut()

    def state_dict(self) -> dict[str, Any]:
        """The place in this epoch, see `RankBatches`, and the batches that `set_batch_size` has made."""
        return super().state_dict() | ({"resized": self._resized} if self._resized else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin the next epoch at this place, with the same batches."""
        super().load_state_dict({"taken": state["taken"], "generator": state["generator"]})
        self._next = self._skipped
        self._resized = [(int(first), int(rows)) for first, rows in state.get("resized", ())]

    def smallest(self) -> int | None:
        """The rows of the smallest batch that is known, from the newest one on; None: none is."""
        if self.given is None:
            return None
        if self._by_rows:
            return min(len(batch) for batch in self._order[self._at :])
        return rows_of(self._pass.whole)

    @property
    def drawn(self) -> Any:
        """The newest batch, for `again`: what the sampler drew; without a sampler the batch itself."""
        return self._order[self._at] if self._indexed else self._pass.whole

    @property
    def is_drawn(self) -> bool:
        """Whether `drawn` is what a sampler drew, and not a batch with its data."""
        return self._indexed

    def again(self, drawn: Sequence[Any]) -> Iterator[Any]:
        """This rank's rows of earlier batches, as they are cut for the ranks that there are now."""
        self._part, self._parts = self._run.mesh.row, self._run.mesh.plan.data
        for one in self._loaded(drawn) if self._indexed else drawn:
            yield one if self._by_rows else cut_rows(one, *self._own(rows_of(one)))

    # ---- one epoch ----

    def __iter__(self) -> Iterator[Any]:
        self._run.enter()
        this = self._this = object()
        self.given, self._has_order = None, False
        place = self._run.begin(self)
        self.follow(used=False)
        if place is not None:
            self._skipped, self._resumed, self._next = place.at, True, place.at
            self.take_order(place)
            self._run.tell()
        self._at = self._skipped
        self._next = self._at + self._has_order
        whole = False
        try:
            for batch in super().__iter__():
                self._at, self._next, self.active = self._taken - 1, self._taken, True
                self.given = self.current = batch
                yield self.given
            whole = True
        finally:  # also where the program leaves its loop
            if self._this is this:
                self.active, self._has_order, self._next = False, False, 0
            if whole and self._resized:
                self._resized = [(0, self._resized[-1][1])]

    def _draw(self, *, again: bool) -> None:
        if not self._resumed:
            self._run.draw(self, lambda: self._draw_together(again=again))
            self._has_order, self._next = True, self._at + 1

    def _draw_together(self, *, again: bool) -> None:
        before = self._sampler_generator.get_state()
        try:
            if not again and self._resized:  # the epoch before may have been left
                self._resized = [(0, self._resized[-1][1])]
            super()._draw(again=again)
            state = self._sampler_generator.get_state()
            dist.broadcast(state, src=0)
            self._sampler_generator.set_state(state)
            self._after_draw = state
            for first, rows in self._resized:
                self._regroup(first, rows)
            dist.barrier()  # whoever goes on knows that all have the order: it may draw another one next
        except BaseException:
            self._sampler_generator.set_state(before)  # to draw the same once more
            raise

    def _regroup(self, first: int, rows: int) -> None:
        """Make batches of so many rows, from number `first` on."""
        every = [one for batch in self._order[first:] for one in batch]
        self._order = self._order[:first] + [every[at : at + rows] for at in range(0, len(every), rows)]

    def _rows(self, first: int) -> Iterator[Any]:
        rows = super()._rows(first)
        if not self._resumed:
            return rows
        self._resumed = False
        return self._begun(rows)

    def _begun(self, rows: Iterator[Any]) -> Iterator[Any]:
        """Go on where the others are: their loaders have drawn what this one draws when it begins."""
        generators = [torch.default_generator, *([self._sampler_generator] if self._indexed else [])]
        with generators_kept(generators):
            batch = next(rows, END)
        if batch is not END:
            yield batch
            yield from rows

    # ---- what another rank gets ----

    def order(self, *, drawn: bool = False) -> DrawnOrder:
        """The order of this epoch, and the place in it. drawn: for a rank that is in its draw."""
        sizes: list[int] | None = None
        entries: Any = self._order
        if self._by_rows:
            sizes, entries = (
                [len(batch) for batch in self._order],
                [one for rows in self._order for one in rows],
            )
        if entries and all(type(one) is int for one in entries):
            entries = torch.tensor(entries).numpy()
        state = self._after_draw
        if self._indexed and not drawn:
            state = self._sampler_generator.get_state()
        drawn_by = self._generator, self._after
        return DrawnOrder(entries, sizes, *drawn_by, state.numpy(), self._at, list(self._resized))

    def take_order(self, given: DrawnOrder) -> None:
        """Be in the epoch of another rank."""
        entries = given.entries if isinstance(given.entries, list) else given.entries.tolist()
        self._order = entries if given.sizes is None else _grouped(entries, given.sizes)
        self._generator, self._after = given.drawn_by, given.after
        self._resized = list(given.resized)
        if not self._has_order:  # the first batch of this epoch is as the others have it
            self._has_order, self._next = True, self._next + 1
        if self._indexed:
            self._after_draw = torch.from_numpy(given.generator)
            self._sampler_generator.set_state(self._after_draw)


def _grouped(entries: Sequence[Any], sizes: Sequence[int]) -> list[list[Any]]:
    found, first = [], 0
    for size in sizes:
        found.append(list(entries[first : first + size]))
        first += size
    return found
