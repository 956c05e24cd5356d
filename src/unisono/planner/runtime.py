"""A plan as arguments of `unisono.parallel.Plan`. Nothing here imports it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

from unisono.errors import UnfitError
from unisono.planner.training_plan import TrainingJob, TrainingPlan

__all__ = ["Runtime", "runtime_arguments", "runtime_problem"]

Runtime = Callable[..., object]
"""`unisono.parallel.Plan`: it raises UnfitError for arguments that it does not run."""


def runtime_arguments(plan: TrainingPlan, job: TrainingJob, before: int = 1) -> dict[str, Any]:
    """The arguments of `unisono.parallel.Plan` for this plan. It balances stages itself, so `tail` is none.

    `layers` are its `cuts`, which count pieces: `before` is how many pieces are before the first layer.

    Raises:
        UnfitError: that runtime has nothing that was priced so; the text says what it has.
    """
    if plan.recompute == "selective":
        raise UnfitError(
            "unisono.parallel recomputes other operators under recompute=selective than were priced: "
            "plan with recompute=full or none"
        )
    if plan.swap == "moments":
        raise UnfitError("unisono.parallel swaps all states or none: plan with swap=states or none")
    if plan.codec != "none":
        name = 'Compressed("' + plan.codec + '")'
        name = f"PowerSGD({plan.codec[4:]})" if plan.codec.startswith("rank") else name
        raise UnfitError(f"codec={plan.codec}: write the plan with compression=up.{name}")
    if plan.rows:
        raise UnfitError("unisono.parallel gives all data ranks equal rows: plan with rows=equal")
    found: dict[str, Any] = {
        "data": plan.data,
        "context": plan.context,
        "tensor": plan.tensor,
        "sequence": plan.sequence,
        "pipeline": plan.pipeline,
        "expert": plan.expert,
        "zero": plan.zero,
        "shard": plan.shard or None,
        "micro_batches": plan.micro_batches(job.batch),
        "recompute": plan.recompute == "full",
        "precision": plan.compute or job.compute,
        "reduce": job.reduce,
        "swap": "memory" if plan.swap == "states" else None,
    }
    if plan.interleave > 1:
        found |= {"schedule": "interleaved", "stages_per_rank": plan.interleave}
    elif plan.pipeline > 1:
        found["schedule"] = plan.schedule
    if plan.layers:
        chunks = [each // plan.interleave for each in plan.layers] * plan.interleave
        found["cuts"] = tuple(before + end for end in accumulate(chunks[:-1]))
    return found


def runtime_problem(runtime: Runtime | None, plan: TrainingPlan, job: TrainingJob) -> str:
    """Why a runtime does not run a plan; "" if it does."""
    if runtime is None:
        return ""
    try:
        runtime(**runtime_arguments(plan, job))
    except UnfitError as error:
        return str(error)
    return ""
