"""Memory of the fullest rank, by cause. All figures are bytes.

Sources: Korthikanti et al., 2022 (arXiv:2205.05198), equations 1 to 6, for activations; Rajbhandari et al.,
2020 (arXiv:1910.02054), table 1, for what ZeRO shares.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from unisono.planner.shape import TransformerShape
from unisono.planner.stages import in_flight, stage_layers
from unisono.planner.training_plan import TrainingJob, TrainingPlan

__all__ = ["MemoryUse", "layer_activations", "memory_of", "model_states"]


class MemoryUse(NamedTuple):
    """Bytes of one rank, by cause.

    Attributes:
        parameters, gradients, moments: of its layers and tables; moments with the f32 copy of parameters.
        activations: what its layers keep for backward, of all micro-batches in flight.
        recomputed: one layer's activations while they are computed again.
        ends: activations of the embedding, the output matrix and the loss.
        buffers: whole parameters or gradients of the layers or tables at work (ZeRO); messages of stages.
    """

    parameters: float
    gradients: float
    moments: float
    activations: float
    recomputed: float
    ends: float
    buffers: float

    @property
    def total(self) -> int:
        """All of it."""
        return ceil(sum(self))


def model_states(elements: float, plan: TrainingPlan, job: TrainingJob) -> tuple[float, float, float]:
    """Bytes of parameters, gradients and moments, of so many elements of a rank without ZeRO.

    Example (bf16, reduce="low"): 7.5e9 elements and 64 data ranks take 120, 31.4, 16.6 and 1.88 GB under
    ZeRO 0 to 3.
    """
    shared = [1 if plan.zero < stage else plan.data for stage in (3, 2, 1)]
    widths = (job.width, job.gradient_bytes, job.moment_bytes)
    parameters, gradients, moments = (elements * w / s for w, s in zip(widths, shared, strict=True))
    return parameters, gradients, moments


def layer_activations(shape: TransformerShape, plan: TrainingPlan, width: int) -> float:
    """Bytes that a layer keeps of one micro-batch on one rank.

    Example: s b h (10 + 24/t + 5 a s / (h t)) for GPT in 16 bits; with sequence and selective recomputation
    34 s b h / t.
    """
    tokens = plan.micro_batch * shape.sequence
    values, cut = tokens * shape.hidden, plan.tensor if plan.sequence else 1
    if plan.recompute == "full":
        return width * values / cut
    whole = 4 * width * values + (
        2 * values if shape.dropout else 0
    )  # inputs of norms and matrices; two masks
    heads = 2 * shape.query // plan.tensor + 2 * shape.keys(plan.tensor)
    mlp = (3 if shape.gated else 2) * shape.mlp / plan.tensor
    return whole / cut + width * tokens * (heads + mlp) + _scores(shape, plan, width)


def _scores(shape: TransformerShape, plan: TrainingPlan, width: int) -> float:
    """Softmax, its mask, and what dropout leaves of it; of fused attention one f32 per token and head."""
    rows = plan.micro_batch * shape.sequence * shape.heads / plan.tensor
    if shape.attention == "fused":
        return 4 * rows
    if plan.recompute == "selective":
        return 0.0
    return rows * shape.sequence * (2 * width + 1 if shape.dropout else width)


def memory_of(plan: TrainingPlan, job: TrainingJob) -> MemoryUse:
    """The memory of the fullest rank of the pipeline: its first, second or last one."""
    ranks = sorted({0, min(1, plan.pipeline - 1), plan.pipeline - 1})
    return max((_rank_memory(plan, job, rank) for rank in ranks), key=lambda use: use.total)


def _rank_memory(plan: TrainingPlan, job: TrainingJob, rank: int) -> MemoryUse:
    shape, width = job.shape, job.width
    first, last = rank == 0, rank == plan.pipeline - 1
    counts = stage_layers(shape.layers, plan)
    layers = counts.first if first else counts.last if last else counts.middle
    layer = shape.matrices(plan.tensor) + shape.vectors(plan.tensor)
    states = model_states(layers * layer + ends_elements(shape, plan, first=first, last=last), plan, job)
    kept = layer_activations(shape, plan, width)
    flying = in_flight(plan, rank, plan.micro_batches(job.batch))
    again = 0.0
    if plan.recompute != "none":
        again = layer_activations(shape, _without_recompute(plan), width) - kept
    tokens = plan.micro_batch * shape.sequence
    values = tokens * shape.hidden / (plan.tensor if plan.sequence else 1)
    ends = values * flying if first and shape.dropout else 0.0
    if last:  # the loss is computed in f32
        ends += 2 * width * values + 4 * tokens * shape.vocab / plan.tensor
    buffers = 4 * width * values if plan.pipeline > 1 else 0.0
    # A table is as one layer, and is whole at work too.
    largest = max(layer, shape.table(plan.tensor)) if first or last else layer
    if plan.zero >= 2:
        buffers += largest * job.gradient_bytes
    if plan.zero == 3:
        buffers += (layer + largest) * width
    return MemoryUse(*states, layers * flying * kept, again, ends, buffers)


def ends_elements(shape: TransformerShape, plan: TrainingPlan, *, first: bool, last: bool) -> int:
    """Elements of the tables and the last norm of a rank; both ends of a pipeline have a shared table."""
    table = shape.table(plan.tensor)
    found = table + shape.positions * shape.hidden if first else 0
    if last:
        found += shape.last_norm + (0 if first and shape.tied else table)
    return found


def _without_recompute(plan: TrainingPlan) -> TrainingPlan:
    return TrainingPlan(tensor=plan.tensor, sequence=plan.sequence, micro_batch=plan.micro_batch)
