"""Lists of experts, schedules with split backwards and cut sequences beside experts: against one process.

On four ranks, as in combined_axes.py.
"""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import unisono.parallel as up
from parallel import contexts, expert_models
from parallel.combined_axes import STEPS, ExpertDecoder, ListedDecoder, same, sgd
from parallel.contexts import Decoder
from parallel.plain_training import seeded
from parallel.run_features import in_group


class NormedLayer(expert_models.Layer):
    """A list of experts behind a norm, which both runs of the layer take. The rows of experts are counted."""

    def __init__(self) -> None:
        super().__init__(expert_models.experts(), capacity=50)
        self.norm = nn.LayerNorm(expert_models.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class CountedDecoder(ExpertDecoder):
    """Whose layers see all positions: of a part of them an expert would take more."""

    layer = NormedLayer


def check_lists_of_experts(folder: Path) -> None:
    ids = contexts.batches(18, STEPS)
    for more in (
        {"data": 2, "tensor": 2, "expert": 2},
        {"data": 2, "tensor": 2, "expert": 2, "zero": 3, "recompute": True, "micro_batches": 2},
        {"data": 2, "context": 2, "expert": 2, "zero": 1},
        {"data": 2, "context": 2, "expert": 4, "zero": 3, "recompute": True},
        {"context": 4, "expert": 2},
        {"context": 2, "tensor": 2, "expert": 2, "zero": 3},
        {"data": 2, "pipeline": 2, "expert": 2, "micro_batches": 2},
        {"context": 2, "pipeline": 2, "expert": 2, "zero": 3},
    ):
        same(up.Plan(**more), ListedDecoder, ids, contexts.mean, rate=0.01, sample=ids[0][0])
    for more in ({"context": 4, "expert": 4}, {"tensor": 2, "context": 2, "expert": 2}):
        same(up.Plan(**more), CountedDecoder, ids, contexts.mean, rate=0.01)
    experts = {"layers.*.experts": "list"}  # without expert=, over the tensor ranks
    for more in ({"tensor": 4}, {"tensor": 2, "pipeline": 2}, {"data": 2, "pipeline": 2, "zero": 3}):
        plan = up.Plan(**more)
        same(plan, ListedDecoder, ids, contexts.mean, rate=0.01, sample=ids[0][0], experts=experts)


def check_a_list_returns_one_value(folder: Path) -> None:
    class Pair(expert_models.Layer):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), x.mean()

    class Apart(ListedDecoder):
        layer = staticmethod(lambda: Pair(expert_models.experts()))

        def forward(self, ids: Tensor, padding: Tensor | None = None) -> Tensor:
            x = self.words(ids)
            for layer in self.layers:
                found = layer(x)
                x = found[0] if isinstance(found, tuple) else found
            return x @ self.words.weight.T

    ids = contexts.batches(18, 1)
    plan = up.Plan(data=2, tensor=2, expert=2)
    with pytest.raises(ValueError, match=r'"layers\.0\.experts": "layers\.0" returns a tuple; where tensor'):
        run = up.parallelize(seeded(Apart), plan, optimizer=sgd, loss=contexts.mean, sample=ids[0][0])
        run.step(next(iter(run.shard(ids))))


def check_zero_bubble_schedules(folder: Path) -> None:
    """A pass of gradients of inputs runs the exchanges; that of weights runs none, or all of them again."""
    ids = contexts.batches(18, STEPS)
    for schedule, zero in (("zb-h1", 0), ("zbv", 1)):
        more: Any = {"pipeline": 2, "micro_batches": 4, "schedule": schedule, "zero": zero}
        for make in (ExpertDecoder, ListedDecoder, CountedDecoder):
            for axis in ("data", "context"):
                if make is CountedDecoder and axis == "data":
                    continue  # a capacity counts the rows of a data rank
                plan = up.Plan(expert=2, **{axis: 2}, **more)
                if make is CountedDecoder:
                    plan = dataclasses.replace(plan, micro_batches=1)
                same(plan, make, ids, contexts.mean, rate=0.01, sample=ids[0][0])
        same(up.Plan(context=2, **more), partial(Decoder, 4, 2), ids, contexts.mean, sample=ids[0][0])


def check_sequences_with_experts(folder: Path) -> None:
    """A layer of experts takes all positions; what is between layers has those of its tensor rank."""
    ids = contexts.batches(18, STEPS)
    for make in (ExpertDecoder, ListedDecoder):
        for zero in (0, 3):
            plan = up.Plan(data=2, tensor=2, expert=2, sequence=True, zero=zero)
            run = same(plan, make, ids, contexts.mean, rate=0.01)
            assert run.cut is not None
            assert any(
                move.kind == "scatter" for moves in run.cut.moves.values() for move in moves.values()
            ), run.cut.moves


def main(rank: int, size: int, folder: Path, name: str) -> None:
    in_group(rank, size, folder, globals()[name])
