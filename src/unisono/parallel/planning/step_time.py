"""The seconds of a step of a recorded model under a plan: a first, simple model.

| part | is |
|---|---|
| compute | FLOPs of forward and twice of backward, at one rate, and a constant for each operator |
| recomputation | FLOPs of the units' forward again |
| tensor | the sums at the cut layers, forward and backward |
| messages | what goes from stage to stage, which the next stage waits for |
| bubble | the rest of a pipeline's ranks wait: (p - 1) of m + p - 1 micro-batches |
| data | reduction of gradients and gathering of parameters that compute does not hide |
| update | the optimizer reads and writes a rank's parameters, gradients and moments |

Not in it: the memory that an operator reads and writes, and the fixed cost of a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from unisono.parallel.layouts.cost import Link
from unisono.parallel.plan import Plan

__all__ = ["ModelWork", "RankSpeed", "StepEstimate", "step_time"]

SELECTIVE = 0.1  # of forward: the cheap operators
HIDDEN = 0.5  # of backward: during which gradients are reduced


class StepEstimate(NamedTuple):
    """Seconds of a step, by cause."""

    compute: float
    recomputation: float
    tensor: float
    messages: float
    bubble: float
    data: float
    update: float

    @property
    def total(self) -> float:
        """Of the step."""
        return sum(self)


@dataclass(frozen=True)
class RankSpeed:
    """What a rank does in a second.

    Args:
        flops: FLOPs of matrix products.    bytes: read from memory, or written.
        operator_s: seconds of an operator beside its work.
        inside, between: the links within a host and from host to host.
        host: ranks of a host.    hides: messages travel during compute.
    """

    flops: float
    bytes: float
    operator_s: float
    inside: Link
    between: Link
    host: int
    hides: bool = False

    def link(self, ranks: int, stride: int) -> Link:
        """That of a group of ranks `stride` apart."""
        return self.inside if ranks * stride <= self.host else self.between


@dataclass(frozen=True)
class ModelWork:
    """A model in numbers.

    Args:
        flops: of the forward of a row.    parameters: how many.
        sent: bytes of a row that go from stage to stage.
        summed: bytes of a row that the cut layers of a tensor axis sum in forward.    cut: the share of the
            FLOPs that they have.
        units: messages of the parameters.    operators: of a forward.
    """

    flops: float
    parameters: int
    sent: float
    summed: float
    cut: float
    units: int
    operators: int = 0


def step_time(work: ModelWork, plan: Plan, batch: int, speed: RankSpeed) -> StepEstimate:
    """Predict the seconds of a step.

    Args:
        batch: rows of all ranks.
    Example: 1e9 FLOPs a row, 8 rows, Plan(data=2), 1e12 FLOP/s: compute = 3 * 1e9 * 4 / 1e12 = 12 ms.
    """
    rows, stages, size = batch / plan.data, plan.pipeline, 4 if plan.precision == "f32" else 2
    share = (1 - work.cut + work.cut / plan.tensor) / stages
    fixed = plan.micro_batches * work.operators / stages * speed.operator_s
    forward = work.flops * rows * share / speed.flops + fixed
    again = {False: 0.0, "selective": SELECTIVE, True: 1.0}[plan.recompute] * forward
    parts = plan.micro_batches
    tensor = messages = 0.0
    if plan.tensor > 1:
        link, times = speed.link(plan.tensor, 1), 3 if plan.recompute is True else 2
        nbytes = work.summed * rows / parts / stages * size / 4
        tensor = times * parts * link.seconds("all_reduce", plan.tensor, nbytes)
    if stages > 1:
        link = speed.link(2, plan.ranks // stages)
        messages = 2 * parts * (link.latency_s + link.byte_s * work.sent * rows / parts * size / 4)
    busy = 3 * forward + again + tensor + messages
    held = work.parameters / plan.tensor / stages
    data = _data_seconds(work, plan, held, forward, speed) if plan.data > 1 else 0.0
    own = held / plan.shards
    update = own * 4 * 7 / speed.bytes  # AdamW reads four numbers of a parameter and writes three
    return StepEstimate(3 * forward, again, tensor, messages, busy * (stages - 1) / parts, data, update)


def _data_seconds(work: ModelWork, plan: Plan, held: float, forward: float, speed: RankSpeed) -> float:
    """What the data axis takes and compute does not hide."""
    link, low = speed.link(plan.data, plan.tensor), 4 if plan.precision == "f32" else 2
    units = max(1, work.units // plan.pipeline)
    calls = plan.micro_batches if plan.zero >= 2 else 1
    if plan.zero == 0:
        seconds = link.seconds("all_reduce", plan.data, held * 4)
    else:
        gathers = 2 * plan.micro_batches if plan.zero == 3 else 1
        scatter = units * link.seconds("reduce_scatter", plan.data, held * 4 / units)
        gather = units * link.seconds("all_gather", plan.data, held * low / units / plan.data)
        seconds = calls * scatter + gathers * gather
    return max(0.0, seconds - 2 * forward * HIDDEN) if speed.hides else seconds
