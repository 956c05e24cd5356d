"""What swapping to the host's memory takes: bytes over the rank's link there, beside compute."""

from __future__ import annotations

from unisono.planner.data_axis import PassTime
from unisono.planner.memory import RankElements
from unisono.planner.training_plan import TrainingJob, TrainingPlan

__all__ = ["swap_s"]


def swap_s(
    job: TrainingJob, plan: TrainingPlan, elements: RankElements, passes: PassTime, update_s: float
) -> float:
    """Seconds of a step in which a rank waits for the host's memory.

    "moments" come in while others go out, beside the update. "states": parameters come before forward and
    again before backward, gradients go (and come, where they add up over micro-batches, and to be averaged),
    and the update has all three in and writes parameters and moments. The link works both ways at once.
    Source: Ren et al., ZeRO-Offload, 2021 (arXiv:2101.06840); as `unisono.parallel` swaps.
    """
    if plan.swap == "none" or job.hardware.host is None:
        return 0.0
    rate = job.hardware.host.bytes_per_s * job.hardware.efficiency.links
    count = elements.shared(plan) if plan.zero else elements.total
    moments = count * job.moment_bytes / rate
    if plan.swap == "moments":
        return max(0.0, moments - update_s)
    micro_batches = plan.micro_batches(job.batch)
    parameters, gradients = count * job.width / rate, count * job.gradient_bytes / rate
    read_back = gradients if micro_batches > 1 else 0.0
    forward = max(parameters / passes.layers, parameters - passes.forward_s)
    backward = max(parameters / passes.layers, max(parameters + read_back, gradients) - passes.backward_s)
    averaged = gradients if plan.copies > 1 else 0.0
    return (
        micro_batches * (forward + backward)
        + averaged
        + max(0.0, parameters + gradients + moments - update_s)
    )
