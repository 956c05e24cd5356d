"""The plans of the census, and which of them apply to a model."""

import dataclasses

import unisono.parallel as up

from .animals import NORMALISED_BY_BATCH, USED_UNEVENLY, WITH_EXPERTS, WITHOUT_SEQUENCES

PLANS: dict[str, up.Plan] = {
    "data": up.Plan(data=2),
    "zero=1": up.Plan(data=2, zero=1),
    "zero=2": up.Plan(data=2, zero=2, micro_batches=2),
    "zero=3": up.Plan(data=2, zero=3),
    "recompute": up.Plan(data=2, recompute=True),
    "selective": up.Plan(data=2, zero=1, recompute="selective"),
    "bf16": up.Plan(data=2, precision="bf16"),
    "swap": up.Plan(data=2, swap="disk"),
    "tensor": up.Plan(tensor=2),
    "sequence": up.Plan(tensor=2, sequence=True),
    "tensor recompute": up.Plan(tensor=2, recompute=True),
    "tensor bf16": up.Plan(tensor=2, precision="bf16"),
    "tensor zero=1": up.Plan(data=2, tensor=2, zero=1),
    "tensor zero=3": up.Plan(data=2, tensor=2, zero=3, micro_batches=2),
    "pipeline": up.Plan(pipeline=2, micro_batches=2),
    "interleaved": up.Plan(pipeline=2, micro_batches=2, schedule="interleaved"),
    "zb-h1": up.Plan(pipeline=2, micro_batches=2, schedule="zb-h1"),
    "tensor pipeline": up.Plan(tensor=2, pipeline=2, micro_batches=2),
    "context": up.Plan(context=2),
    "context zero=3": up.Plan(context=2, zero=3, recompute=True),
    "expert": up.Plan(data=2, expert=2),
    "expert zero=3": up.Plan(data=2, expert=2, zero=3, micro_batches=2),
}
"""Of 2 ranks and of 4, on CPUs."""

GPU_PLANS: dict[str, up.Plan] = {
    "tensor": up.Plan(tensor=4),
    "tensor sequence": up.Plan(data=2, tensor=2, sequence=True),
    "tensor zero=3": up.Plan(data=2, tensor=2, zero=3),
    "pipeline": up.Plan(pipeline=2, data=2, micro_batches=2),
    "pipeline zero=1": up.Plan(pipeline=2, data=2, zero=1, micro_batches=2, schedule="zb-h1"),
    "tensor pipeline": up.Plan(tensor=2, pipeline=2, micro_batches=2),
}
"""Of 4 ranks, on virtual GPUs."""


def not_applicable(animal: str, plan: up.Plan) -> str:
    """Why a plan means nothing to a model; "" where it applies."""
    if plan.expert > 1 and animal not in WITH_EXPERTS:
        return "has no experts"
    if plan.context > 1 and animal in WITHOUT_SEQUENCES:
        return "has no sequence in dimension 1 of its inputs"
    if animal in NORMALISED_BY_BATCH and plan.micro_batches > 1:
        return "BatchNorm takes the rows of one micro-batch, so its losses are not those of one process"
    return ""


def fitted(animal: str, plan: up.Plan) -> up.Plan:
    """The plan with what a model needs, so that its losses are those of one process."""
    by_batch = animal in NORMALISED_BY_BATCH and plan.data > 1
    uneven = animal in USED_UNEVENLY
    return dataclasses.replace(plan, clip=1e9, sync_batch_norm=by_batch, uneven_use=uneven)
