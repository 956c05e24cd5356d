"""Which layers and micro-batches the ranks of a pipeline have."""

from __future__ import annotations

from typing import NamedTuple

from unisono.planner.training_plan import TrainingPlan

__all__ = ["StageLayers", "in_flight", "stage_layers"]


class StageLayers(NamedTuple):
    """Layers on the first rank of a pipeline, on those in the middle, and on the last."""

    first: int
    middle: int
    last: int


def stage_layers(layers: int, plan: TrainingPlan) -> StageLayers:
    """The layers of the ranks: stages are equal; where that is more than there are, the two ends have fewer.

    They have the tables of tokens beside their layers. Example: 126 layers on 16 ranks: 7, 8 ... 8, 7.
    """
    if plan.pipeline == 1:
        return StageLayers(layers, layers, layers)
    middle = -(-layers // (plan.pipeline * plan.interleave)) * plan.interleave
    spare = middle * plan.pipeline - layers
    last = min(-(-spare // 2), middle - 1)
    first = min(spare - last, middle - 1)
    if plan.pipeline == 2:  # no rank is in the middle
        return StageLayers(middle - first, middle - min(first, last), middle - last)
    return StageLayers(middle - first, middle, middle - last)


def in_flight(plan: TrainingPlan, rank: int, micro_batches: int) -> float:
    """Micro-batches whose activations a rank of the pipeline keeps at most, in its layers.

    1F1B: p - rank. Interleaved: the first rank keeps 1 + (p-1)/(p v) times as much as all p.
    Source: Narayanan et al., 2021 (arXiv:2104.04473); Korthikanti et al., 2022, section 4.2.3.
    """
    size, chunks = plan.pipeline, plan.interleave
    if chunks == 1:
        return min(size - rank, micro_batches)
    warm_up = 2 * (size - rank - 1) + (chunks - 1) * size
    return min(warm_up + 1, micro_batches * chunks) / chunks
