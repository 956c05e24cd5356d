"""What a rank does with parameters and gradients in a step, priced: units, replicas, updates, swapping.

Compressed gradients are bytes of codes and factors, and the work to make them. The steps at the beginning
that send gradients exactly (`start=`) do not count.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch

from unisono.codecs.codec import Codec
from unisono.errors import UnfitError
from unisono.parallel.replicated_parameters import BUCKET_BYTES

from .operators import HostStarts, OperatorPoint, TracedOperator
from .step_parts import ADAM_OPERATORS, CompressedGradients, ParameterSizes, StepParts
from .trace import NO_UNIT, TracedStep

if TYPE_CHECKING:
    from unisono.parallel.compression.settings import CompressionSettings
    from unisono.parallel.plan import Plan


class DataWork(NamedTuple):
    """Seconds of the data axis: copies, collectives, and the host's hooks."""

    compute: float = 0.0
    communication: float = 0.0
    host: float = 0.0


class ParameterWork:
    """Prices of one plan. All of a stage, on one of its ranks."""

    def __init__(self, parts: StepParts) -> None:
        self._parts, self._plan, self._runtime, self._host = parts, parts.plan, parts.runtime, parts.host
        self._width = 4 if parts.plan.precision == "f32" else 2
        self._reduce_width = 4 if parts.plan.reduce == "f32" else self._width

    def members(self, axis: str) -> list[int]:
        """The ranks of the slowest group of an axis: tensor is the fastest, then shard, replica, pipeline."""
        plan, shards = self._plan, self._plan.sharers  # the context axis shares what data ranks do
        size, stride = {
            "shard": (shards, plan.tensor),
            "replica": (plan.copies // shards, plan.tensor * shards),
            "copies": (plan.copies, plan.tensor),
        }[axis]
        return self._host.groups.slowest(size, stride)

    def _hooked(self, size: ParameterSizes) -> float:
        """Seconds of the host to gather or to reduce a unit, which is half of what a unit takes."""
        runtime = self._runtime
        each_s = runtime.unit_parameter_s
        if self._plan.precision != "f32":
            each_s = max(0.0, runtime.low_parameter_s + self._host.shared.low_parameter_s)
        taken = runtime.unit_s + each_s * size.number
        return taken / 2 + self._host.operators.launch(
            HostStarts.MOVED + HostStarts.PARAMETER_MOVED * size.number
        )

    @cached_property
    def _in_backward(self) -> set[str]:
        """Units through which gradients go."""
        return {each.unit for each in self._parts.traced.operators if each.phase == "backward"}

    def passed(self, stage: int) -> float:
        """Seconds of the host for the units of a stage in one pass that neither gathers nor reduces them."""
        units = self._parts.units.get(stage, {}) if self.sharded else {}
        return self._runtime.passed_s / 2 * len(units)

    def _copied(self, nbytes: float) -> float:
        light, per_byte = self._host.operators.light, self._runtime.unit_byte_s
        return light(2 * nbytes) if self._host.operators.queued else per_byte / 2 * nbytes

    def gathered(self, stage: int, *, again: bool = False) -> DataWork:
        """Seconds to gather all units of a stage once.

        Args:
            again: for backward, which begins right after the forward of a root where there is one stage.
        """
        host = compute = communication = 0.0
        for unit, sizes in self._parts.units.get(stage, {}).items():
            if again and unit == NO_UNIT and self._plan.pipeline == 1:
                continue
            if again and not sizes.number and unit not in self._in_backward:
                continue
            size = sizes.whole
            nbytes = size.elements * self._width
            host += self._hooked(size)
            compute += self._copied(nbytes)
            communication += self._host.reductions.seconds("all_gather", self.members("shard"), nbytes)
        return DataWork(compute, communication, host)

    def reduced(self, stage: int) -> DataWork:
        """Seconds to reduce all gradients of a stage once."""
        if self._plan.zero == 0 and self._plan.precision == "f32":
            return self._replicas_reduced(stage)
        axis = "shard" if self._plan.zero else "replica"
        what = "reduce_scatter" if self._plan.zero else "all_reduce"
        host = compute = communication = 0.0
        replicas = self._plan.copies > self._plan.sharers and self._plan.local_steps is None
        if self._parts.compressed and self._plan.copies > 1:
            compute, communication = self._compressed(stage, "replica" if replicas else "shard")
        compressed = bool(self._parts.compressed)
        for size in self._trained(stage):
            nbytes = size.elements * self._reduce_width
            host += self._hooked(size)
            compute += self._copied(nbytes)
            if compressed and not (self._plan.zero and replicas):
                continue
            if self._plan.zero or self._plan.local_steps is None:
                communication += self._host.reductions.seconds(what, self.members(axis), nbytes)
            if self._plan.zero and replicas and not compressed:
                part = nbytes / self._plan.sharers
                communication += self._host.reductions.seconds("all_reduce", self.members("replica"), part)
        return DataWork(compute, communication, host)

    def _replicas_reduced(self, stage: int) -> DataWork:
        if self._plan.copies == 1 or self._plan.local_steps is not None:
            return DataWork()
        sizes = self._trained(stage)
        nbytes = 4 * sum(size.elements for size in sizes)
        whole, rest = divmod(nbytes, BUCKET_BYTES)
        compute = self._host.operators.light(2 * nbytes)
        host = self._runtime.parameter_s * sum(size.number for size in sizes)
        if self._parts.compressed:
            coding, communication = self._compressed(stage, "copies")
            return DataWork(compute + coding, communication, host)
        communication = 0.0
        for size in [BUCKET_BYTES] * int(whole) + [rest] * bool(rest):
            host += self._runtime.bucket_s
            communication += self._host.reductions.seconds("all_reduce", self.members("copies"), size)
        return DataWork(compute, communication, host)

    def _compressed(self, stage: int, axis: str) -> tuple[float, float]:
        """Seconds to average the compressed gradients of a stage: coding, communication."""
        sent, prices, collectives = self._parts.compressed[stage], self._host.operators, self._host.reductions
        members, number = self.members(axis), sent.buckets

        def over(elements: int, codec: Codec | None) -> float:
            nbytes = 4 * elements / number
            if not elements:
                return 0.0
            if codec is None:
                return number * collectives.seconds("all_reduce", members, nbytes)
            return number * collectives.coded(members, nbytes, codec)

        communication = over(sent.exact, None)
        communication += sum(over(elements, codec) for codec, elements in sent.coded.items())
        left, right = (sum(each[side] * each[2] for each in sent.matrices) for side in (0, 1))
        communication += over(left, sent.factors) + over(right, sent.factors)
        coding = prices.light(EXACT_BYTES * sent.exact) if sent.exact else 0.0
        for elements in sent.coded.values():
            coding += prices.light(CODED_BYTES * elements)
        for rows, columns, rank in sent.matrices:
            product = OperatorPoint("product", (float(rows), float(columns), float(rank)))
            coding += 3 * prices.seconds(TracedOperator(product, "update", -1, NO_UNIT, followed=False))
            coding += prices.light(RANKED_BYTES * rows * columns + 8 * PASSES * rank * (rows + columns))
        return coding, communication

    def met(self, stage: int) -> DataWork:
        """A step's share of a meeting of replicas."""
        elements = (
            sum(size.elements for size in self._parts.units.get(stage, {}).values()) / self._plan.sharers
        )
        steps = self._plan.local_steps or 1
        compute = self._host.operators.light(9 * 4 * elements)
        if self._parts.compressed:
            coding, communication = self._compressed(stage, "replica")
            return DataWork((compute + coding) / steps, communication / steps)
        communication = self._host.reductions.seconds("all_reduce", self.members("replica"), 4 * elements)
        return DataWork(compute / steps, communication / steps)

    def swapped(self, stage: int) -> float:
        """Parameters are read for forward and backward, gradients written; all states are read and written.

        Source: as swap.py does it, four bytes of an element each.
        """
        sizes, parts = self._parts.units.get(stage, {}).values(), self._plan.micro_batches
        trained = sum(size.elements for size in sizes)
        read = 2 * parts * sum(size.whole.elements for size in sizes)
        return 4 * (read + trained * (2 * parts - 1 + 4 + 3)) / self._parts.swap_rate

    def accumulated(self, stage: int) -> float:
        """Seconds to add the gradients of one more micro-batch."""
        elements = sum(size.elements for size in self._parts.units.get(stage, {}).values())
        width = self._width
        if self._plan.reduces_early:
            elements, width = elements // self._plan.sharers, self._reduce_width
        return self._host.operators.light(3 * elements * width)

    def updated(self, stage: int) -> float:
        """Seconds of the optimizer on a rank's share, with what clips and scales gradients."""
        sizes = self._trained(stage)
        held = sum(size.elements for size in sizes)
        every = sum(size.elements for units in self._parts.units.values() for size in units.values())
        if not held:
            return 0.0
        share, parts = held / every * self._parts.spread, 1 / self._plan.sharers
        if self._parts.update_s is None:  # as Adam: two moments
            taken = ADAM_OPERATORS * sum(
                self._host.operators.light(10 * size.elements * parts / size.number) * size.number
                for size in sizes
            )
        else:
            taken = share * self._parts.update_s
        if self._plan.clip is not None or self._plan.precision == "fp16":
            taken += self._host.operators.light(12 * held * parts) + self._runtime.parameter_s * sum(
                s.number for s in sizes
            )
        return taken

    def started(self, stage: int) -> float:
        """Seconds of the host for an update that a device runs: its operators, and each parameter."""
        if not self._host.operators.queued:
            return 0.0
        number = sum(size.number for size in self._parts.units.get(stage, {}).values())
        return self._host.operators.launch(self._parts.update_operators) + self._runtime.parameter_s * number

    def _trained(self, stage: int) -> list[ParameterSizes]:
        """The units of a stage that have trained parameters."""
        return [size for size in self._parts.units.get(stage, {}).values() if size.number]

    @property
    def sharded(self) -> bool:
        """Whether parameters are gathered for compute, from other ranks or from another type."""
        return self._plan.zero > 0 or self._plan.precision != "f32"


# ---- compressed gradients ----

EXACT_BYTES = 16
"""Moved for an element that is sent as it is: into one vector and back."""

CODED_BYTES = 52
"""Moved for an element that is coded: into a vector, the error added, a copy, result and error back."""

RANKED_BYTES = 36
"""Moved for an element of a matrix of low rank, beside its three products: the error added and kept."""

PASSES = 4
"""Over an element of a factor: to make it orthonormal in f64, and to send it."""


def compressed_gradients(
    plan: Plan, traced: TracedStep, stages: Sequence[int]
) -> dict[int, CompressedGradients]:
    """What a rank of each stage sends; empty: whole gradients.

    Args:
        stages: that of each module call.
    Raises:
        ValueError: the gradients are not in f32, in the memory of a host, or a rule of the settings has no
            such choice.    TypeError: likewise.
    """
    settings = plan.compression
    if settings is None:
        return {}
    shapes: dict[int, list[tuple[str, Sequence[int]]]] = {stage: [] for stage in range(plan.stages)}
    for name, value in traced.model.named_parameters():
        if not value.requires_grad:
            continue
        if value.dtype != torch.float32 or value.device.type not in ("cpu", "meta"):
            raise UnfitError(
                f"compression takes f32 gradients in CPU memory, and {name!r} is {value.dtype} on "
                f"{value.device}"
            )
        call, shape = traced.homes.get(name, (-1, NO_UNIT))[0], tuple(value.shape)
        if plan.copies > plan.sharers and shape:  # the rows of a rank, where groups of shards are replicas
            shape = -(-shape[0] // plan.sharers), *shape[1:]
        shapes[stages[call] if call >= 0 else 0].append((name, shape))
    return {stage: _sent(settings, each) for stage, each in shapes.items()}


def _sent(settings: CompressionSettings, shapes: Iterable[tuple[str, Sequence[int]]]) -> CompressedGradients:
    """What these settings make of parameters.

    Example: PowerSGD(rank=4) sends 4 * (1024 + 4096) elements of a matrix of 1024 x 4096.
    """
    exact, coded, matrices = 0, defaultdict[Codec, int](int), list[tuple[int, int, int]]()
    for name, shape in shapes:
        numel = math.prod(shape)
        choice = settings.choice(name, shape)
        if isinstance(choice, Codec):
            coded[choice] += numel
        elif isinstance(choice, int) and numel:
            matrices.append((shape[0], numel // shape[0], choice))
        else:
            exact += numel
    return CompressedGradients(exact, coded, matrices, settings.low_rank.codec)
