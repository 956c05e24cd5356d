"""What a step moves beside its layers: gradients, the parameters that ZeRO shares, and what is swapped.

Gradients are reduced and parameters gathered layer by layer. Under hybrid sharding a group reduces to shares,
whose gradients the replicas sum once in a step. Copies of an expert are fewer: they exchange their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from unisono.planner.collectives import GroupPrices, PlannedCollective
from unisono.planner.layer_time import memory_rate
from unisono.planner.memory import RankElements
from unisono.planner.training_plan import TrainingJob, TrainingPlan, codec_rank

__all__ = ["PassTime", "codec_s", "data_collectives", "swap_s"]


class PassTime(NamedTuple):
    """Seconds of a rank's layers and a micro-batch, forward and backward."""

    forward_s: float
    backward_s: float
    layers: int


class _Copies(NamedTuple):
    """Ranks with the same elements: `sharers` share them under ZeRO, and there are `replicas` of these."""

    elements: float
    sharers: int
    stride: int
    replicas: int

    @property
    def all(self) -> int:
        return self.sharers * self.replicas


class _LayerwiseCall(NamedTuple):
    """A collective on a whole buffer of `nbytes`, which is cut into layers."""

    name: str
    axis: str
    size: int
    stride: int
    nbytes: float


class _DataPhase(NamedTuple):
    """Calls that travel together, `times` in a step, beside `window_s` of compute."""

    calls: list[_LayerwiseCall]
    times: int
    window_s: float


def data_collectives(
    job: TrainingJob, plan: TrainingPlan, elements: RankElements, passes: PassTime, prices: GroupPrices
) -> list[PlannedCollective]:
    """Gradients and gathered parameters of a step."""
    if plan.copies == 1:
        return []
    found = []
    for phase in _phases(job, plan, _copies(plan, elements), passes):
        units = passes.layers
        once = [
            units * prices.collective_s(each.name, each.size, each.stride, each.nbytes / units)
            for each in phase.calls
        ]
        total = sum(once)
        exposed = max(total / units, total - phase.window_s) if job.overlap else total
        for call, seconds in zip(phase.calls, once, strict=True):
            waited = exposed * seconds / total if total else 0.0
            found.append(
                PlannedCollective(
                    call.name,
                    call.axis,
                    call.size,
                    call.nbytes / units,
                    phase.times * units,
                    phase.times * seconds,
                    phase.times * waited,
                )
            )
    return found


def _copies(plan: TrainingPlan, elements: RankElements) -> list[_Copies]:
    stride = plan.tensor
    found = [_Copies(elements.common, plan.sharers, stride, plan.copies // plan.sharers)]
    if elements.experts and plan.expert < plan.copies:
        replicas = plan.copies // plan.expert // plan.expert_sharers
        found.append(_Copies(elements.experts, plan.expert_sharers, stride * plan.expert, replicas))
    return found


def _phases(
    job: TrainingJob, plan: TrainingPlan, groups: list[_Copies], passes: PassTime
) -> Iterator[_DataPhase]:
    count = plan.micro_batches(job.batch)

    def calls(name: str, width: float) -> list[_LayerwiseCall]:
        return [
            _LayerwiseCall(name, "data", each.sharers, each.stride, each.elements * width)
            for each in groups
            if each.sharers > 1
        ]

    if plan.zero == 0:
        width = gradient_bytes(job, plan)
        whole = [
            _LayerwiseCall("all_reduce", "data", each.all, each.stride, each.elements * width)
            for each in groups
        ]
        yield _DataPhase(whole, 1, passes.backward_s)
        return
    rounds = count if plan.zero >= 2 else 1
    window = passes.backward_s / (2 if plan.zero == 3 else 1)
    yield _DataPhase(calls("reduce_scatter", job.gradient_bytes), rounds, window)
    between = [
        _LayerwiseCall(
            "all_reduce",
            "replica",
            each.replicas,
            each.stride * each.sharers,
            each.elements * job.gradient_bytes / each.sharers,
        )
        for each in groups
        if each.replicas > 1
    ]
    yield _DataPhase(between, 1, 0.0)
    yield _DataPhase(calls("all_gather", job.width), rounds if plan.zero == 3 else 1, passes.forward_s)
    if plan.zero == 3:
        yield _DataPhase(calls("all_gather", job.width), rounds, window)


def gradient_bytes(job: TrainingJob, plan: TrainingPlan) -> float:
    """Bytes of a gradient as it travels. Scales of int8 are f32, one for 64 values; factors are bf16."""
    if rank := codec_rank(plan.codec):
        shape = job.shape
        matrices = shape.layer_matrices(plan.tensor, experts=not shape.dense_layers)
        factors = sum(min(2 * rank * (n + k), 4 * n * k) for n, k in matrices)
        return factors / sum(n * k for n, k in matrices)
    return {"none": job.gradient_bytes, "bf16": 2.0, "int8": 1 + 4 / 64}[plan.codec]


def codec_s(job: TrainingJob, plan: TrainingPlan, elements: RankElements) -> float:
    """What coding of a step's gradients takes, at the memory's rate.

    Codes: gradients and errors are read, codes and errors written, and sums decoded: 16 bytes and two codes.
    Low rank: the matrix and its errors are read for both products and the new errors, which are written.
    """
    if plan.codec == "none":
        return 0.0
    width = 4 * 5 if codec_rank(plan.codec) else 4 * 4 + 2 * gradient_bytes(job, plan)
    return elements.total * width / memory_rate(job.hardware)


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
