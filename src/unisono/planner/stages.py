"""Which layers, micro-batches, tokens and rows of experts a rank has."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from unisono.planner.shape import TransformerShape
from unisono.planner.training_plan import TrainingJob, TrainingPlan


class StageLayers(NamedTuple):
    """Layers on the first rank of a pipeline, on those in the middle, and on the last."""

    first: int
    middle: int
    last: int


class RankLayers(NamedTuple):
    """Layers of a rank: without experts, and with them."""

    dense: int
    mixed: int

    @property
    def total(self) -> int:
        """Both."""
        return self.dense + self.mixed

    @property
    def kinds(self) -> list[tuple[int, bool]]:
        """How many there are of each kind that is there, and whether it has experts."""
        return [(count, experts) for count, experts in ((self.dense, False), (self.mixed, True)) if count]


def stage_layers(layers: int, plan: TrainingPlan) -> StageLayers:
    """The layers of the ranks: stages are equal; where that is more than there are, the two ends have fewer.

    They have the tables of tokens beside their layers. `tail` says how many fewer the last one has.
    Example: 126 layers on 16 ranks: 7, 8 ... 8, 7; with tail=2: 8, 8 ... 8, 6.
    """
    if plan.pipeline == 1:
        return StageLayers(layers, layers, layers)
    middle = -(-(layers + plan.tail) // (plan.pipeline * plan.interleave)) * plan.interleave
    spare = middle * plan.pipeline - layers
    last = plan.tail or min(-(-spare // 2), middle - 1)
    first = min(spare - last, middle - 1)
    if plan.pipeline == 2:  # no rank is in the middle
        return StageLayers(middle - first, middle - min(first, last), middle - last)
    return StageLayers(middle - first, middle, middle - last)


def layers_of_rank(shape: TransformerShape, plan: TrainingPlan, rank: int) -> RankLayers:
    """The layers of a rank of the pipeline, by kind.

    Dense layers of a model with experts are its first ones. All ranks in the middle count as the last one of
    them, which has fewest.
    """
    if plan.layers:  # all are of one kind
        count, mixed = plan.layers[rank], shape.dense_layers < shape.layers
        return RankLayers(0, count) if mixed else RankLayers(count, 0)
    dense = None if shape.experts is None else shape.dense_layers
    first, middle, last = _rank_layers(shape.layers, dense, plan.pipeline, plan.interleave, plan.tail)
    return first if rank == 0 else last if rank == plan.pipeline - 1 else middle


@lru_cache(maxsize=4096)
def _rank_layers(
    layers: int, leading: int | None, pipeline: int, interleave: int, tail: int
) -> tuple[RankLayers, RankLayers, RankLayers]:
    counts = stage_layers(layers, TrainingPlan(pipeline=pipeline, interleave=interleave, tail=tail))
    dense: list[int] = list(counts)
    if leading is not None:
        chunk, missing = counts.middle // interleave, counts.middle - counts.first
        ranks = (0, max(1, pipeline - 2), pipeline - 1)
        owners = [(layer + missing) // chunk % pipeline for layer in range(leading)]
        dense = [min(count, owners.count(rank)) for count, rank in zip(counts, ranks, strict=True)]
        if pipeline == 1:
            dense = [leading] * 3
    first, middle, last = (RankLayers(one, count - one) for one, count in zip(dense, counts, strict=True))
    if pipeline == 2:  # no rank is in the middle
        middle = max(last, first, key=lambda rank: rank.total)
    return first, middle, last


def in_flight(plan: TrainingPlan, rank: int, micro_batches: int) -> float:
    """Micro-batches whose activations a rank of the pipeline keeps at most, in its layers.

    1F1B: p - rank. Interleaved: the first rank keeps 1 + (p-1)/(p v) times as much as all p. ZB-H1: p.
    Source: Narayanan et al., 2021 (arXiv:2104.04473); Korthikanti et al., 2022, section 4.2.3; Qi et al.,
    2023 (arXiv:2401.10241).
    """
    size, chunks = plan.pipeline, plan.interleave
    if plan.schedule == "zb-h1":
        return min(size, micro_batches)
    if chunks == 1:
        return min(size - rank, micro_batches)
    warm_up = 2 * (size - rank - 1) + (chunks - 1) * size
    return min(warm_up + 1, micro_batches * chunks) / chunks


def sequence_part(plan: TrainingPlan, job: TrainingJob) -> float:
    """Tokens of a micro-batch on one rank."""
    return plan.micro_batch * job.shape.sequence / plan.context


def expert_rows(plan: TrainingPlan, job: TrainingJob) -> float:
    """Rows that the experts of one rank have of a layer and a micro-batch: those of the fullest rank."""
    rows = sequence_part(plan, job) * job.shape.mixed.top_k
    return rows * job.imbalance if plan.expert > 1 else rows
