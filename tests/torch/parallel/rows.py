"""Rows of the tables of model x plan x expectation: what is trained, under which plans, what refuses it.

A module of this folder has a table `TABLE`, name -> row. test_parallel_features.py runs each row by its name.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from torch.nn import functional

import unisono.parallel as up
from effort import SWEEP
from parallel import models
from parallel.plain_training import Make, refused, same, same_gradients

VECTORS = models.vector_batches(3, 8)
SAMPLE = object()


class Row(NamedTuple):
    """A model under plans.

    Args:
        make: the model, or its class.
        trains: the plans under which losses, the first norm and what ranks share are those of one process.
        refused: what an error says on all ranks -> the plans that refuse the model.
        given, loss: batches, and the loss of a batch.
        cut: parameters that the tensor axis has cut.
        holds: what else is true of a run.
        gradients: whether each parameter's gradient is compared, too, under the first plan.
        sample: what the model is recorded on; by default the inputs of the first batch.
        options: of `parallelize`, and `before`, as `plain_training.trained` has it.
        compare: more arguments of `plain_training.same`.
    """

    make: Make
    trains: Sequence[up.Plan] = ()
    refused: Mapping[str, Sequence[up.Plan]] = {}
    given: Sequence[Any] = VECTORS
    loss: Any = functional.cross_entropy
    cut: Sequence[str] = ()
    holds: Callable[[up.Run], Any] | None = None
    gradients: bool = False
    sample: Any = SAMPLE
    options: Mapping[str, Any] = {}
    compare: Mapping[str, Any] = {}


def shortened(rows: Mapping[str, Row]) -> dict[str, Row]:
    """In `make test` each row has one plan, and each plan of a table one row, at least; the sweep has all."""
    found, seen = {}, set[up.Plan]()
    for name, row in rows.items():
        plans = [plan for plan in row.trains if SWEEP or plan not in seen] or row.trains[:1]
        seen.update(plans)
        found[name] = row._replace(trains=plans)
    return found


def try_row(row: Row, folder: Path) -> None:
    first = row.given[0] if row.loss is None else row.given[0][0]
    more = {"sample": first if row.sample is SAMPLE else row.sample, **row.options}
    for plan in row.trains:
        run = same(plan, row.make, row.given, row.loss, **row.compare, **more)
        for name in row.cut if plan.tensor > 1 else ():
            assert name in run.cut.dims, (name, str(run.cut))
        assert row.holds is None or row.holds(run), (plan, str(run.cut))
    if row.gradients:
        same_gradients(row.trains[0], row.make, row.given[0], row.loss, **more)
    for says, plans in row.refused.items():
        for plan in plans:
            refused(says, plan, row.make, row.given, row.loss, **more)


def variant(
    name: str, base: type[nn.Module], init: Callable[[Any], object] | None = None, **methods: Any
) -> Any:
    """A subclass with other methods; `init` gives a model more parts."""

    def __init__(self: Any) -> None:
        base.__init__(self)
        if init is not None:
            init(self)

    return type(name, (base,), {"__init__": __init__, "__module__": base.__module__, **methods})
