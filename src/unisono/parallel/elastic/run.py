"""`ElasticRun`: the calls of a run that goes on when ranks die and come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from unisono.parallel.batches import RankBatches
from unisono.parallel.checkpoint import path_of, states

from .batches import DrawnOrder, ElasticBatches
from .transactions import TransactionalRun

REMEMBERED = 4
"""Batches whose epoch has ended that a step may still get."""


class ElasticRun(TransactionalRun):
    """A run under `Plan(elastic=True)`; its plan has the ranks that there are now."""

    def __enter__(self) -> ElasticRun:
        """Return the run, which closes at the end of the block."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        """Close the run; after an exception, leave the other ranks."""
        if kind is None:
            self.close()
        else:
            self._membership.close()

    def attach(self, **objects: Any) -> None:
        """Give newcomers the state of these objects, such as schedulers, and put it into checkpoints.

        Call it before the first step, with the same names on all ranks.

        Raises:
            TypeError: the state of an object is more than numbers, strings, lists, tuples and dicts.
        """
        for name, thing in objects.items():
            states(name, thing)
        self._attached |= objects

    # ---- calls of the user ----

    def shard(self, loader: Iterable[Any]) -> RankBatches:
        """Yield this rank's rows of each batch of `loader`, whose batches are those of all ranks together.

        After a change each rank has other rows of them. Give a step the batch as it comes.
        """
        return ElasticBatches(loader, self)

    def begin(self, batches: ElasticBatches) -> DrawnOrder | None:
        """An epoch begins; return where, on a newcomer. None: at its beginning."""
        others = [one for one in self._batches if one is not batches]
        ended = [one for one in others if not one.active]
        forgotten = ended[:-REMEMBERED]
        self._batches = [*(one for one in others if one not in forgotten), batches]
        return self._places.pop(0) if self._places else None

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the number of each epoch that is still to come; a newcomer joins here, in the present one."""
        self.enter()
        yield from super().epochs(count)

    def step(self, batch: tuple[Any, Any], *, update: bool = True, watch: bool = False) -> float:
        """Train on this rank's part of a batch, see `Run.step`. After a loss the living do it again.

        Raises:
            ValueError: `run.shard` did not yield this batch last; or `update` is False.
            Evicted: the others go on without this rank.  GroupError: too few ranks are left.
        """
        if update is not True:
            raise ValueError(
                "step: update=False is not for Plan(elastic=True): gradients that wait are lost with a rank. "
                "Write Plan(micro_batches=...)"
            )
        source = self._source("step", batch)
        step = super().step

        def kept_step() -> float:
            return self.kept(lambda: step(source.current, watch=watch), self.record(source))

        return float(self._made(kept_step, source, grows=True))

    def evaluate(self, batch: tuple[Any, Any]) -> float:
        """Return the mean loss on a batch that `run.shard` yielded, see `Run.evaluate`."""
        source = self._source("evaluate", batch)
        evaluate = super().evaluate
        return float(self._made(lambda: evaluate(source.current), source))

    def predict(self, inputs: Any) -> NoReturn:  # noqa: ARG002
        """Refused: the rows of a rank change with the number of ranks."""
        raise ValueError(
            "predict: under Plan(elastic=True) the rows of a rank change. Every rank has the whole model: "
            "call run.model(inputs) after run.model.eval()"
        )

    def save(
        self,
        folder: str | Path,
        *,
        keep: int | None = None,
        background: bool = False,
        also: Mapping[str, Any] | None = None,
    ) -> None:
        """Write a checkpoint, see `Run.save`; attached objects are in it.

        Under ZeRO the run goes back to the newest one by itself where no rank has a shard any more.
        """
        if background:
            raise ValueError(
                "save: under Plan(elastic=True) a save in the background would outlive its ranks"
            )
        save, everything = super().save, {**self._attached, **(also or {})}

        def noted_save() -> None:
            save(folder, keep=keep, also=everything)
            self.note_saved(path_of(Path(folder), self.steps))

        self._made(noted_save)

    def load(self, folder: str | Path, *, also: Mapping[str, Any] | None = None) -> None:
        """Continue from a checkpoint, see `Run.load`. A newcomer has its state from the others."""
        if not self.is_newcomer:
            found = self._made(lambda: self._load(Path(folder), {**self._attached, **(also or {})}))
            self._copies.clear()
            self._records.clear()
            self._completed_steps = self.steps
            self.note_saved(found)

    def close(self) -> None:
        """End the run, when all ranks have come here: none leaves while another may need its state.

        It may be called twice.
        """
        if self._membership.closed:
            return
        if not self.is_newcomer and not self._failures.ended:
            self._made(lambda: dist.barrier(group=self.mesh.world))
        super().close()
        self._membership.close()

    def _source(self, what: str, batch: object) -> ElasticBatches:
        for one in self._batches:
            if one.given is batch and batch is not None:
                if one.current is None:
                    one.cut()  # the ranks have changed since its epoch
                return one
        raise ValueError(
            f"{what}: under Plan(elastic=True) a batch is what run.shard(loader) yielded last, as it is: "
            "after a change the run cuts it anew. Transform it in the loader, by its dataset or collate_fn"
        )
